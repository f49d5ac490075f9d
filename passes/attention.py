"""Attention over a request's own tokens -> paged_attention.

Anything that ends in softmax over keys times values: fused or spelled out, any head layout, keys and values with
fewer heads than queries, masks that say causal, window or chunk, softcaps, sinks, biases by distance. The cache holds
k and v as they are before heads are repeated.
"""

from __future__ import annotations

import itertools
import re
import sys
from dataclasses import dataclass

import sympy
import torch
from torch import fx

import regraft.kernels.paged_attention  # noqa: F401 (registers the operator)
from regraft.rewriter.attention_core import Core, Layout, find_core
from regraft.rewriter.attention_rows import Rows, find_rows, without_repeats
from regraft.rewriter.declare import EVERYTHING, Reach
from regraft.rewriter.formulas import Cell
from regraft.rewriter.graph import TOKENS
from regraft.rewriter.indexing import Element
from regraft.rewriter.integers import ZERO, Expr, Index, Quotient
from regraft.rewriter.masks import shorten
from regraft.rewriter.pattern import Declined, Grafting, Pass, Region
from regraft.rewriter.scores import MASKED, Score, read_score

from .row_formula import is_expressible, row_values
from .token_sinks import TokenSinks, find_token_sinks, lower_scores, with_feature

aten = torch.ops.aten


def pattern(region: Region) -> Core | Declined:
    """The softmax and the products around the region's closer."""
    return find_core(region.closer)


@dataclass(frozen=True)
class HeadVector:
    """One number per query head: `values`, or else the weight `node` [heads] (other dimensions 1) times `factor`."""

    values: tuple[float, ...] = ()
    node: fx.Node | None = None
    factor: float = 1.0


@dataclass(frozen=True)
class Plan:
    """Everything that paged_attention is called with."""

    closer: fx.Node
    layout: Layout
    score: Score
    query: Rows
    key: Rows
    value: Rows
    slopes: HeadVector | None
    sinks: HeadVector | None
    by_distance: Rows | None
    query_index: Index
    token_sinks: TokenSinks | None = None


def read_plan(core: Core) -> Plan | Declined:
    """The rewrite is an equivalence if the score is a known function of q . k and every head reads rows in order."""
    products, axes = core.products, core.axes
    score = read_score(
        core.score, core.beside, axes, lambda c: c.args[0].name in products, masked_below(core)
    )
    if isinstance(score, Declined):
        return _at(score, core)
    left, right, feature = products[score.product.args[0].name]
    if not any(axes.q in at.free_symbols for at in left[1]):
        left, right = right, left
    rows = _matching_rows(core, left, right, feature)
    if isinstance(rows, Declined):
        return _at(rows, core)
    slopes = _head_vector(score.slope, axes.h, core.closer.graph)
    if isinstance(slopes, Declined):
        return _at(slopes, core)
    token_sinks = find_token_sinks(score.sink, score.softcap, axes, core.closer.graph)
    if isinstance(token_sinks, Declined):
        return _at(token_sinks, core)
    of_head = score.sink if token_sinks is None else ZERO
    sinks = _head_vector(of_head, axes.h, core.closer.graph)
    if isinstance(sinks, Declined):
        return _at(sinks, core)
    if slopes is not None and sinks is not None:
        return _at(
            Declined(
                "sinks together with a slope by position",
                fix="the softmax had sinks or a slope, not both",
            ),
            core,
        )
    by_distance = _distance_rows(score, core)
    if isinstance(by_distance, Declined):
        return _at(by_distance, core)
    return Plan(
        core.closer, core.layout, score, *rows, slopes, sinks, by_distance, axes.q, token_sinks
    )


def masked_below(core: Core) -> float:
    """The finite score that counts as minus infinity: the least of float16 is above MASKED."""
    of_half = core.closer.meta["dtype"] == torch.float16
    return float(torch.finfo(torch.float16).min) if of_half else MASKED


