"""Reading a mask that lets only selected keys through: a scatter of the top-k of index scores.

products[q, i, k] = iq[q, i] . ik[k]                                  one index key a token, shared by the index heads
scores[q, k] = sum_i w[q, i] * relu(c * products[q, i, k])            hidden where k > q
mask[q, k] = k is among the top-k of scores[q]                        in any spelling whose elements say so
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from regraft.rewriter.attention_core import Core
from regraft.rewriter.attention_rows import Rows, find_rows
from regraft.rewriter.elements import Elements
from regraft.rewriter.formulas import Cell, cases, in_one_request, number
from regraft.rewriter.graph import is_aten
from regraft.rewriter.indexing import Element, argument, arguments, size_value, sizes_of, trace
from regraft.rewriter.integers import ZERO, Expr, Index
from regraft.rewriter.masks import Relation, is_possible, shorten
from regraft.rewriter.pattern import Declined
from regraft.rewriter.products import Product, multiplied
from regraft.rewriter.scores import MASKED, Axes, is_masked, read_score


@dataclass(frozen=True)
class Indexer:
    """What selects the keys: the top-k, and the index queries, keys and head weights that its scores are made of.

    A score is `scale * sum_i weights[i] * f(query[i] . key)`, f the identity or relu, for keys where `relation` holds.
    """

    topk: fx.Node
    count: int
    relation: Relation
    query: Rows
    key: Rows
    weights: Rows
    scale: float
    relu: bool


def find_selection(core: Core, masked: float = MASKED) -> tuple[Core, Indexer] | Declined:
    """The attention as it is for selected keys, and what selects them. Every other key must be hidden."""
    scattered = {}
    for cell in core.score.atoms(Cell):
        node = node_named(cell, core.closer.graph)
        if is_aten(node, "scatter"):
            scattered[cell] = node
    if len(scattered) != 1:
        return Declined(f"the mask is made of {len(scattered)} selections", core.closer)
    ((cell, scatter),) = scattered.items()
    values = _two_values(scatter, cell)
    if isinstance(values, Declined):
        return values
    chosen, left_out = (core.score.xreplace({cell: value}) for value in values)
    seen = [
        leaf
        for when, leaf in cases(in_one_request(number(left_out)))
        if not is_masked(leaf, masked) and is_possible(when, core.axes.q, core.axes.k)
    ]
    if seen:
        return Declined(f"keys that are not selected have scores: {shorten(seen[0])}", scatter, 0.4)
    indexer = _read_topk(scatter, cell, core.axes, masked)
    if isinstance(indexer, Declined):
        return indexer
    return replace(core, score=chosen), indexer


def node_named(cell: Expr, graph: fx.Graph) -> fx.Node:
    """The node that a cell is an element of."""
    return next(node for node in graph.nodes if node.name == cell.args[0].name)


def _two_values(scatter: fx.Node, cell: Expr) -> tuple[Expr, Expr] | Declined:
    """The tensor's value where something was scattered to, and elsewhere: constants that differ."""
    base, _, _, value = arguments(scatter)[:4]
    elsewhere = number(Elements(scatter.graph).at(base, cell.args[1:]))
    if isinstance(value, fx.Node) or len(arguments(scatter)) > 4 or scatter.kwargs:
        return Declined("what is scattered into the mask is no constant", scatter, 0.4)
    there = sympy.sympify(int(value) if isinstance(value, bool) else value)
    if not elsewhere.is_number or there == elsewhere:
        return Declined("the mask before the scatter is no other constant", scatter, 0.4)
    return there, elsewhere


def _read_topk(scatter: fx.Node, cell: Expr, axes: Axes, masked: float) -> Indexer | Declined:
    """Follow the scattered indices back to a top-k, and its scores to the indexer's rows."""
    dim = arguments(scatter)[1] % (len(cell.args) - 1)
    place = list(cell.args[1:])
    if place[dim] != axes.k or sum(axes.q == at for at in place) != 1:
        return Declined("the selection is not one of keys for each query", scatter, 0.4)
    rank = Index("j", sizes_of(arguments(scatter)[2])[dim])
    place[dim] = rank
    node, where = _through_casts(arguments(scatter)[2], tuple(place))
    topk = arguments(node)[0] if len(arguments(node)) == 2 else None
    if not (isinstance(topk, fx.Node) and is_aten(topk, "topk") and arguments(node)[1] == 1):
        return Declined("the selected keys are not the indices of a top-k", node, 0.4)
    dim = argument(topk, 2, "dim", -1) % len(where)
    if where[dim] != rank or argument(topk, 3, "largest", True) is not True:
        return Declined("the top-k is not of the largest scores of a query", topk, 0.4)
    count = _count(topk)
    if count is None:
        return Declined("the number of selected keys is no constant", topk, 0.4)
    scores: Element = (arguments(topk)[0], (*where[:dim], axes.k, *where[dim + 1 :]))
    return _read_scores(topk, count, scores, axes, masked)


