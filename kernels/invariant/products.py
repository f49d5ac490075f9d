"""Matrix products in row tiles of one fixed size.

BLAS picks its kernels, and with them the order of sums, by the shape of a product. Here the shape never changes: TILE
rows, the last of them zeros where there are fewer. Rows are columns of the product that is computed, weight @ rows^T:
of the forms that were measured it is the one in which a row's bits depended on its place for no width (see `places`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regraft.kernels.experts.grouped import product_by_expert

from .reductions import tree_sum, wide

TILE = 16
"""Rows a product. Fewer waste less on a small batch, more read weights less often on a large one."""

Products = Callable[[Tensor, Tensor], Tensor]
"""[B, M, K], [B, N, K] -> [B, M, N]."""

_PAIRED = 1 << 22
"""About the number of elements of an intermediate of `paired_product`."""


def tiled_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] @ weight [N, K]^T -> [M, N]; weight may have any strides, always the same ones."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    for begin in range(0, x.shape[0], TILE):
        rows = x[begin : begin + TILE]
        tile = x.new_zeros(TILE, x.shape[1])  # fresh, so that it lies at the same kind of address
        tile[: len(rows)] = rows
        out[begin : begin + TILE] = tile_product(tile, weight)[: len(rows)]
    return out


def tile_product(tile: Tensor, weight: Tensor) -> Tensor:
    """tile [TILE, K] @ weight [N, K]^T -> [TILE, N], a view."""
    return (weight @ tile.t()).t()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[..., K], [N, K] -> [..., N]."""
    out = tiled_product(x.reshape(-1, x.shape[-1]), weight)
    if bias is not None:
        out = out + bias
    return out.view(*x.shape[:-1], weight.shape[0])


def matmul(a: Tensor, b: Tensor, fixed: str) -> Tensor:
    """a [..., M, K] @ b [..., K, N], of which the operand `fixed` ("left", "right" or "none") is the same in each step.

    Rows are those of the other operand. With "none", both have rows in their leading dimensions.
    """
    if fixed == "right":
        return rows_product(a, b.mT, _one_by_one)
    if fixed == "left":
        return rows_product(b.mT, a, _one_by_one).mT.contiguous()
    return paired_product(a, b)


def rows_product(rows: Tensor, weight: Tensor, product: Products) -> Tensor:
    """rows [..., M, K], weight [..., N, K] -> [..., M, N], one product for each matrix of `weight`."""
    batch = torch.broadcast_shapes(rows.shape[:-2], weight.shape[:-2])
    rows = rows.expand(*batch, *rows.shape[-2:])
    weight = weight[(None,) * (len(batch) + 2 - weight.dim())]
    each = [dim for dim in range(len(batch)) if weight.shape[dim] > 1]
    matrices = weight.reshape(-1, *weight.shape[-2:])
    front = rows.movedim(each, list(range(len(each))))
    parts = front.reshape(len(matrices), -1, rows.shape[-1])
    out = product(parts, matrices)
    out = out.view(*front.shape[:-1], weight.shape[-2])
    return out.movedim(list(range(len(each))), each).contiguous()


def _one_by_one(parts: Tensor, matrices: Tensor) -> Tensor:
    return torch.stack([tiled_product(part, matrix) for part, matrix in zip(parts, matrices)])


def paired_product(a: Tensor, b: Tensor) -> Tensor:
    """a [..., M, K] @ b [..., K, N] by products of elements and `tree_sum`: exact for any shape, and slow."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    lefts = a.expand(*batch, *a.shape[-2:]).reshape(-1, *a.shape[-2:], 1)
    rights = b.expand(*batch, *b.shape[-2:]).reshape(-1, 1, *b.shape[-2:])
    size = a.shape[-2] * b.shape[-2] * b.shape[-1]
    step, dtype = max(1, _PAIRED // max(size, 1)), wide(a.dtype)
    parts = [
        tree_sum(left.to(dtype) * right.to(dtype), 2).squeeze(2).to(a.dtype)
        for left, right in zip(lefts.split(step), rights.split(step))
    ]
    return torch.cat(parts).view(*batch, a.shape[-2], b.shape[-1])


def expert_linear(x: Tensor, weight: Tensor, expert_ids: Tensor, transposed: bool) -> Tensor:
    """As `regraft.kernels.experts.expert_linear`: the rows of each expert in tiles."""
    return product_by_expert(x, weight, expert_ids, transposed, tiled_product)