def _at(declined: Declined, core: Core) -> Declined:
    """The reason with a node: its own, or the first one that its formula names, or the softmax."""
    named = dict.fromkeys(re.findall(r"(\w+)\[", declined.reason))
    nodes = {node.name: node for node in core.closer.graph.nodes if node.name in named}
    first = next((nodes[name] for name in named if name in nodes), core.softmax)
    return Declined(declined.reason, declined.node or first, 0.5, declined.fix)


def _matching_rows(
    core: Core, query: Element, key: Element, feature: Index
) -> tuple[Rows, Rows, Rows] | Declined:
    """Rows of q, k and v with heads as the operator groups them, of one dtype."""
    axes, found = core.axes, []
    elements = (
        (query, axes.q, feature),
        (key, axes.k, feature),
        (core.value, axes.k, core.value_feature),
    )
    for name, (element, token, at) in zip("qkv", elements):
        candidates = find_rows(element, token, at, axes.h)
        if not candidates:
            return Declined(
                f"{name} is not laid out as rows of heads", element[0],
                fix=f"{name} were one projection of the token's own row, split into heads",
            )  # fmt: skip
        in_order = [rows for rows in candidates if rows.head == _group(axes.h, rows.heads)]
        if name == "q":
            in_order = [rows for rows in in_order if rows.heads == axes.h.size]
        if not in_order:
            head = shorten(candidates[0].head)
            return Declined(
                f"query head h reads head {head} of {name}", candidates[0].node,
                fix=f"neighbouring query heads shared one head of {name}",
            )  # fmt: skip
        if name != "q":
            in_order.append(without_repeats(in_order[-1], token, at, axes.h))
        found.append(in_order)
    return _alike(*found)


def _alike(
    q_rows: list[Rows], k_rows: list[Rows], v_rows: list[Rows]
) -> tuple[Rows, Rows, Rows] | Declined:
    """The earliest rows of one dtype, k and v of the same number of heads."""
    for q, k, v in itertools.product(*(reversed(rows) for rows in (q_rows, k_rows, v_rows))):
        if q.dtype == k.dtype == v.dtype and k.heads == v.heads:
            return q, k, v
    q, k, v = q_rows[0], k_rows[0], v_rows[0]
    if q.dtype != k.dtype or k.dtype != v.dtype:
        return Declined(
            f"q, k and v differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}", k.node,
            fix="all three were cast to one dtype before the product",
        )  # fmt: skip
    return Declined(
        f"k has {k.heads} heads and v has {v.heads}", k.node, fix="k and v had as many heads"
    )


