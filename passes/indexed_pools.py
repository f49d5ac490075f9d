"""Reading a mask that lets pools of neighbouring keys through: a scatter of the tokens of the best pools, and the rest.

    pooled[p] = sum_r softmax_r(gate[P*p + r] + bias[r]) * ik[P*p + r]                  for P*p + P - 1 <= q
    scores[q, p] = sum_i w[q, i] * relu(c * iq[q, i] . pooled[p])
    mask[q, k] = k in one of the best pools, or P*floor((q + 1)/P) <= k <= q            in any spelling that says so

That the spelled indices are these sets is shown by cases: for a pool that is whole, and for each remainder of q + 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy
from torch import fx

from regraft.rewriter.attention_core import Core
from regraft.rewriter.attention_rows import Rows, find_rows
from regraft.rewriter.formulas import Cell, cases, number, relate
from regraft.rewriter.graph import TOKENS, is_aten
from regraft.rewriter.indexing import Coordinates, Element, argument, arguments, sizes_of, trace
from regraft.rewriter.integers import ZERO, Condition, Expr, Index, compare
from regraft.rewriter.masks import shorten
from regraft.rewriter.pattern import Declined
from regraft.rewriter.scores import Axes, is_masked

from .indexed_elements import PoolElements, counter, decide
from .indexed_scores import Scoring, node_named, read_weighed
from .indexed_selection import count_of_largest, through_casts


@dataclass(frozen=True)
class PoolIndexer:
    """What selects pools of `size` neighbouring keys: see the head of this file."""

    topk: fx.Node
    count: int
    size: int
    scoring: Scoring
    key: Rows
    gate: Rows
    bias: fx.Node


def find_pools(core: Core, masked: float) -> tuple[Core, PoolIndexer] | Declined:
    """The attention as if to every earlier key, and what selects among them."""
    cells = {
        cell for cell in core.score.atoms(Cell)
        if is_aten(node_named(cell, core.closer.graph), "scatter_add")
    }  # fmt: skip
    if len(cells) != 1:
        return Declined(f"the mask counts {len(cells)} scattered selections", core.closer)
    (cell,) = cells
    scatter, axes = node_named(cell, core.closer.graph), core.axes
    selected = relate(cell, "!=", ZERO)
    earlier = core.score.xreplace({selected: compare(axes.k, "<=", axes.q)})
    left_out = core.score.xreplace({selected: sympy.false})
    if earlier.has(cell) or not all(is_masked(leaf, masked) for _, leaf in cases(number(left_out))):
        return Declined("keys that are not selected have scores", scatter, 0.4)
    indices = _scattered(scatter, cell, axes)
    if isinstance(indices, Declined):
        return indices
    indexer = _read_parts(*indices, axes)
    return indexer if isinstance(indexer, Declined) else (replace(core, score=earlier), indexer)


def _scattered(scatter: fx.Node, cell: Expr, axes: Axes) -> tuple[fx.Node, Coordinates] | Declined:
    """The indices x(q, j) such that mask[q, k] says whether some x(q, j) is k: j is the last coordinate."""
    base, dim, index, source = arguments(scatter)[:4]
    rank = len(cell.args) - 1
    if dim % rank != rank - 1 or cell.args[-1] != axes.k or axes.q not in cell.args[1:-1]:
        return Declined("the selection is not one of keys for each query", scatter, 0.4)
    if not is_aten(index, "clamp"):
        return Declined("the scattered indices are not limited to the row", index, 0.4)
    indices = arguments(index)[0]
    place = (*cell.args[1:-1], Index("j", sizes_of(indices)[-1]))
    elements = PoolElements(scatter.graph, opaque=indices)
    x = elements.cell(indices, place)
    inside = sympy.And(relate(x, ">=", ZERO), relate(x, "<", TOKENS))
    limited = sympy.Min(sympy.Max(x, ZERO), TOKENS - 1)
    told = (elements.at(base, cell.args[1:]), elements.at(index, place), elements.at(source, place))
    if told != (ZERO, limited, number(inside)):
        return Declined("the scatter does not count the indices within the row", scatter, 0.4)
    return indices, place[:-1]


def _read_parts(indices: fx.Node, place: Coordinates, axes: Axes) -> PoolIndexer | Declined:
    """The indices are those of the best pools' tokens beside those of the last tokens, and nothing else."""
    parts = _parts(indices, place)
    if isinstance(parts, Declined):
        return parts
    if len(parts) != 2:
        return Declined(f"the selected keys are {len(parts)} sets", indices, 0.5)
    pools, rest = parts
    size, ranks = sizes_of(pools)[-1].as_coeff_Mul()
    if not size.is_Integer or ranks == 1 or sizes_of(rest)[-1] != size - 1:
        return Declined("the selected keys are no pools with the tokens after them", pools, 0.5)
    rank, offset, pool = counter("r"), Index("t", size), counter("p")
    elements = PoolElements(indices.graph, rank=rank, pool=pool)
    found = decide(elements.at(pools, (*place, size * rank + offset)), elements.known)
    whole = compare(size * pool + size - 1, "<=", axes.q)
    if not _is_chosen(found, whole, size * pool + offset):
        return Declined(f"not the tokens of whole pools: {shorten(found)}", pools, 0.5)
    if not _is_rest(elements.at(rest, (*place, Index("t", size - 1))), axes.q, int(size)):
        return Declined("not the tokens after the last whole pool", rest, 0.5)
    if len(elements.topks) != 1:
        return Declined(f"pools are selected by {len(elements.topks)} top-k", pools, 0.5)
    (topk,) = elements.topks
    return _read_scores(topk, elements, (*place, pool), whole, axes, int(size))


