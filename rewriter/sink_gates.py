"""Attention whose result is scaled by how much a sink leaves it, in the one spelling that scores read.

    before   matmul(softmax(s), v) * sigmoid(logsumexp(s) - z)
    after    matmul(softmax(cat([s, z]))[..., :-1], v)

With Z the sum of exp(s) over the keys, sigmoid(log Z - z) = Z / (Z + exp(z)): what was divided by Z is divided by
Z + exp(z), the sum over the keys and one more column. Casts in between only round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .graph import TOKENS, Size, is_aten, named_arguments, shape_of, token_count

aten = torch.ops.aten


@dataclass(frozen=True)
class _Gate:
    """What `before` is made of."""

    product: fx.Node
    softmax: fx.Node
    scores: fx.Node
    sink: fx.Node
    keeps_dim: bool


def spell_sink_gates(graph: fx.Graph) -> None:
    """Rewrite every such gate of a functional graph, in place."""
    for node in list(graph.nodes):
        gate = _find(node) if is_aten(node, "mul") else None
        if gate is not None:
            with graph.inserting_before(node):
                node.replace_all_uses_with(_with_column(graph, gate))
            graph.erase_node(node)


def _find(node: fx.Node) -> _Gate | None:
    operands = [x for x in node.args if isinstance(x, fx.Node)]
    if len(operands) != 2:
        return None
    for product, factor in (operands, operands[::-1]):
        softmax = _softmax_of(product)
        sigmoid = _without_casts(factor)
        if is_aten(sigmoid, "unsqueeze") and sigmoid.args[1] in (-1, len(shape_of(sigmoid)) - 1):
            sigmoid = _without_casts(sigmoid.args[0])
        if softmax is None or not is_aten(sigmoid, "sigmoid"):
            continue
        difference = _without_casts(sigmoid.args[0])
        if is_aten(difference, "sub") and _is_total(difference, softmax):
            fits = shape_of(factor) == (*shape_of(product)[:-1], 1)
            if fits and node.meta["dtype"] == product.meta["dtype"]:
                keeps_dim = len(shape_of(difference)) == len(shape_of(product))
                return _Gate(product, softmax, softmax.args[0], difference.args[1], keeps_dim)
    return None


def _softmax_of(product: fx.Node) -> fx.Node | None:
    """The softmax over keys that a product takes as weights."""
    if not is_aten(product, "matmul", "bmm"):
        return None
    weights = _without_casts(product.args[0])
    if not is_aten(weights, "softmax", "_softmax"):
        return None
    return weights if weights.args[1] in (-1, len(shape_of(weights)) - 1) else None


def _is_total(difference: fx.Node, softmax: fx.Node) -> bool:
    """Whether a sink is taken off the logsumexp over the keys of the scores that `softmax` has."""
    total, sink = difference.args
    if not isinstance(total, fx.Node) or not isinstance(sink, fx.Node):
        return False
    total, shape = _without_casts(total), shape_of(softmax)
    return (
        is_aten(total, "logsumexp")
        and list(total.args[1]) in ([-1], [len(shape) - 1])
        and _without_casts(total.args[0]) is _without_casts(softmax.args[0])
        and shape_of(difference) == shape_of(total)
        and named_arguments(difference)["alpha"] == 1
        and all(isinstance(size, int) or size == TOKENS for size in shape)
    )


def _without_casts(node: fx.Node) -> fx.Node:
    while is_aten(node, "_to_copy", "to"):
        node = node.args[0]
    return node


def _with_column(graph: fx.Graph, gate: _Gate) -> fx.Node:
    """The product by a softmax over one more column of scores, which is dropped again behind it."""
    (*rows, keys), dtype = shape_of(gate.scores), gate.scores.meta["dtype"]
    tokens = token_count(graph)

    def call(target: Any, *args: Any, shape: tuple[Size, ...], dtype: torch.dtype) -> fx.Node:
        options = {"dtype": dtype} if target is aten._to_copy.default else {}
        made = graph.call_function(target, args, options)
        made.meta.update({**gate.softmax.meta, "shape": shape, "dtype": dtype})
        made.meta.pop("val", None)
        return made

    sink = gate.sink
    if sink.meta["dtype"] != dtype:
        sink = call(aten._to_copy.default, sink, shape=shape_of(sink), dtype=dtype)
    if not gate.keeps_dim:
        sink = call(aten.unsqueeze.default, sink, -1, shape=(*shape_of(sink), 1), dtype=dtype)
    sizes = [tokens if size == TOKENS else size for size in rows]
    column = call(aten.expand.default, sink, [*sizes, 1], shape=(*rows, 1), dtype=dtype)
    wider = (*rows, keys + 1)
    scores = call(aten.cat.default, [gate.scores, column], -1, shape=wider, dtype=dtype)
    dtype = gate.softmax.meta["dtype"]
    weights = call(gate.softmax.target, scores, *gate.softmax.args[1:], shape=wider, dtype=dtype)
    weights.kwargs = gate.softmax.kwargs
    weights = call(aten.slice.Tensor, weights, -1, 0, -1, shape=(*rows, keys), dtype=dtype)
    cast = gate.product.args[0].meta["dtype"]
    if cast != dtype:
        weights = call(aten._to_copy.default, weights, shape=(*rows, keys), dtype=cast)
    product = graph.node_copy(gate.product)
    product.args = (weights, gate.product.args[1])
    return product
