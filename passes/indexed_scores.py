"""Index scores: sums over index heads of weighed products of queries and keys.

score[q, k] = scale * sum_i weights[q, i] * f(query[q, i] . key[k])            f the identity or relu
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from torch import fx

from regraft.rewriter.attention_rows import Rows, find_rows
from regraft.rewriter.elements import Elements
from regraft.rewriter.formulas import Cell, number
from regraft.rewriter.indexing import Element
from regraft.rewriter.integers import ZERO, Expr, Index
from regraft.rewriter.masks import shorten
from regraft.rewriter.pattern import Declined
from regraft.rewriter.products import Product, multiplied
from regraft.rewriter.scores import Axes


@dataclass(frozen=True)
class Scoring:
    """Everything of a score but the keys: index queries [T, I, E], weights [T, I], and how they are put together."""

    query: Rows
    weights: Rows
    head: Index
    scale: float
    relu: bool


def node_named(cell: Expr, graph: fx.Graph) -> fx.Node:
    """The node that a cell is an element of."""
    return next(node for node in graph.nodes if node.name == cell.args[0].name)


def product_of(cell: Expr, graph: fx.Graph, name: str) -> Product | None:
    """The elements that a cell is the sum of products of; None if it is none."""
    return multiplied(node_named(cell, graph), cell.args[1:], name)


def read_weighed(
    formula: Expr, elements: Elements, axes: Axes, key_index: Expr, topk: fx.Node
) -> tuple[Scoring, Element, Index] | Declined:
    """Take the score of (q, key) apart: (scoring, the element of the key that queries meet, the index of its width).

    `formula` is the score where it is not hidden, `key_index` what tells the keys apart.
    """
    graph, cells = topk.graph, formula.atoms(Cell)
    outer = product_of(next(iter(cells)), graph, "i") if len(cells) == 1 else None
    if outer is None:
        return Declined(f"index scores are no product: {shorten(formula)}", topk, 0.6)
    scale = formula.coeff(next(iter(cells)))
    if sympy.expand(formula - scale * next(iter(cells))) != 0 or not scale.is_number or scale <= 0:
        return Declined(f"index scores are no scaled product: {shorten(formula)}", topk, 0.6)
    left, right, head = outer
    if _names(left, key_index):
        left, right = right, left
    if _names(left, key_index) or not _names(right, key_index):
        return Declined("index scores are no sum over heads that weigh products", topk, 0.6)
    inner = _read_activation(number(elements.at(*right)))
    if isinstance(inner, Declined):
        return Declined(inner.reason, topk, 0.6)
    relu, inner_scale, cell = inner
    products = product_of(cell, graph, "e")
    if products is None:
        return Declined(f"index scores weigh no products: {shorten(cell)}", topk, 0.6)
    query, key, feature = products
    if _names(query, key_index):
        query, key = key, query
    queries = [
        rows
        for rows in find_rows(query, axes.q, feature, head)
        if rows.heads == head.size and rows.head == head
    ]
    weights = [rows for rows in find_rows(left, axes.q, head, Index("h", 1)) if rows.heads == 1]
    for name, element, found in (("queries", query, queries), ("weights", left, weights)):
        if not found:
            return Declined(f"index {name} are not laid out as rows", element[0], 0.7)
    scoring = Scoring(queries[-1], weights[-1], head, float(scale) * inner_scale, relu)
    return scoring, key, feature


def _names(element: Element, index: Expr) -> bool:
    return any(index in at.free_symbols for at in element[1])


def _read_activation(formula: Expr) -> tuple[bool, float, Cell] | Declined:
    """(whether it is relu, scale, cell) of `scale * cell` or `scale * relu(cell)`, scale > 0 within relu."""
    cells = formula.atoms(Cell)
    factor, relu = formula, False
    maxima = [f for f in sympy.Mul.make_args(formula) if isinstance(f, sympy.Max)]
    if len(maxima) == 1 and ZERO in maxima[0].args and len(maxima[0].args) == 2:
        (inside,) = (arg for arg in maxima[0].args if arg != ZERO)
        factor, relu = sympy.expand(formula / maxima[0]) * inside, True
    if len(cells) == 1:
        (cell,) = cells
        scale = factor.coeff(cell)
        inner = inside.coeff(cell) if relu else sympy.Integer(1)
        if scale.is_number and sympy.expand(factor - scale * cell) == 0 and inner > 0:
            return relu, float(scale), cell
    return Declined(f"index scores are no known function of a product: {shorten(formula)}")
