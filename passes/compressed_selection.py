"""Which entries a token sees: those of whole windows, all of them or the best by the scores of an indexer.

whole(q, w) = R*w + R - 1 <= q                                        window w ends at or before the token
scores[q, w] = sum_i u[q, i] * relu(c * iq[q, i] . ie[w])             hidden where not whole
mask[q, w] = whole(q, w), or: w is among the top-k of scores[q], and whole
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import sympy
from sympy.core.relational import Relational
from torch import fx

from regraft.rewriter.attention_core import Core
from regraft.rewriter.formulas import Cell, Value, cases, in_one_request, number
from regraft.rewriter.graph import is_aten
from regraft.rewriter.indexing import Coordinates, arguments, sizes_of
from regraft.rewriter.integers import (
    ZERO,
    Condition,
    Expr,
    Index,
    Quotient,
    compare,
    is_nonnegative,
)
from regraft.rewriter.masks import shorten
from regraft.rewriter.pattern import Declined
from regraft.rewriter.scores import Axes, is_masked

from .compressed_entries import Entries, read_entries
from .indexed_elements import PoolElements
from .indexed_scores import Scoring, node_named, read_weighed
from .indexed_selection import count_of_largest, two_values


@dataclass(frozen=True)
class Selection:
    """The top-k of scores of whole windows' entries."""

    topk: fx.Node
    count: int
    scoring: Scoring
    entries: Entries


def whole(axes: Axes, rate: int) -> Condition:
    """Window k has ended at query q."""
    return compare(axes.k, "<", Quotient(axes.q + 1, rate))


def told(value: Value) -> Value:
    """The value within one request, every comparison of it spelled one way."""
    value = in_one_request(value)
    return value.xreplace(
        {rel: compare(rel.lhs, rel.rel_op, rel.rhs) for rel in value.atoms(Relational)}
    )


def never(*conditions: Condition) -> bool:
    return told(sympy.And(*map(told, conditions))) == sympy.false


def is_exactly(value: Condition, when: Condition) -> bool:
    """Whether two conditions are one, as far as they are spelled alike."""
    return never(value, sympy.Not(when)) and never(sympy.Not(value), when)


def find_selection(
    core: Core, rate: int, masked: float
) -> tuple[Core, Selection | None] | Declined:
    """The attention as it is to selected entries, and what selects them; None where nothing does."""
    scattered = {
        cell: node for cell in core.score.atoms(Cell)
        if is_aten(node := node_named(cell, core.closer.graph), "scatter")
    }  # fmt: skip
    if not scattered:
        return core, None
    if len(scattered) != 1:
        return Declined(f"entries are selected {len(scattered)} times", core.closer, 0.5)
    ((cell, scatter),) = scattered.items()
    values = two_values(scatter, cell)
    if isinstance(values, Declined):
        return Declined(values.reason, values.node, 0.5)
    chosen, left_out = (core.score.xreplace({cell: value}) for value in values)
    if not all(is_masked(leaf, masked) for _, leaf in cases(told(number(left_out)))):
        return Declined("entries that are not selected have scores", scatter, 0.5)
    selection = _read_indices(scatter, cell, core.axes, rate, masked)
    if isinstance(selection, Declined):
        return selection
    return replace(core, score=chosen), selection


class _Choices(PoolElements):
    """Notes which elements of a top-k's choice are read."""

    def __init__(self, graph: fx.Graph, rank: Index, chosen: Index) -> None:
        super().__init__(graph, rank=rank, pool=chosen)
        self.places: set[Coordinates] = set()

    def _read(self, node: fx.Node, coordinates: Coordinates) -> Value:
        if node.target is operator.getitem and is_aten(node.args[0], "topk"):
            self.places.add(coordinates)
        return super()._read(node, coordinates)


def _read_indices(
    scatter: fx.Node, cell: Expr, axes: Axes, rate: int, masked: float
) -> Selection | Declined:
    """What is scattered: a top-k's choice where it is a whole window, and else nothing that is an entry."""
    indices, dim = arguments(scatter)[2], arguments(scatter)[1] % (len(cell.args) - 1)
    place = list(cell.args[1:])
    if place[dim] != axes.k or sum(at == axes.q for at in place) != 1:
        return Declined("the selection is not one of entries for each query", scatter, 0.5)
    rank = Index("j", sizes_of(indices)[dim])
    place[dim] = rank
    elements = _Choices(scatter.graph, rank, axes.k)
    if dim != len(place) - 1:
        return Declined("the selection is not along the last dimension", scatter, 0.5)
    found = told(elements.at(indices, tuple(place)))
    if not _is_chosen(found, whole(axes, rate), axes.k):
        return Declined(f"not the entries of whole windows: {shorten(found)}", indices, 0.6)
    if len(elements.topks) != 1:
        return Declined(f"entries are selected by {len(elements.topks)} top-k", indices, 0.6)
    ((*of_query, _), *others), (topk,) = elements.places, elements.topks
    if others or sorted(of_query, key=str) != [*[ZERO] * (len(of_query) - 1), axes.q]:
        return Declined("a query sees what was selected for another", indices, 0.6)
    return _read_scores(topk, elements, (*of_query, axes.k), axes, rate, masked)


def _is_chosen(value: Value, when: Condition, chosen: Index) -> bool:
    """Whether a formula is `chosen` where `when` holds, and beyond the last entry elsewhere."""
    for condition, leaf in cases(number(value)):
        if sympy.expand(leaf - chosen) == 0:
            if not never(condition, sympy.Not(when)):
                return False
        elif not (is_nonnegative(leaf - chosen.size) and never(condition, when)):
            return False
    return True


def _read_scores(
    topk: fx.Node, elements: _Choices, place: Coordinates, axes: Axes, rate: int, masked: float
) -> Selection | Declined:  # fmt: skip
    """The top-k is of scores of whole windows, by entries that queries of an indexer meet."""
    count = count_of_largest(topk, len(place))
    if count is None:
        return Declined("the top-k is not of a constant number of largest scores", topk, 0.6)
    score = told(number(elements.at(arguments(topk)[0], place)))
    seen = [(when, leaf) for when, leaf in cases(score) if not is_masked(leaf, masked)]
    if len(seen) != 1 or not is_exactly(seen[0][0], whole(axes, rate)):
        return Declined(f"entries are scored of windows not whole: {shorten(score)}", topk, 0.6)
    weighed = read_weighed(seen[0][1], elements, axes, axes.k, topk)
    if isinstance(weighed, Declined):
        return weighed
    scoring, key, feature = weighed
    entries = read_entries(key, axes.k, feature)
    if isinstance(entries, Declined):
        return Declined(f"index entries: {entries.reason}", entries.node, entries.progress)
    if entries.windows.rate != rate or entries.dtype != scoring.query.dtype:
        return Declined("index queries and entries do not fit together", topk, 0.7)
    return Selection(topk, count, scoring, entries)
