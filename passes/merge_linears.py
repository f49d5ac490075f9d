"""Projections that read the same rows -> one projection, whose weight is one tensor.

    before   q = linear(x, Wq);  k = linear(x, Wk);  v = linear(x, Wv)
    after    qkv = linear(x, W);  q, k, v = slices of qkv          W = [Wq; Wk; Wv], one storage

A small batch reads weights, and one large matrix is read faster than three small ones. The model's own parameters
become views into W: they are the same objects with the same values, a training step on them changes W, and nothing is
held twice. Not for weights of different dtypes, for a bias on some only, for tensors that are no plain parameters, nor
for a weight whose rows do not fill whole vectors.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import fx, nn

from regraft.rewriter.artifact import Merged, merge_storage
from regraft.rewriter.graph import CapturedGraph, is_aten, shape_of

aten = torch.ops.aten

ROWS = 8
"""Each part has a multiple of this many rows, so that parts of a result begin where fast kernels want them to."""


@dataclass(frozen=True)
class Group:
    """Linear nodes that read the same rows, in graph order, and what they read by attribute name."""

    nodes: tuple[fx.Node, ...]
    weights: tuple[str, ...]
    biases: tuple[str, ...]


def pattern(captured: CapturedGraph) -> list[Group]:
    """Groups of two or more that may be merged."""
    found: dict[object, list[fx.Node]] = defaultdict(list)
    for node in captured.graph.nodes:
        if is_aten(node, "linear") and (kind := _kind(node, captured.module)) is not None:
            found[(node.args[0], *kind)].append(node)
    groups = [_group(nodes) for nodes in found.values() if len(nodes) > 1]
    return _disjoint(groups, captured.module)


def _kind(node: fx.Node, module: fx.GraphModule) -> tuple[object, ...] | None:
    """What merged projections must agree in; None for one that cannot be merged."""
    _, weight, *rest = node.args
    bias = rest[0] if rest else None
    operands = [(weight, 2)] + [(bias, 1)] * (bias is not None)
    tensors = [_parameter(operand, module, dims) for operand, dims in operands]
    if any(tensor is None or tensor.shape[0] % ROWS for tensor in tensors):
        return None
    return (bias is None, *((t.dtype, t.device, t.requires_grad) for t in tensors if t is not None))


def _parameter(operand: object, module: fx.GraphModule, dims: int) -> nn.Parameter | None:
    if not isinstance(operand, fx.Node) or operand.op != "get_attr":
        return None
    tensor = module._parameters.get(str(operand.target))
    plain = (
        tensor is not None and type(tensor) is nn.Parameter and type(tensor.data) is torch.Tensor
    )
    if not plain or tensor is None or tensor.dim() != dims or not tensor.is_contiguous():
        return None
    return tensor


def _group(nodes: list[fx.Node]) -> Group:
    operands = [[str(n.target) for n in node.args[1:] if isinstance(n, fx.Node)] for node in nodes]
    biases = tuple(names[1] for names in operands if len(names) > 1)
    return Group(tuple(nodes), tuple(names[0] for names in operands), biases)


def _disjoint(groups: list[Group], module: fx.GraphModule) -> list[Group]:
    """A parameter can be a view into one tensor only. Equal groups (a block that is called twice) share theirs."""
    owner: dict[int, tuple[str, ...]] = {}
    kept = []
    for group in groups:
        tensors = [module._parameters[name] for name in (*group.weights, *group.biases)]
        names = group.weights + group.biases
        if len({id(t) for t in tensors}) < len(tensors):
            continue
        if all(owner.get(id(t), names) == names for t in tensors):
            owner.update((id(t), names) for t in tensors)
            kept.append(group)
    return kept


def merge(captured: CapturedGraph) -> tuple[Merged, ...]:
    """Rewrites every group, in place, and makes the parameters views; what was merged, for LiveWeights to keep up."""
    merged: dict[tuple[str, ...], Merged] = {}
    for group in pattern(captured):
        for parts in (group.weights, group.biases):
            if parts and parts not in merged:
                merged[parts] = Merged(f"merged_{len(merged)}", parts)
                merge_storage(captured.module, merged[parts])
        weight = merged[group.weights].attribute
        _rewrite(captured, group, weight, merged[group.biases].attribute if group.biases else None)
    captured.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    captured.graph.lint()
    captured.module.recompile()
    return tuple(merged.values())


def _rewrite(captured: CapturedGraph, group: Group, weight: str, bias: str | None) -> None:
    graph, first = captured.graph, group.nodes[0]
    widths = [int(shape_of(node)[-1]) for node in group.nodes]
    rank = len(shape_of(first))
    with graph.inserting_before(first):
        operands = [graph.get_attr(name) for name in (weight, bias) if name is not None]
        for operand in operands:
            tensor = getattr(captured.module, str(operand.target))
            operand.meta.update(shape=tuple(tensor.shape), dtype=tensor.dtype, path="", source="")
        whole = graph.call_function(aten.linear.default, (first.args[0], *operands))
        whole.meta.update(_facts(first, sum(widths)))
        start = 0
        for node, width in zip(group.nodes, widths):
            part = graph.call_function(aten.slice.Tensor, (whole, rank - 1, start, start + width))
            part.meta.update(_facts(node, width))
            node.replace_all_uses_with(part)
            start += width


def _facts(node: fx.Node, width: int) -> dict[str, object]:
    facts = {name: node.meta[name] for name in ("dtype", "path", "source")}
    return {**facts, "shape": (*shape_of(node)[:-1], width)}