def _parts(node: fx.Node, place: Coordinates) -> list[fx.Node] | Declined:
    """The tensors whose entries along the last dimension are put side by side; entries that are negative are none."""
    elements = PoolElements(node.graph)
    while True:
        node, at = through_casts(node, (*place, Index("j", sizes_of(node)[-1])))
        if at[:-1] != place:
            return Declined("the selected keys are moved", node, 0.5)
        if is_aten(node, "masked_fill"):
            source, when, _ = arguments(node)
            if elements.operand(when, at) != sympy.false:
                return Declined("the selected keys are masked as a whole", node, 0.5)
            node = source
        elif is_aten(node, "pad", "constant_pad_nd"):
            fill = argument(node, 3 if is_aten(node, "pad") else 2, "value", 0) or 0
            if len(arguments(node)[1]) != 2 or fill >= 0:
                return Declined("the selected keys are padded with keys", node, 0.5)
            node = arguments(node)[0]
        elif is_aten(node, "cat"):
            return list(arguments(node)[0])
        else:
            return [node]


def _is_chosen(value: Expr, when: Condition, chosen: Expr) -> bool:
    """Whether a formula is `chosen` where `when` holds, and negative elsewhere."""
    for condition, leaf in cases(value):
        if sympy.expand(leaf - chosen) == 0:
            if sympy.And(condition, sympy.Not(when)) != sympy.false:
                return False
        elif not (leaf.is_number and leaf < 0 and sympy.And(condition, when) == sympy.false):
            return False
    return True


def _is_rest(value: Expr, q: Index, size: int) -> bool:
    """Whether a formula in `t` gives the tokens from size * floor((q + 1)/size) to q, and else is negative."""
    (offset,) = (s for s in value.free_symbols if isinstance(s, Index) and s.name == "t")
    pools, further = counter("m"), counter("z")
    for remainder in range(size):
        # the query is the last of `remainder` tokens after m pools; m + 1 pools where there are none
        start = size * (pools + int(remainder == 0))
        last = start + remainder - 1
        for t in range(size - 1):
            known = {q: last, TOKENS: last + 1 + further, offset: sympy.Integer(t)}
            entry = decide(value.xreplace(known), {})
            wanted = entry == sympy.expand(start + t) if t < remainder else bool(entry.is_negative)
            if not wanted:
                return False
    return True


