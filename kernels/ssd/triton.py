"""Mamba-2's scan on the GPU: token by token, and by chunks for longer sequences."""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regraft.kernels.dependent import dependent
from regraft.kernels.recurrent.triton import (
    optional_strides,
    own_sequence,
    own_state,
    rounded,
    state_tiles,
    time_step,
    zero_rows_of_nobody,
)
from regraft.kernels.recurrent.triton_chunks import dot_precision, linear_chunk, pays_by_chunks
from regraft.kernels.triton_wait import wait_for_last
from regraft.kernels.whole import cdiv

CHUNKS = {"C": 32, "BP": 32, "num_warps": 4, "num_stages": 2}
"""Tokens and channels a tile of the chunked form."""


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
    by_chunks: bool | None = None,
    **options: Any,
) -> Tensor:
    """See `ssd`. `by_chunks` says how several tokens of a sequence are taken, by default a matter of shapes; `options`
    replace the tile BP and what the kernel of single tokens is compiled with.
    """
    tokens, heads, width = x.shape
    out = torch.empty(tokens, heads, width, dtype=torch.float32, device=x.device)
    if not len(context_lens):
        return out.zero_()
    size = B.shape[2]
    block_s, block_p, warps = state_tiles(size, width)
    tiles = {"BP": block_p, "num_warps": warps, "enable_fp_fusion": True} | options
    if D is not None:
        D = D if D.dim() == 2 else D[:, None].expand(heads, width)
    grid = (cdiv(width, tiles["BP"]), heads, len(context_lens))
    operands = (x, dt, A, B, C, state)
    common: dict[str, Any] = {
        "operands": operands,
        "strides": tuple(t.stride() for t in operands),
        "d_ptr": D,
        "d_by": optional_strides(D, 2),
        "bias_ptr": dt_bias,
        "bias_by": optional_strides(dt_bias, 1),
        "out_ptr": out,
        "cu_seqlens_ptr": cu_seqlens,
        "context_lens_ptr": context_lens,
        "state_slots_ptr": state_slots,
        "dt_min": dt_min,
        "dt_max": dt_max,
        "SOFTPLUS": dt_softplus,
        "SHARE": heads // B.shape[1],
        "P": width,
        "S": size,
        **dependent(x.device),
    }
    if by_chunks is None:
        by_chunks = pays_by_chunks(tokens, len(context_lens))
    ssd_kernel[grid](
        num_tokens=tokens, ONE_TOKEN=by_chunks, BS=block_s, num_stages=1, **common, **tiles
    )
    if by_chunks:
        ssd_chunk_kernel[(cdiv(width, CHUNKS["BP"]), heads, len(context_lens))](
            PRECISION=dot_precision(x.dtype), BS=max(16, block_s), enable_fp_fusion=True, **CHUNKS, **common
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens", "dt_min", "dt_max"])
def ssd_kernel(
    operands, strides, d_ptr, d_by, bias_ptr, bias_by, out_ptr,
    cu_seqlens_ptr, context_lens_ptr, state_slots_ptr, num_tokens, dt_min, dt_max,
    SOFTPLUS: tl.constexpr, ONE_TOKEN: tl.constexpr, SHARE: tl.constexpr,
    P: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (tile of BP channels, head, sequence). ONE_TOKEN leaves sequences with more to the chunks."""
    wait_for_last(DEPENDENT)
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, state_ptr = operands
    x_by, dt_by, a_by, b_by, c_by, state_by = strides
    head = tl.program_id(1)
    row_size = tl.num_programs(1) * P
    group = head // SHARE
    p_P = tl.program_id(0) * BP + tl.arange(0, BP)
    s_S = tl.arange(0, BS)
    is_in_P, is_in_S = p_P < P, s_S < S
    at_P = head * P + p_P
    start, end, slot, context = own_sequence(cu_seqlens_ptr, context_lens_ptr, state_slots_ptr)
    if ONE_TOKEN:
        end = tl.where(end - start == 1, end, start)
    if start < end:
        cells, is_cell, state = own_state(state_ptr, state_by, slot, head, context, p_P, s_S, P, S)
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
            dt = tl.load(dt_ptr + row * dt_by[0] + head * dt_by[1])
            dt = limited_step(dt, bias, dt_min, dt_max, SOFTPLUS)
            state = state * tl.exp(a * dt) + (x * dt)[:, None] * b[None, :]
            out = tl.sum(state * c[None, :], 1)
            if d_ptr is not None:
                out += x * skip_P
            tl.store(out_ptr + row * row_size + at_P, out, mask=is_in_P)
            row += 1
        tl.store(cells, state, mask=is_cell)
    zero_rows_of_nobody(out_ptr, cu_seqlens_ptr, num_tokens, row_size, at_P, is_in_P)


@triton.jit(do_not_specialize=["dt_min", "dt_max"])
def ssd_chunk_kernel(
    operands, strides, d_ptr, d_by, bias_ptr, bias_by, out_ptr,
    cu_seqlens_ptr, context_lens_ptr, state_slots_ptr, dt_min, dt_max,
    SOFTPLUS: tl.constexpr, PRECISION: tl.constexpr, SHARE: tl.constexpr,
    P: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (tile of BP channels, head, sequence of several tokens). It holds the state as [S, P]."""
    wait_for_last(DEPENDENT)
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, state_ptr = operands
    x_by, dt_by, a_by, b_by, c_by, state_by = strides
    head = tl.program_id(1)
    row_size = tl.num_programs(1) * P
    group = head // SHARE
    p_P = tl.program_id(0) * BP + tl.arange(0, BP)
    s_S, t_T = tl.arange(0, BS), tl.arange(0, C)
    is_in_P, is_in_S = p_P < P, s_S < S
    start, end, slot, context = own_sequence(cu_seqlens_ptr, context_lens_ptr, state_slots_ptr)
    if end - start > 1:
        turned = (state_by[0], state_by[1], state_by[3], state_by[2])
        cells, is_cell, state = own_state(state_ptr, turned, slot, head, context, s_S, p_P, S, P)
        a = tl.load(a_ptr + head * a_by[0]).to(tl.float32)
        bias = None
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + head * bias_by[0]).to(tl.float32)
        skip_P = tl.zeros([BP], tl.float32)
        if d_ptr is not None:
            d_at = d_ptr + head * d_by[0] + p_P * d_by[1]
            skip_P = tl.load(d_at, mask=is_in_P, other=0.0).to(tl.float32)
        row_T = (start + t_T).to(tl.int64)
        for _ in range(start, end, C):
            is_token_T = row_T < end
            is_channel_TP = is_token_T[:, None] & is_in_P[None, :]
            is_state_TS = is_token_T[:, None] & is_in_S[None, :]
            x_at = x_ptr + row_T[:, None] * x_by[0] + head * x_by[1] + p_P[None, :] * x_by[2]
            b_at = b_ptr + row_T[:, None] * b_by[0] + group * b_by[1] + s_S[None, :] * b_by[2]
            c_at = c_ptr + row_T[:, None] * c_by[0] + group * c_by[1] + s_S[None, :] * c_by[2]
            x = tl.load(x_at, mask=is_channel_TP, other=0.0).to(tl.float32)
            b = tl.load(b_at, mask=is_state_TS, other=0.0).to(tl.float32)
            c = tl.load(c_at, mask=is_state_TS, other=0.0).to(tl.float32)
            dt = tl.load(dt_ptr + row_T * dt_by[0] + head * dt_by[1], mask=is_token_T, other=0.0)
            dt = limited_step(dt, bias, dt_min, dt_max, SOFTPLUS)
            dt = tl.where(is_token_T, dt, 0.0)
            out, state = linear_chunk(c, b, x * dt[:, None], a * dt, state, PRECISION)
            if d_ptr is not None:
                out += x * skip_P[None, :]
            tl.store(
                out_ptr + row_T[:, None] * row_size + head * P + p_P[None, :],
                out,
                mask=is_channel_TP,
            )
            row_T += C
        tl.store(cells, state, mask=is_cell)


@triton.jit
def limited_step(dt, bias, dt_min, dt_max, SOFTPLUS: tl.constexpr):
    """`time_step` within its limits (a NaN stays one), rounded like it."""
    dtype: tl.constexpr = dt.dtype
    dt = time_step(dt, bias, SOFTPLUS)
    dt = tl.where(dt < dt_min, dt_min, dt)
    dt = tl.where(dt > dt_max, dt_max, dt)
    return rounded(dt, dtype)
