"""Sums along rows on the GPU, and what is made of them: a program takes rows whole, in blocks of one fixed size.

How a row is divided depends on its width alone. Several narrow rows share a program, each added by threads in the same
pattern.
"""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regraft.kernels.dependent import dependent
from regraft.kernels.triton_wait import wait_for_last
from regraft.kernels.whole import cdiv, power_of_2

_BLOCK = 4096
"""Elements of a row at a time, at most."""

_SHARED = 1024
"""Elements that a program takes at least, if need be of several rows."""

_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def sum_over(x: Tensor, dims: Sequence[int], keepdim: bool, mean: bool) -> Tensor:
    """See `reductions.sum_over`."""
    last = x.dim() - 1
    order = sorted(dim % x.dim() for dim in dims)
    kept = [dim for dim in range(x.dim()) if dim not in order]
    width = math.prod(x.shape[dim] for dim in order)
    rows = x.contiguous() if order == [last] else x.permute(*kept, *order).contiguous()
    out = x.new_empty([x.shape[dim] for dim in kept])
    if out.numel():
        grid, tiles = _tiles(out.numel(), width)
        sum_kernel[grid](
            rows, out, out.numel(), WIDTH=width, DIVISOR=width if mean else 1, WIDE=_wide(x),
            **dependent(x.device), **tiles,
        )  # fmt: skip
    if not keepdim:
        return out
    return out.view([1 if dim in order else size for dim, size in enumerate(x.shape)])


def softmax(x: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
    """See `reductions.softmax`."""
    moved = x.movedim(dim, -1).contiguous()
    out = torch.empty(moved.shape, dtype=dtype, device=x.device)
    if out.numel():
        rows, width = out.numel() // out.shape[-1], out.shape[-1]
        grid, tiles = _tiles(rows, width)
        wide = _TYPES[torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32)]
        softmax_kernel[grid](
            moved, out, rows, WIDTH=width, LOG=log, WIDE=wide, **dependent(x.device), **tiles
        )
    return out.movedim(-1, dim).contiguous()


