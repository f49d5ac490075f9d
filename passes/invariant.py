"""Batch invariance: a request's logits are the same bits whatever rides along and however its text was cut.

    before   linear, matmul, mean, softmax, topk, silu, paged_attention, gated_delta_rule, ...
    after    their invariant forms (kernels/invariant), whose order of sums per row never changes

Runs after the proof and behind every other pass. The graph is then walked once more: an operation that is not known
to be invariant is a RewriteError with its module path and source line, unless allowed by name. What the invariant
products rest on is measured on the model's own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import getitem as _getitem
from typing import Any

import torch
from torch import fx

from regraft.kernels.invariant import steady_attention, steady_experts, steady_product
from regraft.passes.invariant_exact import doubt
from regraft.passes.invariant_rules import Form, form_of
from regraft.rewriter.errors import RewriteError
from regraft.rewriter.graph import CapturedGraph, shape_of
from regraft.rewriter.pattern import Declined
from regraft.rewriter.token_axis.value import has_tokens

WeightOf = Callable[[fx.Node], torch.Tensor]

ALLOW = 'allow it by name, allow_variant=("{}",): then nothing is promised of what it computes'


def make_invariant(captured: CapturedGraph, allowed: Collection[str] = ()) -> int:
    """Rewrite `captured` in place; how many operations were replaced.

    `allowed` names operations ("aten.pow.Tensor_Scalar", "replay") and module paths that may stay as they are. Raises
    RewriteError on any other that is not known to be invariant, and where a product is not.
    """
    device = device_of(captured)
    graph, module = captured.graph, captured.module
    count = replace(graph, fixed_nodes(graph), allowed, device)
    module.recompile()
    prove(graph, fixed_nodes(graph), allowed, device)
    measure(graph, lambda node: getattr(module, str(node.target)), device)
    return count


def replace(
    graph: fx.Graph, fixed: set[fx.Node], allowed: Collection[str] = (), device: str = "cpu"
) -> int:
    """Put the invariant form in the place of every operation that has one on `device`; how many."""
    count = sum(_replace(node, fixed, allowed, device) for node in list(graph.nodes))
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    graph.lint()
    return count


def fixed_nodes(graph: fx.Graph, weights: Collection[str] = ()) -> set[fx.Node]:
    """Nodes that are computed from weights alone, the same in every step. `weights`: inputs that are weights."""
    fixed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr" or (node.op == "placeholder" and node.target in weights):
            fixed.add(node)
        elif node.op == "call_function" and not _has_tokens(node):
            if all(operand in fixed for operand in node.all_input_nodes):
                fixed.add(node)
    return fixed


def _has_tokens(node: fx.Node) -> bool:
    return any(map(has_tokens, node.meta.get("shape") or ()))


def _replace(node: fx.Node, fixed: set[fx.Node], allowed: Collection[str], device: str) -> int:
    if not _is_call(node) or node in fixed or is_allowed(node, allowed):
        return 0
    form = form_of(node, fixed, device)
    if isinstance(form, Declined):
        raise _error(node, form.reason)
    if form is None:
        return 0
    new = _insert(node, form)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return 1


def _is_call(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def _insert(node: fx.Node, form: Form) -> fx.Node:
    graph = node.graph
    with graph.inserting_before(node):
        new = graph.call_function(form.operator, form.args)
        new.meta.update(node.meta)
        if form.output is not None:
            new.meta.update(shape=None, dtype=None)
            new = graph.call_function(_getitem, (new, form.output))
            new.meta.update(node.meta)
    return new


def prove(
    graph: fx.Graph, fixed: set[fx.Node], allowed: Collection[str] = (), device: str = "cpu"
) -> None:
    """Raises RewriteError at the first operation that is not known to be invariant and not allowed by name."""
    for node in graph.nodes:
        if node in fixed or node.op in ("placeholder", "get_attr", "output"):
            continue
        reason = "a replayed region" if _name(node) == "replay" else doubt(node, device)
        if reason and not is_allowed(node, allowed):
            raise _error(node, reason)


def is_allowed(node: fx.Node, allowed: Collection[str]) -> bool:
    """Whether an operation, or a module that it belongs to, is named."""
    path = str(node.meta.get("path", ""))
    parents = {".".join(path.split(".")[:n]) for n in range(1, path.count(".") + 2)}
    return bool(({_name(node)} | parents) & set(allowed))


def _name(node: fx.Node) -> str:
    is_replay = node.op == "call_module" or str(node.target) == "regraft.varlen_replay.default"
    return "replay" if is_replay else str(node.target)


def _error(node: fx.Node, reason: str) -> RewriteError:
    return RewriteError(
        f"batch_invariant=True: {reason}, so its bits may depend on the rest of the batch",
        operation=_name(node),
        path=node.meta.get("path", ""),
        source=node.meta.get("source", ""),
        fix=ALLOW.format(_name(node)),
    )


DEVICES = ("cpu", "cuda")
"""Types of devices that the operators run on."""


def device_of(captured: CapturedGraph) -> str:
    """The type of device that a model is on. Raises RewriteError for one without operators, and for two."""
    found = {tensor.device.type: name for name, tensor in captured.weights.items()}
    for device, name in found.items():
        if device not in DEVICES:
            raise RewriteError(
                f"batch_invariant=True on {device}: only the CPU and CUDA have invariant operators",
                path=captured.weight_names.get(name, name),
                fix='move the model to one of them (model.to("cpu")), or leave batch_invariant out',
            )
    if len(found) > 1:
        raise RewriteError(
            f"batch_invariant=True for a model on {' and '.join(sorted(found))}",
            path=captured.weight_names.get(found["cpu"], found["cpu"]),
            fix="move all of the model to one device, or leave batch_invariant out",
        )
    return next(iter(found), "cpu")


def measure(graph: fx.Graph, weight_of: WeightOf, device: str = "cpu") -> None:
    """Raises RewriteError if a row's bits depend on its place in a tile, or on the tile, for any product's shape."""
    known: set[object] = set()
    for node in graph.nodes:
        if not _is_call(node) or node.target.namespace != "regraft":
            continue
        for matrix in _matrices(node, weight_of):
            key = (matrix.shape, matrix.stride(), matrix.dtype)
            if key not in known and not steady_product(matrix):
                raise _unsteady(node, f"[{', '.join(map(str, matrix.shape))}] {matrix.dtype}")
            known.add(key)
        if node.target._opname == "invariant_expert_linear":
            matrices = _value(node.args[1], weight_of)
            kind = ("experts", matrices.shape, matrices.stride(), matrices.dtype, node.args[3])
            if kind not in known and not steady_experts(matrices, node.args[3]):
                raise _unsteady(node, f"of experts, {matrices.dtype}")
            known.add(kind)
        sizes = _attended(node)
        if sizes is not None and sizes not in known and not steady_attention(*sizes, device):
            raise _unsteady(node, f"with {sizes[2]} heads of width {sizes[0]}")
        known.add(sizes)


def _unsteady(node: fx.Node, what: str) -> RewriteError:
    return _error(node, f"a product {what} rounds a row by its place in a tile on this machine")


def _matrices(node: fx.Node, weight_of: WeightOf) -> list[torch.Tensor]:
    """The matrices [N, K] that a node multiplies rows with, one of each shape."""
    name, args = node.target._opname, node.args
    if name == "invariant_linear":
        return [_value(args[1], weight_of)]
    if name == "invariant_matmul" and args[2] != "none":
        weight = _value(args[1], weight_of).mT if args[2] == "right" else _value(args[0], weight_of)
        return [weight.reshape(-1, *weight.shape[-2:])[0]]
    if name == "invariant_latent_attention":
        to_key, to_value = (_value(args[at], weight_of) for at in (2, 3))
        return [to_key.mT.reshape(-1, *to_key.mT.shape[-2:])[0], to_value[0]]
    return []


def _attended(node: fx.Node) -> tuple[int, int, int, int, torch.dtype] | None:
    """(width, value width, heads, key heads, dtype) of an attention."""
    name, args = node.target._opname, node.args
    if name == "invariant_paged_attention":
        (_, heads, width), (_, kv_heads, v_width) = shape_of(args[0]), shape_of(args[2])
        return int(width), int(v_width), int(heads), int(kv_heads), args[0].meta["dtype"]
    if name == "invariant_latent_attention":
        width, (heads, _, rank) = shape_of(args[1])[-1], shape_of(args[2])
        return int(width), int(rank), int(heads), 1, args[0].meta["dtype"]
    return None


def _value(node: Any, weight_of: WeightOf) -> torch.Tensor:
    """A tensor that is made of weights alone."""
    if node.op in ("get_attr", "placeholder"):
        return weight_of(node)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: _value(operand, weight_of))
    return node.target(*args, **kwargs)
