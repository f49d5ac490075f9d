"""Attention whose keys and values are linear in one low-rank row -> latent_attention on that row.

    before   c = norm(down(x));  k = cat(up_k(c) [H, K], r [1, E]);  v = up_v(c) [H, V];  attention(q, k, v)
    after    latent_attention(q, cat(c, r), W_k, W_v):  cached per token are c and r, R + E values for all heads

Found by dataflow: part of the features of every key, and every value, are elements of linear maps of the same tensor,
and what is left of the key does not depend on the head. Not for keys and values from different tensors, a bias or
anything else between the row and them, or a row that is no smaller than half the keys and values.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import sympy
import torch
from torch import fx

import regraft.kernels.latent_attention  # noqa: F401 (registers the operator)
from regraft.passes.attention import Plan as Attention
from regraft.passes.attention import (
    as_result,
    as_rows,
    as_vector,
    reach_of,
    read_plan,
    unused_label,
)
from regraft.rewriter.attention_core import Core, find_core
from regraft.rewriter.attention_rows import Rows, find_rows
from regraft.rewriter.declare import EVERYTHING, Reach
from regraft.rewriter.graph import TOKENS, is_aten, shape_of
from regraft.rewriter.indexing import Element, branches, trace
from regraft.rewriter.integers import ZERO, Expr, Index
from regraft.rewriter.pattern import Declined, Grafting, Pass, Region

aten = torch.ops.aten


@dataclass(frozen=True)
class Piece:
    """Features `start` to `start + size` of a key, all moved from one place; `index` counts them."""

    start: int
    size: int
    element: Element
    index: Index


@dataclass(frozen=True)
class LinearMap:
    """Head h's features are rows `h * stride + offset`, and on, of the weight of `node`, a linear of `source`."""

    node: fx.Node
    source: fx.Node
    weight: fx.Node
    stride: int
    offset: int
    size: int


@dataclass(frozen=True)
class Latent:
    """What was found: the attention, the maps to keys and values, and the part of the key that heads share."""

    attention: Attention
    keys: LinearMap
    values: LinearMap
    latent_start: int
    shared_start: int
    shared: Rows | None


def pattern(region: Region) -> Core | Declined:
    """The softmax and the products around the region's closer."""
    return find_core(region.closer)


def check(core: Core) -> Latent | Declined:
    """Keys and values are linear in one smaller row."""
    attention = read_plan(core)
    if isinstance(attention, Declined):
        return attention
    if attention.slopes is not None or attention.by_distance is not None:
        return Declined("latent attention with a bias by position", core.softmax, 0.3)
    if attention.token_sinks is not None:
        return Declined("latent attention with a sink of each token", core.softmax, 0.3)
    element, token, feature = _key(core, attention)
    pieces = split(element, feature)
    maps = [(piece, _linear(piece.element, token, piece.index, core.axes.h)) for piece in pieces]
    linear = [(piece, found) for piece, found in maps if isinstance(found, LinearMap)]
    # Without a rotary embedding the part that heads share is linear too: of no head.
    linear = [pair for pair in linear if pair[1].stride] or linear
    if len(linear) != 1:
        return Declined(_no_map(maps), core.closer, 0.2 if linear else 0.0)
    piece, keys = linear[0]
    shared = _beside(element, feature, piece)
    if isinstance(shared, Declined):
        return shared
    values = _linear(core.value, core.axes.k, core.value_feature, core.axes.h)
    if isinstance(values, Declined):
        return Declined(f"values are no linear map of a row: {values.reason}", values.node, 0.4)
    if values.source is not keys.source:
        return Declined("keys and values come from different rows", values.node, 0.5)
    rows = None if shared is None else _shared(shared, token, core.axes.h)
    if isinstance(rows, Declined):
        return rows
    start = 0 if shared is None else shared.start
    found = Latent(attention, keys, values, piece.start, start, rows)
    return _worthwhile(found, core)