def norm(
    x: Tensor, num_dims: int, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> Tensor:
    """See `reductions.norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = math.prod(x.shape[-num_dims:])
    if out.numel():
        rows = out.numel() // width
        grid, tiles = _tiles(rows, width)
        parameters = tuple(None if t is None else t.contiguous() for t in (weight, bias))
        norm_kernel[grid](
            x.contiguous(), parameters, out, rows, eps, WIDTH=width, CENTERED=centered, WIDE=_wide(x),
            **dependent(x.device), **tiles,
        )  # fmt: skip
    return out


def _wide(x: Tensor) -> Any:
    return _TYPES[torch.promote_types(x.dtype, torch.float32)]


def _tiles(rows: int, width: int) -> tuple[tuple[int], dict[str, Any]]:
    """The grid, and how rows of this width are divided."""
    block = min(_BLOCK, power_of_2(width))
    shared = max(1, _SHARED // block)
    tiles = {
        "ROWS": shared,
        "BLOCK": block,
        "num_warps": max(1, min(8, shared * block // 512)),
        "enable_fp_fusion": False,
    }
    return (cdiv(rows, shared),), tiles


@triton.jit
def own_rows(num_rows, ROWS: tl.constexpr):
    """Of this program: its rows (int64, the first one for those that do not exist), and which exist."""
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return tl.where(row_R < num_rows, row_R, 0), row_R < num_rows


@triton.jit
def block_of(x_ptr, row_R, begin, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """[ROWS, BLOCK] elements from `begin` on, and which of them a row has. Zero where it has none."""
    c_C = begin + tl.arange(0, BLOCK)
    is_in_RC = (row_R >= 0)[:, None] & (c_C < WIDTH)[None, :]
    x_RC = tl.load(x_ptr + row_R[:, None] * WIDTH + c_C[None, :], mask=is_in_RC, other=0.0)
    return x_RC.to(WIDE), is_in_RC, c_C


@triton.jit(do_not_specialize=["num_rows"])
def sum_kernel(
    x_ptr, out_ptr, num_rows, WIDTH: tl.constexpr, DIVISOR: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Blocks are added elementwise, then what they came to."""
    wait_for_last(DEPENDENT)
    row_R, is_row_R = own_rows(num_rows, ROWS)
    sum_RC = tl.zeros([ROWS, BLOCK], WIDE)
    for begin in range(0, WIDTH, BLOCK):
        x_RC, _, _ = block_of(x_ptr, row_R, begin, WIDTH, BLOCK, WIDE)
        sum_RC += x_RC
    total_R = tl.sum(sum_RC, 1)
    if DIVISOR != 1:
        total_R = total_R / DIVISOR
    tl.store(out_ptr + row_R, total_R.to(out_ptr.dtype.element_ty), mask=is_row_R)


@triton.jit(do_not_specialize=["num_rows"])
def softmax_kernel(
    x_ptr, out_ptr, num_rows, WIDTH: tl.constexpr, LOG: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Three readings of the rows: the maximum, the sum, the result."""
    wait_for_last(DEPENDENT)
    row_R, is_row_R = own_rows(num_rows, ROWS)
    top_RC = tl.full([ROWS, BLOCK], float("-inf"), WIDE)
    for begin in range(0, WIDTH, BLOCK):
        x_RC, is_in_RC, _ = block_of(x_ptr, row_R, begin, WIDTH, BLOCK, WIDE)
        top_RC = tl.maximum(top_RC, tl.where(is_in_RC, x_RC, float("-inf")))
    top_R = tl.max(top_RC, 1)
    sum_RC = tl.zeros([ROWS, BLOCK], WIDE)
    for begin in range(0, WIDTH, BLOCK):
        x_RC, is_in_RC, _ = block_of(x_ptr, row_R, begin, WIDTH, BLOCK, WIDE)
        sum_RC += tl.where(is_in_RC, tl.exp(x_RC - top_R[:, None]), 0.0)
    sum_R = tl.sum(sum_RC, 1)
    for begin in range(0, WIDTH, BLOCK):
        x_RC, is_in_RC, c_C = block_of(x_ptr, row_R, begin, WIDTH, BLOCK, WIDE)
        x_RC = x_RC - top_R[:, None]
        if LOG:
            x_RC = x_RC - tl.log(sum_R)[:, None]
        else:
            x_RC = tl.exp(x_RC) / sum_R[:, None]
        to_RC = out_ptr + row_R[:, None] * WIDTH + c_C[None, :]
        tl.store(to_RC, x_RC.to(out_ptr.dtype.element_ty), mask=is_in_RC & is_row_R[:, None])


@triton.jit(do_not_specialize=["num_rows", "eps"])
def norm_kernel(
    x_ptr, parameters, out_ptr, num_rows, eps, WIDTH: tl.constexpr, CENTERED: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Mean (with CENTERED) and mean of squares, each in a reading of its own, and the result."""
    wait_for_last(DEPENDENT)
    weight_ptr, bias_ptr = parameters
    row_R, is_row_R = own_rows(num_rows, ROWS)
    mean_R = tl.zeros([ROWS], WIDE)
    if CENTERED:
        sum_RC = tl.zeros([ROWS, BLOCK], WIDE)
        for begin in range(0, WIDTH, BLOCK):
            x_RC, _, _ = block_of(x_ptr, row_R, begin, WIDTH, BLOCK, WIDE)
            sum_RC += x_RC
        mean_R = tl.sum(sum_RC, 1) / WIDTH
    square_RC = tl.zeros([ROWS, BLOCK], WIDE)
    for begin in range(0, WIDTH, BLOCK):
        x_RC, is_in_RC, _ = block_of(x_ptr, row_R, begin, WIDTH, BLOCK, WIDE)
        x_RC = tl.where(is_in_RC, x_RC - mean_R[:, None], 0.0)
        square_RC += x_RC * x_RC
    root_R = tl.sqrt(tl.sum(square_RC, 1) / WIDTH + eps)
    for begin in range(0, WIDTH, BLOCK):
        x_RC, is_in_RC, c_C = block_of(x_ptr, row_R, begin, WIDTH, BLOCK, WIDE)
        x_RC = (x_RC - mean_R[:, None]) / root_R[:, None]
        if weight_ptr is not None:
            weight_C = tl.load(weight_ptr + c_C, mask=c_C < WIDTH, other=0.0)
            x_RC = x_RC * weight_C.to(WIDE)[None, :]
        if bias_ptr is not None:
            bias_C = tl.load(bias_ptr + c_C, mask=c_C < WIDTH, other=0.0)
            x_RC = x_RC + bias_C.to(WIDE)[None, :]
        to_RC = out_ptr + row_R[:, None] * WIDTH + c_C[None, :]
        tl.store(to_RC, x_RC.to(out_ptr.dtype.element_ty), mask=is_in_RC & is_row_R[:, None])