def _group(h: Index, heads: int) -> Expr | None:
    """The key head that query head h reads when neighbours share one; None if they cannot."""
    if heads == 1:
        return ZERO
    return None if int(h.size) % heads else Quotient(h, h.size // heads)


def _head_vector(value: Expr | None, h: Index, graph: fx.Graph) -> HeadVector | Declined | None:
    if value is None:
        return None
    cells = value.atoms(Cell)
    if not cells:
        heads = range(int(h.size))
        return HeadVector(tuple(float(value.xreplace({h: sympy.Integer(i)})) for i in heads))
    cell = next(iter(cells))
    node = next((n for n in graph.nodes if n.name == cell.args[0].name), None)
    factor = value / cell
    places = [at for at in cell.args[1:] if at != ZERO]
    if not factor.is_number or node is None or node.op != "get_attr" or places != [h]:
        return Declined(f"one number per head expected: {shorten(value)}", node)
    return HeadVector((), node, float(factor))


def _distance_rows(score: Score, core: Core) -> Rows | Declined | None:
    """The tensor [T, heads, distances] of a bias by distance."""
    if score.by_distance is None:
        return None
    cell, factor = score.by_distance.cell, score.by_distance.factor
    if not is_expressible(factor, core.axes.q):
        return Declined(f"the bias by distance is scaled by {shorten(factor)}")
    node = next(n for n in core.closer.graph.nodes if n.name == cell.args[0].name)
    distance = next(at for at in cell.args[1:] if isinstance(at, Index) and at.name == "distance")
    rows = find_rows((node, cell.args[1:]), core.axes.q, distance, core.axes.h)
    in_order = [r for r in rows if r.heads == core.axes.h.size and r.head == core.axes.h]
    return in_order[-1] if in_order else Declined("the bias is not laid out as rows of heads", node)


def rewrite(plan: Plan, grafting: Grafting) -> None:
    """Rows of q, k and v into paged_attention, its rows back into the closer's layout."""
    score, relation = plan.score, plan.score.relation
    reach = reach_of(plan)
    q, k, v = (as_rows(rows, grafting) for rows in (plan.query, plan.key, plan.value))
    key = plan.key
    if plan.token_sinks is not None:
        values = as_rows(plan.token_sinks.rows, grafting)
        q, k = lower_scores(plan.token_sinks, score.scale, values, q, k, grafting)
        key = with_feature(key)
        grafting.notes.append("a sink of each token is one more feature of queries and keys")
    attended = grafting.call(
        torch.ops.regraft.paged_attention.default,
        q,
        k,
        v,
        row_pool("k", key, grafting, reach),
        row_pool("v", plan.value, grafting, reach),
        *grafting.sequences(reach),
        score.scale,
        relation.window,
        relation.chunk,
        score.softcap,
        as_vector(plan.sinks, grafting),
        as_vector(plan.slopes, grafting),
        _distance_bias(plan, grafting),
        shape=(TOKENS, plan.query.heads, plan.value.width),
        dtype=plan.query.dtype,
    )
    grafting.replace(plan.closer, as_result(attended, plan, grafting))
    grafting.mask = str(score)


def as_rows(rows: Rows, grafting: Grafting) -> fx.Node:
    """`[T, heads, width]`."""
    node, shape = rows.node, list(rows.node.meta["shape"])
    if rows.stride != 1 and rows.heads_dim is not None:
        shape[rows.heads_dim] = rows.heads
        every = (rows.heads_dim, 0, sys.maxsize, rows.stride)
        node = grafting.call(aten.slice.Tensor, node, *every, shape=tuple(shape), dtype=rows.dtype)
    dims = [rows.token_dim, *([] if rows.heads_dim is None else [rows.heads_dim]), rows.feature_dim]
    for dim in reversed(range(len(shape))):
        if dim not in dims:
            del shape[dim]
            node = grafting.call(
                aten.select.int, node, dim, 0, shape=tuple(shape), dtype=rows.dtype
            )
            dims = [d - (d > dim) for d in dims]
    if dims != sorted(dims):
        shape = [shape[d] for d in dims]
        node = grafting.call(aten.permute.default, node, dims, shape=tuple(shape), dtype=rows.dtype)
    if rows.heads_dim is None:
        shape = [TOKENS, 1, rows.width]
        node = grafting.call(aten.unsqueeze.default, node, 1, shape=tuple(shape), dtype=rows.dtype)
    return node


def _distance_bias(plan: Plan, grafting: Grafting) -> fx.Node | None:
    """`[T, heads, distances]`."""
    rows, bias = plan.by_distance, plan.score.by_distance
    if rows is None or bias is None:
        return None
    entries, shape = as_rows(rows, grafting), (TOKENS, rows.heads, rows.width)
    factor = row_values(bias.factor, plan.query_index, grafting)
    if isinstance(factor, float):
        if factor == 1.0:
            return entries
        return grafting.call(aten.mul.Scalar, entries, factor, shape=shape, dtype=rows.dtype)
    for size in ((TOKENS, 1), (TOKENS, 1, 1)):
        factor = grafting.call(aten.unsqueeze.default, factor, 1, shape=size, dtype=torch.float32)
    return grafting.call(aten.mul.Tensor, entries, factor, shape=shape, dtype=torch.float32)


def reach_of(plan: Plan) -> Reach:
    """How far back this attention reads rows."""
    return Reach(plan.score.relation.window, plan.score.relation.chunk)


def row_pool(name: str, rows: Rows, grafting: Grafting, reach: Reach = EVERYTHING) -> fx.Node:
    """The cache of these rows; layers that read the same rows equally far back share one."""
    key = (
        name,
        rows.token_dim,
        rows.heads_dim,
        rows.feature_dim,
        rows.heads,
        rows.width,
        rows.stride,
        reach,
    )
    pools = rows.node.meta.setdefault("row_pools", {})
    if key in pools:
        return grafting.inputs[pools[key]]
    label, shape = unused_label(name, grafting), (rows.heads, rows.width)
    pool = grafting.row_pool(label, shape, rows.dtype, reach)
    pools[key] = grafting.row_specs[-1].name
    return pool


def unused_label(name: str, grafting: Grafting) -> str:
    """`name`, numbered where another attention of the same module has it already."""
    label, number = name, 2
    while f"{grafting.region.path}:{label}" in grafting.inputs:
        label, number = f"{name}{number}", number + 1
    return label


def as_vector(vector: HeadVector | None, grafting: Grafting) -> fx.Node | None:
    if vector is None:
        return None
    if vector.node is None:
        return _constant(torch.tensor(vector.values, dtype=torch.float32), grafting)
    node, dtype = vector.node, vector.node.meta["dtype"]
    heads = max(node.meta["shape"])
    if len(node.meta["shape"]) != 1:
        node = grafting.call(aten.reshape.default, node, [heads], shape=(heads,), dtype=dtype)
    if vector.factor != 1.0:
        node = grafting.call(aten.mul.Tensor, node, vector.factor, shape=(heads,), dtype=dtype)
    return node


def _constant(tensor: torch.Tensor, grafting: Grafting) -> fx.Node:
    """A tensor that the graph does not have yet, as a buffer of its module."""
    module = grafting.graph.owning_module
    assert module is not None, "the graph belongs to no module"
    name = f"constant_{len(list(module.buffers(recurse=False)))}"
    closer = grafting.region.closer
    module.register_buffer(name, tensor.to(_device_of(closer)), persistent=False)
    with grafting.graph.inserting_before(closer):
        node = grafting.graph.get_attr(name)
    shape, meta = tuple(tensor.shape), closer.meta
    node.meta.update(shape=shape, dtype=tensor.dtype, path=meta["path"], source=meta["source"])
    return node


def _device_of(node: fx.Node) -> torch.device:
    value = node.meta.get("val")
    return value.device if isinstance(value, torch.Tensor) else torch.device("cpu")


def as_result(attended: fx.Node, plan: Plan, grafting: Grafting) -> fx.Node:
    """`[T, heads, width]` in the shape and dtype of the closer's result."""
    shape, dtype = plan.closer.meta["shape"], plan.closer.meta["dtype"]
    heads, width = plan.query.heads, plan.value.width
    if plan.query.dtype != dtype:
        attended = grafting.call(
            aten._to_copy.default, attended, shape=(TOKENS, heads, width), dtype=dtype
        )
        attended.kwargs = {"dtype": dtype}
    layout, rank = plan.layout, len(shape)
    split = (TOKENS, *layout.head_sizes, width)
    if len(layout.head_sizes) != 1:
        sizes = [-1, *layout.head_sizes, width]
        attended = grafting.call(aten.reshape.default, attended, sizes, shape=split, dtype=dtype)
    dims = [0] * rank
    for position, dim in enumerate((layout.token_dim, *layout.head_dims, layout.width_dim)):
        dims[dim] = position
    return grafting.call(aten.permute.default, attended, dims, shape=shape, dtype=dtype)


PASS = Pass(
    "attention",
    kind="attention",
    operator="regraft::paged_attention",
    pattern=pattern,
    check=read_plan,
    rewrite=rewrite,
)