def _worthwhile(found: Latent, core: Core) -> Latent | Declined:
    heads = found.attention.query.heads
    row = _rank(found) + (found.shared.width if found.shared else 0)
    full = heads * (found.keys.size + found.values.size) + heads * (
        found.shared.width if found.shared else 0
    )
    for found_map in (found.keys, found.values):
        if shape_of(found_map.weight)[0] != heads * found_map.stride:
            return Declined("the map's rows are not heads of equal size", found_map.node, 0.7)
    if found.attention.key.heads != heads:
        return Declined(
            "several query heads share a key head: caching keys is as small", core.closer, 0.7
        )
    if 2 * row >= full:
        return Declined(
            f"a row of {row} values is no smaller than half of {full}", found.keys.node, 0.7
        )
    return found


def _key(core: Core, attention: Attention) -> tuple[Element, Index, Index]:
    left, right, feature = core.products[attention.score.product.args[0].name]
    key = left if core.axes.k in _symbols(left) else right
    return key, core.axes.k, feature


def _symbols(element: Element) -> set[sympy.Basic]:
    return set().union(*(at.free_symbols for at in element[1]))


def split(element: Element, index: Index) -> list[Piece]:
    """Take features apart where a concatenation, or a part written over, puts them together."""
    node, place = trace(*element)[-1]
    options = branches(node, place)
    size = int(index.size)
    if not options or not any(index in condition.free_symbols for condition, _, _ in options):
        return [Piece(0, size, element, index)]
    chosen = [_chosen(options, index, at) for at in range(size)]
    cuts = [0, *(at for at in range(1, size) if chosen[at] != chosen[at - 1]), size]
    pieces = []
    for begin, end in itertools.pairwise(cuts):
        part = Index(index.name, end - begin)
        moved = tuple(at.xreplace({index: begin + part}) for at in place)
        pieces += [
            Piece(begin + piece.start, piece.size, piece.element, piece.index)
            for piece in split((node, moved), part)
        ]
    return pieces


def _beside(element: Element, index: Index, piece: Piece) -> Piece | Declined | None:
    """The features of the key that `piece` leaves, as one piece again."""
    start = piece.size if piece.start == 0 else 0
    size = int(index.size) - piece.size
    if size == 0:
        return None
    if piece.start not in (0, size):
        return Declined("the linear part of the key lies between two others", piece.element[0], 0.3)
    node, place = trace(*element)[-1]
    part = Index(index.name, size)
    return Piece(
        start, size, (node, tuple(at.xreplace({index: start + part}) for at in place)), part
    )


def _no_map(maps: list[tuple[Piece, LinearMap | Declined]]) -> str:
    """Why the pieces of a key are not one linear map beside a shared part."""
    reasons = [found.reason for _, found in maps if isinstance(found, Declined)]
    if len(reasons) == len(maps):
        return f"no part of the key is a linear map of a row: {reasons[0]}"
    return "keys come from several linear maps"


def _chosen(options: list, index: Index, at: int) -> int:
    where = {index: sympy.Integer(at)}
    return next(
        i for i, (condition, _, _) in enumerate(options) if condition.xreplace(where) == sympy.true
    )


def _linear(element: Element, token: Index, feature: Index, h: Index) -> LinearMap | Declined:
    node, place = trace(*element)[-1]
    if not is_aten(node, "linear"):
        return Declined("something else than a linear map computes it", node)
    source, weight = node.args[:2]
    assert isinstance(source, fx.Node) and isinstance(weight, fx.Node)
    if len(node.args) > 2 and node.args[2] is not None:
        return Declined("the linear map has a bias", node)
    if weight.op != "get_attr" or [at for at in place[:-1] if at != ZERO] != [token]:
        return Declined("the linear map is not of one row per token", node)
    offset, stride = _affine(place[-1], h, feature)
    if stride is None:
        return Declined("heads are not consecutive rows of the map", node)
    return LinearMap(node, source, weight, stride, offset, int(feature.size))


def _affine(at: Expr, h: Index, feature: Index) -> tuple[int, int | None]:
    """(offset, stride) where at = h * stride + offset + feature; stride None if it is no such formula."""
    zero, one = sympy.Integer(0), sympy.Integer(1)
    offset = at.xreplace({h: zero, feature: zero})
    stride = at.xreplace({h: one, feature: zero}) - offset
    if not (offset.is_Integer and stride.is_Integer):
        return 0, None
    if sympy.expand(at - (h * stride + offset + feature)) != 0:
        return 0, None
    return int(offset), int(stride)


