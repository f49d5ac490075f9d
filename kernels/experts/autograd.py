"""Gradients of `expert_linear`: of the rows by the operator itself, of the weights one product an expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .schema import expert_linear


@torch.library.custom_op("regraft::expert_linear_weight_grad", mutates_args=())
def expert_linear_weight_grad(
    grad: Tensor, x: Tensor, weight: Tensor, expert_ids: Tensor, transposed: bool
) -> Tensor:
    """The gradient of `weight`, of its shape and dtype. Shapes: grad [S, out], x [S, in], expert_ids [S]."""
    order = expert_ids.argsort(stable=True)
    bounds = torch.bincount(expert_ids, minlength=weight.shape[0]).cumsum(0).tolist()
    left, right = (x, grad) if transposed else (grad, x)
    left, right = left[order], right[order]
    out = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    for expert, (start, end) in enumerate(zip([0, *bounds], bounds)):
        if end > start:
            out[expert] = left[start:end].T @ right[start:end]
    return out


@expert_linear_weight_grad.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, expert_ids: Tensor, transposed: bool) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, expert_ids, ctx.transposed = inputs
    ctx.save_for_backward(x, weight, expert_ids)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, weight, expert_ids = ctx.saved_tensors
    of_rows, of_weight, *_ = ctx.needs_input_grad
    return (
        expert_linear(grad, weight, expert_ids, not ctx.transposed) if of_rows else None,
        expert_linear_weight_grad(grad, x, weight, expert_ids, ctx.transposed)
        if of_weight
        else None,
        None,
        None,
    )


expert_linear.register_autograd(_backward, setup_context=_save)
