"""Reading how the rows of a window of tokens are weighed into one.

    pooled[w, d] = sum_s softmax_s(gate[s] + bias[s]) * value[s]        s over the R tokens of each of some windows

Of the window j before the last, part d' = d + (spans - 1 - j) * D of a token's row counts; windows before the first
count for nothing. That an element of `value` and `gate` is this token's and this part's is read off its formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from torch import fx

from regraft.rewriter.attention_rows import Rows, find_rows
from regraft.rewriter.elements import Elements
from regraft.rewriter.formulas import Cell, number
from regraft.rewriter.graph import TOKENS, is_aten
from regraft.rewriter.indexing import Coordinates, arguments, sizes_of
from regraft.rewriter.integers import ZERO, Expr, Index, Quotient
from regraft.rewriter.masks import shorten
from regraft.rewriter.pattern import Declined

from .indexed_scores import node_named


@dataclass(frozen=True)
class Windows:
    """`node` [.., entries, .., D]: rows of `rate` tokens from each of `spans` windows, weighed into one."""

    node: fx.Node
    rate: int
    spans: int
    values: Rows
    gates: Rows
    bias: fx.Node

    @property
    def width(self) -> int:
        return self.values.width // self.spans


def shares_of(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """(values, the softmax that weighs them, the dimension summed over) of a sum of weighed rows, if it is one."""
    if not (
        is_aten(node, "sum") and len(arguments(node)) > 1 and len(arguments(node)[1] or ()) == 1
    ):
        return None
    terms = arguments(node)[0]
    if not is_aten(terms, "mul"):
        return None
    dim = arguments(node)[1][0] % len(sizes_of(terms))
    for values, shares in (arguments(terms)[:2], arguments(terms)[1::-1]):
        shares = _uncast(shares)
        if is_aten(shares, "softmax", "_softmax") and isinstance(values, fx.Node):
            return values, shares, dim
    return None


def _uncast(node: fx.Node) -> fx.Node:
    while is_aten(node, "_to_copy", "to"):
        node = arguments(node)[0]
    return node


def read_windows(node: fx.Node, rate: int) -> Windows | Declined:
    """The windows of `rate` tokens that `node` is made of; `shares_of` has said that it is a sum of weighed rows."""
    parts = shares_of(node)
    assert parts is not None, f"{node} is no sum of weighed rows"
    values, shares, dim = parts
    sizes = sizes_of(values)
    if arguments(shares)[1] % len(sizes) != dim or sizes_of(shares) != sizes:
        return Declined("the tokens of a window are not weighed by a softmax over them", node, 0.6)
    entry_dims = [d for d, size in enumerate(sizes) if size == Quotient(TOKENS, rate)]
    others = [d for d, size in enumerate(sizes) if d not in (dim, *entry_dims) and size != 1]
    spans, rest = divmod(sizes[dim], rate) if sizes[dim].is_Integer else (0, 1)
    is_plain = len(entry_dims) == len(others) == 1 and entry_dims < others and not rest
    if not is_plain or not sizes[others[0]].is_Integer:
        return Declined(f"windows of {rate} tokens are weighed in the shape {[*sizes]}", node, 0.6)
    layout = _Layout(len(sizes), entry_dims[0], dim, others[0], rate, int(spans), sizes[others[0]])
    return _read(node, values, arguments(shares)[0], layout)


@dataclass(frozen=True)
class _Layout:
    """Where windows, their tokens and the features of a row are."""

    rank: int
    entry_dim: int
    token_dim: int
    feature_dim: int
    rate: int
    spans: int
    width: Expr

    def place(self, window: Expr, token: Expr, feature: Expr) -> Coordinates:
        place = [ZERO] * self.rank
        for dim, at in (
            (self.entry_dim, window),
            (self.token_dim, token),
            (self.feature_dim, feature),
        ):
            place[dim] = sympy.sympify(at)
        return tuple(place)


def _read(node: fx.Node, values: fx.Node, scores: fx.Node, layout: _Layout) -> Windows | Declined:
    """Every element that is weighed, window by window, and the score that weighs it."""
    elements, rate, spans = Elements(node.graph), layout.rate, layout.spans
    token, feature = Index("t", rate), Index("d", layout.width)
    found: set[tuple[fx.Node, ...]] = set()
    rows: list[Rows] = []
    for part in range(spans):
        before, at = spans - 1 - part, part * rate + token
        window = Index("w", Quotient(TOKENS, rate) - before)
        place = layout.place(window + before, at, feature)
        wanted = (rate * window + token, feature + part * layout.width)
        value = number(elements.at(values, place))
        score = number(elements.at(scores, place))
        read = _terms(node.graph, value, score, wanted, (token, wanted[1]), layout)
        if isinstance(read, Declined):
            return Declined(read.reason, node, 0.6)
        rows, bias = read
        found.add((rows[0].node, rows[1].node, bias))
        for early in range(before):
            place = layout.place(sympy.Integer(early), at, feature)
            if elements.at(scores, place) != -sympy.oo or elements.at(values, place) != ZERO:
                return Declined("what is before the first window counts", node, 0.6)
    if len(found) != 1:
        return Declined("windows are made of several rows of a token", node, 0.6)
    ((_, _, bias),) = found
    if rows[0].dtype != node.meta["dtype"]:
        return Declined(f"rows of {rows[0].dtype} become {node.meta['dtype']}", node, 0.6)
    return Windows(node, rate, spans, rows[0], rows[1], bias)


def _terms(
    graph: fx.Graph, value: Expr, score: Expr, at: tuple[Expr, Expr], in_bias: tuple[Expr, Expr],
    layout: _Layout,
) -> tuple[list[Rows], fx.Node] | Declined:  # fmt: skip
    """The rows of values and gates, and the bias, of an element and the score that weighs it."""
    cells = {cell.args[1:]: cell for cell in score.atoms(Cell)}
    bias = cells.pop(in_bias, None)
    if bias is None or len(cells) != 1 or score != sympy.Add(bias, *cells.values()):
        return Declined(f"a token of a window is weighed by {shorten(score)}")
    weight = node_named(bias, graph)
    width = layout.spans * layout.width
    if weight.op != "get_attr" or sizes_of(weight) != (layout.rate, width):
        return Declined(f"a token of a window is weighed by {shorten(score)}")
    rows = [_rows_at(cell, graph, at, width) for cell in (value, *cells.values())]
    if None in rows:
        return Declined(f"values {shorten(value)} and gates {shorten(score)} are no rows of tokens")
    return [row for row in rows if row is not None], weight


def _rows_at(value: Expr, graph: fx.Graph, at: tuple[Expr, Expr], width: Expr) -> Rows | None:
    """The rows [T, width] of which `value` is the element at (token, feature)."""
    if not isinstance(value, Cell):
        return None
    token, feature = Index("k", TOKENS), Index("f", width)
    named = {sympy.expand(at[0]): token, sympy.expand(at[1]): feature}
    place = tuple(named.get(sympy.expand(x), x) for x in value.args[1:])
    element = node_named(value, graph), place
    rows = [rows for rows in find_rows(element, token, feature, Index("h", 1)) if rows.heads == 1]
    return rows[-1] if rows else None
