"""Batch invariance of a forward pass without caches, as `torch.compile(model, backend="regraft")` runs it.

The graph gets the operators that an engine with batch_invariant=True gets, in a form that has gradients: so the
log-probabilities of a rollout are those of the forward pass that is trained, bit for bit.
"""

from __future__ import annotations

from functools import partial
from operator import getitem

import torch
from torch import fx

from regraft.kernels.invariant import trained
from regraft.passes.invariant import device_of, fixed_nodes, measure, prove, replace
from regraft.rewriter.graph import CapturedGraph, shape_of
from regraft.rewriter.stateless import Stateless

aten = torch.ops.aten


def make_trainable(form: Stateless, captured: CapturedGraph) -> None:
    """Rewrite the graph, made of `captured`, in place. Raises RewriteError as `invariant.make_invariant` does."""
    graph = form.module.graph
    device = device_of(captured)
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            node.target = trained.SEQUENCES.get(_name(node), node.target)
    replace(graph, fixed_nodes(graph, form.weights), device=device)
    prove(graph, fixed_nodes(graph, form.weights), device=device)
    measure(graph, partial(_like, device), device)
    for node in list(graph.nodes):
        if _name(node) in trained.ROWS:
            node.target = trained.ROWS[_name(node)]
        elif _name(node) in ("invariant_topk", "invariant_sort"):
            _gathered(node)
    graph.lint()
    form.module.recompile()


def _name(node: fx.Node) -> str:
    target = node.target
    is_own = isinstance(target, torch._ops.OpOverload) and target.namespace == "regraft"
    return target._opname if is_own else ""


def _like(device: str, weight: fx.Node) -> torch.Tensor:
    """Numbers in the shape of a weight, which has no value yet."""
    generator = torch.Generator().manual_seed(0)
    sizes = [int(size) for size in shape_of(weight)]
    return torch.randn(sizes, generator=generator).to(device, weight.meta["dtype"])


def _gathered(node: fx.Node) -> None:
    """Values in order -> where they are, and what is there: this has a gradient."""
    source, *rest = node.args
    dim = rest[-2]
    count = rest[0] if _name(node) == "invariant_topk" else shape_of(source)[dim]
    with node.graph.inserting_before(node):
        where = node.graph.call_function(trained.order._opoverload, (source, count, dim, rest[-1]))
        values = node.graph.call_function(aten.gather.default, (source, dim, where))
    for user in list(node.users):
        assert user.target is getitem, "the outputs of an operator are taken one by one"
        new = where if user.args[1] else values
        new.meta.update(user.meta)
        user.replace_all_uses_with(new)
        user.graph.erase_node(user)
    node.graph.erase_node(node)
