"""Sums in one order per row, and what is made of sums: means, softmax, norms. Ordering with ties by index.

Every addition is elementwise, and an elementwise IEEE addition has one result wherever in a tensor it is computed and
by however wide a register. So no vector width, batch size or thread count has a say in the order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a row of this dtype is summed in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over `dim`, which stays with size 1, in x's dtype: the upper half is added to the lower until one is left."""
    count = x.shape[dim]
    if count == 0:
        return x.sum(dim, keepdim=True)
    half = (count + 1) // 2
    sums = x.narrow(dim, 0, half).clone(memory_format=torch.contiguous_format)
    if count > half:
        sums.narrow(dim, 0, count - half).add_(x.narrow(dim, half, count - half))
    while half > 1:
        count, half = half, (half + 1) // 2
        sums.narrow(dim, 0, count - half).add_(sums.narrow(dim, half, count - half))
    return sums.narrow(dim, 0, 1)


def sum_over(x: Tensor, dims: Sequence[int], keepdim: bool, mean: bool) -> Tensor:
    """Sum or mean over `dims`, computed in float32 or wider, in x's dtype."""
    order = sorted(dim % x.dim() for dim in dims)
    total = x.to(wide(x.dtype))
    for dim in order:
        total = tree_sum(total, dim)
    if mean:
        total = total / math.prod(x.shape[dim] for dim in order)
    total = total.to(x.dtype).contiguous()
    return total if keepdim else total.squeeze(order)


def softmax(x: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
    """Softmax over `dim` or its logarithm, computed in float32 or wider, as `dtype`."""
    shifted = x.to(torch.promote_types(wide(x.dtype), dtype))
    shifted = shifted - shifted.amax(dim, keepdim=True)
    powers = shifted.exp()
    total = tree_sum(powers, dim)
    return (shifted - total.log() if log else powers / total).to(dtype)


def norm(
    x: Tensor, num_dims: int, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> Tensor:
    """Layer norm (centered) or RMS norm over the last `num_dims` dimensions, in x's dtype."""
    dims = range(-num_dims, 0)
    rows = x.to(wide(x.dtype))
    if centered:
        rows = rows - sum_over(rows, dims, keepdim=True, mean=True)
    variance = sum_over(rows * rows, dims, keepdim=True, mean=True)
    rows = rows / (variance + eps).sqrt()
    if weight is not None:
        rows = rows * weight.to(rows.dtype)
    if bias is not None:
        rows = rows + bias.to(rows.dtype)
    return rows.to(x.dtype)


def ordered(x: Tensor, count: int, dim: int, descending: bool) -> tuple[Tensor, Tensor]:
    """The first `count` of `dim` in order, and where they were: of equal ones, the earlier."""
    values, indices = x.sort(dim=dim, descending=descending, stable=True)
    return (
        values.narrow(dim, 0, count).contiguous(),
        indices.narrow(dim, 0, count).contiguous(),
    )


def topk(x: Tensor, k: int, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    """The first `k` of `dim` in order."""
    return ordered(x, k, dim, largest)


def sort(x: Tensor, dim: int, descending: bool) -> tuple[Tensor, Tensor]:
    """All of `dim` in order."""
    return ordered(x, x.shape[dim], dim, descending)
