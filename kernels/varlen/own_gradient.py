"""A value whose gradient a model defines itself (a `torch.autograd.Function`), as an operator that stays in a graph.

The function's forward is in the graph as plain operations. What they compute goes through `own_gradient`, which
changes nothing about it, and hands the gradient to the function's own backward instead of to theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., Sequence[Tensor | None]]
"""(grad, saved, sizes) -> the gradient of each input, None where there is none."""

_BACKWARDS: weakref.WeakValueDictionary[str, Backward] = weakref.WeakValueDictionary()
"""By key. Whoever enlists one keeps it alive as long as graphs name it."""


def enlist_backward(backward: Backward) -> str:
    """The key by which `own_gradient` names a backward."""
    key = str(id(backward))  # an id is free again only when the entry is gone too
    _BACKWARDS[key] = backward
    return key


@torch.library.custom_op(
    "regraft::own_gradient",
    mutates_args=(),
    schema="(Tensor result, Tensor[] inputs, Tensor[] saved, SymInt[] sizes, str key) -> Tensor",
)
def own_gradient(
    result: Tensor,
    inputs: Sequence[Tensor],
    saved: Sequence[Tensor],
    sizes: Sequence[int],
    key: str,
) -> Tensor:
    """A copy of `result`, whose gradient goes to `inputs` by the backward `key` and nowhere else."""
    return result.clone()


@own_gradient.register_fake
def _(result: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(result)


@torch.library.custom_op(
    "regraft::own_gradient_backward",
    mutates_args=(),
    schema="(Tensor grad, bool[] needed, Tensor[] inputs, Tensor[] saved, SymInt[] sizes, str key) -> Tensor[]",
)
def own_gradient_backward(
    grad: Tensor,
    needed: Sequence[bool],
    inputs: Sequence[Tensor],
    saved: Sequence[Tensor],
    sizes: Sequence[int],
    key: str,
) -> list[Tensor]:
    """Gradients of the inputs that are `needed`."""
    found = _BACKWARDS[key](grad, saved, sizes)
    return [
        torch.zeros_like(x) if g is None else g.clone()
        for x, g, needs in zip(inputs, found, needed, strict=True)
        if needs
    ]


@own_gradient_backward.register_fake
def _(grad: Tensor, needed: Sequence[bool], inputs: Sequence[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x, needs in zip(inputs, needed, strict=True) if needs]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, given, saved, ctx.sizes, ctx.key = inputs
    ctx.num_inputs, ctx.num_saved = len(given), len(saved)
    ctx.save_for_backward(*given, *saved)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    inputs, saved = ctx.saved_tensors[: ctx.num_inputs], ctx.saved_tensors[ctx.num_inputs :]
    needed = list(ctx.needs_input_grad[1])
    found = iter(own_gradient_backward(grad, needed, inputs, saved, ctx.sizes, ctx.key))
    gradients = [next(found) if needs else None for needs in needed]
    return None, gradients, [None] * ctx.num_saved, None, None


own_gradient.register_autograd(_backward, setup_context=_save)