def _read_scores(
    topk: fx.Node, elements: PoolElements, place: Coordinates, whole: Condition, axes: Axes, size: int
) -> PoolIndexer | Declined:  # fmt: skip
    """The top-k is of scores of whole pools, by keys that are weighted means of the pools' index keys."""
    count = count_of_largest(topk, len(place))
    if count is None:
        return Declined("the top-k is not of a constant number of largest scores", topk, 0.5)
    score = decide(elements.at(arguments(topk)[0], place), elements.known)
    seen = [(when, leaf) for when, leaf in cases(score) if not is_masked(leaf)]
    if len(seen) != 1 or not _only(score, whole):
        return Declined(f"pools are scored that are not whole: {shorten(score)}", topk, 0.6)
    weighed = read_weighed(seen[0][1], elements, axes, place[-1], topk)
    if isinstance(weighed, Declined):
        return weighed
    scoring, key, feature = weighed
    pooled = _read_pooled(key, elements, place[-1], feature, axes, size)
    if isinstance(pooled, Declined):
        return pooled
    return PoolIndexer(topk, count, size, scoring, *pooled)


def _only(score: Expr, whole: Condition) -> bool:
    """Whether scores are hidden exactly where `whole` does not hold."""
    return all(
        sympy.And(when, whole if is_masked(leaf) else sympy.Not(whole)) == sympy.false
        for when, leaf in cases(score)
    )


def _read_pooled(
    key: Element, elements: PoolElements, pool: Expr, feature: Index, axes: Axes, size: int
) -> tuple[Rows, Rows, fx.Node] | Declined:
    """Index keys [T, E], gates [T, E] and the bias [size, E] of pools that are weighted means."""
    node, place = elements.compacted(*trace(*key)[-1])
    at = Index("r", size)
    if not (is_aten(node, "sum") and len(arguments(node)[1]) == 1):
        return Declined("the key of a pool is no sum", node, 0.6)
    source = arguments(node)[0]
    dim = arguments(node)[1][0] % len(sizes_of(source))
    keeps = bool(argument(node, 2, "keepdim", False))
    place = (*place[:dim], at, *place[dim + 1 if keeps else dim :])
    if not is_aten(source, "mul") or sizes_of(source)[dim] != size:
        return Declined("the key of a pool is no sum of products", source, 0.6)
    factors = [_through_rounding(factor) for factor in arguments(source)[:2]]
    shares = [f for f in factors if is_aten(f, "softmax", "_softmax")]
    if len(shares) != 1 or arguments(shares[0])[1] % len(place) != dim:
        return Declined("the tokens of a pool are not weighed by a softmax", source, 0.6)
    rows = arguments(source)[1 - factors.index(shares[0])]
    token = size * pool + at
    keys = decide(number(elements.at(rows, place)), elements.known)
    gates = decide(number(elements.at(arguments(shares[0])[0], place)), elements.known)
    terms = {cell.args[1:]: cell for cell in gates.atoms(Cell)}
    bias = terms.pop((at, feature), None)
    if bias is None or len(terms) != 1 or gates != sympy.Add(bias, *terms.values()):
        return Declined(f"the gate of a pool's token is {shorten(gates)}", shares[0], 0.6)
    weight = node_named(bias, source.graph)
    index_key, gate = (_rows_at(e, token, feature, axes, source) for e in (keys, *terms.values()))
    if weight.op != "get_attr" or index_key is None or gate is None:
        return Declined("keys and gates of pools are not laid out as rows", source, 0.6)
    return index_key, gate, weight


def _through_rounding(node: fx.Node) -> fx.Node:
    """What is cast, or has no NaN to replace: a softmax over a whole pool."""
    while is_aten(node, "_to_copy", "to", "nan_to_num"):
        node = arguments(node)[0]
    return node


def _rows_at(value: Expr, token: Expr, feature: Index, axes: Axes, near: fx.Node) -> Rows | None:
    """The rows of which `value` is an element, that of `token`."""
    if not isinstance(value, Cell):
        return None
    place = tuple(axes.k if sympy.expand(at - token) == 0 else at for at in value.args[1:])
    element = (node_named(value, near.graph), place)
    found = [rows for rows in find_rows(element, axes.k, feature, axes.h) if rows.heads == 1]
    return found[-1] if found else None