def _shared(piece: Piece, token: Index, h: Index) -> Rows | Declined:
    found = [rows for rows in find_rows(piece.element, token, piece.index, h) if rows.heads == 1]
    if not found:
        return Declined(
            "the part of the key beside the linear map differs by head", piece.element[0], 0.6
        )
    return found[-1]


def rewrite(found: Latent, grafting: Grafting) -> None:
    """Rows (c, r) into latent_attention, its values back into the closer's layout."""
    attention = found.attention
    reach = reach_of(attention)
    attended = grafting.call(
        torch.ops.regraft.latent_attention.default,
        *operands(found, grafting, reach),
        *grafting.sequences(reach),
        *starts_and_masks(found, grafting),
        shape=(TOKENS, attention.query.heads, found.values.size),
        dtype=attention.query.dtype,
    )
    grafting.replace(attention.closer, as_result(attended, attention, grafting))
    grafting.mask = str(attention.score)
    grafting.notes.append(saving(found))


def operands(found: Latent, grafting: Grafting, reach: Reach = EVERYTHING) -> tuple[fx.Node, ...]:
    """q, rows, w_k, w_v and the cache of the rows."""
    heads, source, shared = found.attention.query.heads, found.keys.source, found.shared
    dtype, rank = source.meta["dtype"], _rank(found)
    row = grafting.call(aten.reshape.default, source, [-1, rank], shape=(TOKENS, rank), dtype=dtype)
    width = rank
    if shared is not None:
        part, width = as_rows(shared, grafting), rank + shared.width
        part = grafting.call(aten.select.int, part, 1, 0, shape=(TOKENS, shared.width), dtype=dtype)
        row = grafting.call(aten.cat.default, [row, part], 1, shape=(TOKENS, width), dtype=dtype)
    return (
        as_rows(found.attention.query, grafting),
        row,
        _heads(found.keys, heads, grafting),
        _heads(found.values, heads, grafting),
        _pool(found, width, grafting, reach),
    )


def _pool(found: Latent, width: int, grafting: Grafting, reach: Reach) -> fx.Node:
    """The cache of these rows; layers that read the same rows, each by maps of its own, share one."""
    shared = None if found.shared is None else (found.shared.node.name, found.shared.heads_dim)
    key = shared, reach
    pools = found.keys.source.meta.setdefault("latent_pools", {})
    if key in pools:
        return grafting.inputs[pools[key]]
    dtype = found.keys.source.meta["dtype"]
    pool = grafting.row_pool(unused_label("latent", grafting), (width,), dtype, reach)
    pools[key] = grafting.row_specs[-1].name
    return pool


def starts_and_masks(found: Latent, grafting: Grafting) -> tuple[object, ...]:
    """From `latent_start` on, the operator's last arguments."""
    score = found.attention.score
    relation = score.relation
    return (
        found.latent_start,
        found.shared_start,
        score.scale,
        relation.window,
        relation.chunk,
        score.softcap,
        as_vector(found.attention.sinks, grafting),
    )


def saving(found: Latent) -> str:
    """A line for the report."""
    shared, heads = found.shared.width if found.shared else 0, found.attention.query.heads
    full = heads * (found.keys.size + found.values.size + shared)
    width = _rank(found) + shared
    return f"weights absorbed, no second copy: {width} values a token in place of {full}"


def _rank(found: Latent) -> int:
    rank = shape_of(found.keys.source)[-1]
    assert isinstance(rank, int)
    return rank


def _heads(linear: LinearMap, heads: int, grafting: Grafting) -> fx.Node:
    """A view of the map's weight: [heads, size, R]."""
    dtype, rank = linear.weight.meta["dtype"], shape_of(linear.weight)[1]
    assert isinstance(rank, int)
    sizes = [heads, linear.stride, rank]
    whole = grafting.call(
        aten.reshape.default, linear.weight, sizes, shape=tuple(sizes), dtype=dtype
    )
    if linear.size == linear.stride:
        return whole
    shape = (heads, linear.size, rank)
    return grafting.call(
        aten.slice.Tensor,
        whole,
        1,
        linear.offset,
        linear.offset + linear.size,
        shape=shape,
        dtype=dtype,
    )


PASS = Pass(
    "latent_attention", "latent attention", "regraft::latent_attention", pattern, check, rewrite
)