def _through_casts(node: fx.Node, place: tuple[Expr, ...]) -> Element:
    """Where an index comes from; casts between integers that hold any position keep it."""
    while True:
        node, place = trace(node, place)[-1]
        wide = node.meta.get("dtype") in (torch.int32, torch.int64)
        if not (is_aten(node, "_to_copy", "to") and wide):
            return node, place
        source = arguments(node)[0]
        if source.meta["dtype"] not in (torch.int32, torch.int64):
            return node, place
        node = source


def _count(topk: fx.Node) -> int | None:
    """k, where the top-k takes k or as many as there are."""
    size = size_value(arguments(topk)[1])
    if isinstance(size, sympy.Min):
        numbers = [arg for arg in size.args if arg.is_Integer]
        size = numbers[0] if len(numbers) == 1 and len(size.args) == 2 else None
    return int(size) if size is not None and size.is_Integer and size > 0 else None


def _read_scores(
    topk: fx.Node, count: int, scores: Element, axes: Axes, masked: float
) -> Indexer | Declined:
    graph = topk.graph
    one_head = Axes(Index("h", 1), axes.q, axes.k)

    def product_of(cell: Expr, name: str) -> Product | None:
        return multiplied(node_named(cell, graph), cell.args[1:], name)

    value = Elements(graph).at(*scores)
    score = read_score(
        value, None, one_head, lambda cell: product_of(cell, "i") is not None, masked
    )
    if isinstance(score, Declined):
        return Declined(f"index scores: {score.reason}", score.node or topk, 0.6)
    if (
        score.softcap
        or score.slope is not None
        or score.by_distance is not None
        or score.scale <= 0
    ):
        return Declined(f"index scores are no scaled sum of products: {score}", topk, 0.6)
    outer = product_of(score.product, "i")
    assert outer is not None
    left, right, head = outer
    if _names(left, axes.k):
        left, right = right, left
    if _names(left, axes.k) or not _names(right, axes.k):
        return Declined("index scores are no sum over heads that weigh products", topk, 0.6)
    inner = _read_activation(number(Elements(graph).at(*right)))
    if isinstance(inner, Declined):
        return Declined(inner.reason, topk, 0.6)
    relu, scale, cell = inner
    products = product_of(cell, "e")
    if products is None:
        return Declined(f"index scores weigh no products: {shorten(cell)}", topk, 0.6)
    rows = _rows(products, left, head, one_head)
    if isinstance(rows, Declined):
        return rows
    return Indexer(topk, count, score.relation, *rows, score.scale * scale, relu)


def _names(element: Element, index: Index) -> bool:
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


def _rows(
    products: Product, weights: Element, head: Index, axes: Axes
) -> tuple[Rows, Rows, Rows] | Declined:
    """Index queries [T, I, E], keys [T, E] and weights [T, I]."""
    query, key, feature = products
    if not _names(query, axes.q):
        query, key = key, query
    heads = int(head.size)
    queries = [
        r for r in find_rows(query, axes.q, feature, head) if r.heads == heads and r.head == head
    ]
    keys = [r for r in find_rows(key, axes.k, feature, head) if r.heads == 1]
    weighing = [r for r in find_rows(weights, axes.q, head, axes.h) if r.heads == 1]
    for name, element, found in (
        ("queries", query, queries), ("keys", key, keys), ("weights", weights, weighing),
    ):  # fmt: skip
        if not found:
            return Declined(f"index {name} are not laid out as rows", element[0], 0.7)
    if queries[-1].dtype != keys[-1].dtype:
        return Declined("index queries and keys differ in dtype", keys[-1].node, 0.7)
    return queries[-1], keys[-1], weighing[-1]
