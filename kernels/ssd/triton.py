"""Mamba-2's scan on the GPU, token by token."""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regraft.kernels.recurrent.triton import (
    optional_strides,
    own_sequence,
    state_tiles,
    time_step,
    zero_rows_of_nobody,
)


def ssd_triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    state: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    state_slots: Tensor,
    **options: Any,
) -> Tensor:
    """See `ssd`. `options` replace the tile BP and the number of warps."""
    tokens, heads, width = x.shape
    out = torch.empty(tokens, heads, width, dtype=torch.float32, device=x.device)
    if not len(context_lens):
        return out.zero_()
    size = B.shape[2]
    block_s, block_p, warps = state_tiles(size, width)
    tiles = {"BP": block_p, "num_warps": warps} | options
    if D is not None:
        D = D if D.dim() == 2 else D[:, None].expand(heads, width)
    grid = (triton.cdiv(width, tiles["BP"]), heads, len(context_lens))
    operands = (x, dt, A, B, C, state)
    ssd_kernel[grid](
        operands, tuple(t.stride() for t in operands), D, optional_strides(D, 2), dt_bias,
        optional_strides(dt_bias, 1), out, cu_seqlens, context_lens, state_slots, tokens, dt_min, dt_max,
        SOFTPLUS=dt_softplus, SHARE=heads // B.shape[1], P=width, S=size, BS=block_s,
        num_stages=1, enable_fp_fusion=True, **tiles,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens", "dt_min", "dt_max"])
def ssd_kernel(
    operands, strides, d_ptr, d_by, bias_ptr, bias_by, out_ptr,
    cu_seqlens_ptr, context_lens_ptr, state_slots_ptr, num_tokens, dt_min, dt_max,
    SOFTPLUS: tl.constexpr, SHARE: tl.constexpr,
    P: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """One program a (tile of BP channels, head, sequence)."""
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, state_ptr = operands
    x_by, dt_by, a_by, b_by, c_by, state_by = strides
    head = tl.program_id(1)
    row_size = tl.num_programs(1) * P
    group = head // SHARE
    p_P = tl.program_id(0) * BP + tl.arange(0, BP)
    s_S = tl.arange(0, BS)
    is_in_P, is_in_S = p_P < P, s_S < S
    at_P = head * P + p_P
    zero_rows_of_nobody(out_ptr, cu_seqlens_ptr, num_tokens, row_size, at_P, is_in_P)
    start, end, slot, context = own_sequence(cu_seqlens_ptr, context_lens_ptr, state_slots_ptr)
    if start < end:
        cells = state_ptr + slot * state_by[0] + head.to(tl.int64) * state_by[1]
        cells = cells + p_P[:, None] * state_by[2] + s_S[None, :] * state_by[3]
        is_cell = is_in_P[:, None] & is_in_S[None, :]
        # What another sequence left in the slot is not read: it may be NaN.
        is_own = (p_P < tl.where(context > 0, P, 0))[:, None] & is_in_S[None, :]
        state = tl.load(cells, mask=is_own, other=0.0)
        a = tl.load(a_ptr + head * a_by[0]).to(tl.float32)
        bias = None
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + head * bias_by[0]).to(tl.float32)
        skip_P = tl.zeros([BP], tl.float32)
        if d_ptr is not None:
            d_at = d_ptr + head * d_by[0] + p_P * d_by[1]
            skip_P = tl.load(d_at, mask=is_in_P, other=0.0).to(tl.float32)
        row = start.to(tl.int64)
        for _ in range(start, end):
            x_at = x_ptr + row * x_by[0] + head * x_by[1] + p_P * x_by[2]
            b_at = b_ptr + row * b_by[0] + group * b_by[1] + s_S * b_by[2]
            c_at = c_ptr + row * c_by[0] + group * c_by[1] + s_S * c_by[2]
            x = tl.load(x_at, mask=is_in_P, other=0.0).to(tl.float32)
            b = tl.load(b_at, mask=is_in_S, other=0.0).to(tl.float32)
            c = tl.load(c_at, mask=is_in_S, other=0.0).to(tl.float32)
            dt = limited_step(
                dt_ptr + row * dt_by[0] + head * dt_by[1], bias, dt_min, dt_max, SOFTPLUS
            )
            state = state * tl.exp(a * dt) + (x * dt)[:, None] * b[None, :]
            out = tl.sum(state * c[None, :], 1)
            if d_ptr is not None:
                out += x * skip_P
            tl.store(out_ptr + row * row_size + at_P, out, mask=is_in_P)
            row += 1
        tl.store(cells, state, mask=is_cell)


@triton.jit
def limited_step(dt_ptr, bias, dt_min, dt_max, SOFTPLUS: tl.constexpr):
    """`time_step` within its limits (a NaN stays one), rounded like it."""
    dt = time_step(tl.load(dt_ptr), bias, SOFTPLUS)
    dt = tl.where(dt < dt_min, dt_min, dt)
    dt = tl.where(dt > dt_max, dt_max, dt)
    return dt.to(dt_ptr.dtype.element_ty).to(tl.float32)
