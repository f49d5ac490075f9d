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
from regraft.rewriter.integers import Expr, Index
from regraft.rewriter.masks import Relation, is_possible, shorten
from regraft.rewriter.pattern import Declined
from regraft.rewriter.scores import MASKED, Axes, is_masked, read_score

from .indexed_scores import Scoring, node_named, product_of, read_weighed


@dataclass(frozen=True)
class Indexer:
    """What selects the keys: the top-k of scores, which are of the keys where `relation` holds."""

    topk: fx.Node
    count: int
    relation: Relation
    scoring: Scoring
    key: Rows


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
    values = two_values(scatter, cell)
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


def two_values(scatter: fx.Node, cell: Expr) -> tuple[Expr, Expr] | Declined:
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
    node, where = through_casts(arguments(scatter)[2], tuple(place))
    topk = arguments(node)[0] if len(arguments(node)) == 2 else None
    if not (isinstance(topk, fx.Node) and is_aten(topk, "topk") and arguments(node)[1] == 1):
        return Declined("the selected keys are not the indices of a top-k", node, 0.4)
    dim = argument(topk, 2, "dim", -1) % len(where)
    if where[dim] != rank or argument(topk, 3, "largest", True) is not True:
        return Declined("the top-k is not of the largest scores of a query", topk, 0.4)
    count = count_of(topk)
    if count is None:
        return Declined("the number of selected keys is no constant", topk, 0.4)
    scores: Element = (arguments(topk)[0], (*where[:dim], axes.k, *where[dim + 1 :]))
    return _read_scores(topk, count, scores, axes, masked)


def through_casts(node: fx.Node, place: tuple[Expr, ...]) -> Element:
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


def count_of(topk: fx.Node) -> int | None:
    """k, where the top-k takes k or as many as there are."""
    size = size_value(arguments(topk)[1])
    if isinstance(size, sympy.Min):
        numbers = [arg for arg in size.args if arg.is_Integer]
        size = numbers[0] if len(numbers) == 1 and len(size.args) == 2 else None
    return int(size) if size is not None and size.is_Integer and size > 0 else None


def count_of_largest(topk: fx.Node, rank: int) -> int | None:
    """k, where the top-k is of the largest elements along the last of `rank` dimensions."""
    of_largest = argument(topk, 3, "largest", True) is True
    return (
        count_of(topk) if of_largest and argument(topk, 2, "dim", -1) % rank == rank - 1 else None
    )


def _read_scores(
    topk: fx.Node, count: int, scores: Element, axes: Axes, masked: float
) -> Indexer | Declined:
    elements, one_head = Elements(topk.graph), Axes(Index("h", 1), axes.q, axes.k)
    value = elements.at(*scores)
    score = read_score(
        value, None, one_head, lambda cell: product_of(cell, topk.graph, "i") is not None, masked
    )
    if isinstance(score, Declined):
        return Declined(f"index scores: {score.reason}", score.node or topk, 0.6)
    if score.softcap or score.slope is not None or score.by_distance is not None:
        return Declined(f"index scores are no scaled sum of products: {score}", topk, 0.6)
    weighed = read_weighed(score.scale * score.product, elements, one_head, axes.k, topk)
    if isinstance(weighed, Declined):
        return weighed
    scoring, key, feature = weighed
    keys = [r for r in find_rows(key, axes.k, feature, scoring.head) if r.heads == 1]
    if not keys:
        return Declined("index keys are not laid out as rows", key[0], 0.7)
    if keys[-1].dtype != scoring.query.dtype:
        return Declined("index queries and keys differ in dtype", keys[-1].node, 0.7)
    return Indexer(topk, count, score.relation, scoring, keys[-1])
