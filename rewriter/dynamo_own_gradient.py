"""A model's own `torch.autograd.Function`s: in Dynamo's graph each is one node, with two graphs of its own."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.autograd_function import autograd_function_apply

from regraft.kernels.varlen import enlist_backward, own_gradient


class NotInlined(RuntimeError):
    """A function that cannot be had as plain operations and a backward."""


class _Forward(fx.Interpreter):
    """Runs a graph within a trace, whose grad mode is none of its business."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch._C._set_grad_enabled:
            return None
        return super().call_function(target, args, kwargs)


@dataclass
class _Backward:
    """The function's backward, given the tensors and sizes that it saves. `saved` has their types in place of them, and
    all else as it is; `takes` says which of its results are wanted. `is_read` says of the function's results which one
    has the gradient.
    """

    graph: fx.GraphModule
    saved: list[Any]
    takes: list[int]
    is_read: list[bool]

    def __call__(
        self, grad: Tensor, tensors: Sequence[Tensor], sizes: Sequence[int]
    ) -> list[Tensor | None]:
        given = {Tensor: iter(tensors), torch.SymInt: iter(sizes)}
        saved = [next(given[value]) if isinstance(value, type) else value for value in self.saved]
        grads = [grad if is_read else None for is_read in self.is_read]
        found = fx.Interpreter(self.graph).run(*grads, *saved)
        found = found if isinstance(found, (tuple, list)) else (found,)
        return [found[index] for index in self.takes]


def own_gradient_of(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The value of such a node, its forward as plain operations; NotImplemented for any other. Raises NotInlined."""
    if node.target is not autograd_function_apply:
        return NotImplemented
    forward, backward, *inputs = args
    if kwargs.get("dirty_idx"):
        raise NotInlined("an autograd.Function that writes into its inputs")
    result, saved = _Forward(forward).run(*inputs)
    is_single = not isinstance(result, (tuple, list))
    results = [result] if is_single else [*result]
    at = 0 if is_single else _read(node, backward, len(results))
    if at not in (kwargs.get("non_differentiable_idx") or ()):
        is_read = [index == at for index in range(len(results))]
        results[at] = _with_backward(results[at], inputs, saved, backward, is_read)
    return results[0] if is_single else type(result)(results)


def _read(node: fx.Node, backward: fx.GraphModule, count: int) -> int:
    """Which of a function's results is read. Torch 2.11 gives whatever it computes on the way as further ones."""
    read = {user.args[1] for user in node.users if user.target is operator.getitem}
    grads = list(backward.graph.find_nodes(op="placeholder"))[:count]
    is_one = len(read) == 1 and all(user.target is operator.getitem for user in node.users)
    if not is_one or any(grad.users for index, grad in enumerate(grads) if index not in read):
        raise NotInlined("an autograd.Function with several results")
    (at,) = read
    assert isinstance(at, int)
    return at


def _with_backward(
    value: Tensor,
    inputs: Sequence[Any],
    saved: Sequence[Any],
    graph: fx.GraphModule,
    is_read: list[bool],
) -> Tensor:
    kinds = [next((k for k in (Tensor, torch.SymInt) if isinstance(x, k)), None) for x in saved]
    at = [index for index, x in enumerate(inputs) if isinstance(x, Tensor)]
    backward = _Backward(graph, [kind or x for kind, x in zip(kinds, saved)], at, is_read)
    graph.regraft_backward = backward  # which lives as long as Dynamo's graph does
    tensors, sizes = ([x for x in saved if isinstance(x, k)] for k in (Tensor, torch.SymInt))
    return own_gradient(value, [inputs[i] for i in at], tensors, sizes, enlist_backward(backward))
