"""Mamba-1's scan on the GPU, token by token: decays differ by channel and state, so there is no matrix form."""

# mypy: disable-error-code="no-untyped-def, misc, assignment, unreachable"
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
    rounded,
    state_tiles,
    time_step,
    zero_rows_of_nobody,
)
from regraft.kernels.recurrent.triton_chunks import pays_by_chunks
from regraft.kernels.triton_wait import wait_for_last
from regraft.kernels.whole import cdiv


def selective_scan_triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    state: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    state_slots: Tensor,
    **options: Any,
) -> Tensor:
    """See `selective_scan`. `options` replace the tile BC, TOKENS loaded at once, and what it is compiled with."""
    tokens, channels = x.shape
    skipped = x.dtype if D is None else torch.promote_types(x.dtype, D.dtype)
    dtype = skipped if z is None else torch.promote_types(skipped, z.dtype)
    out = torch.empty(tokens, channels, dtype=dtype, device=x.device)
    if not len(context_lens):
        return out.zero_()
    size = A.shape[1]
    block_s, block_c, _ = state_tiles(size, channels)
    if pays_by_chunks(tokens, len(context_lens)):  # few programs that take long: narrow ones
        tiles = {"TOKENS": 8, "BC": min(block_c, 32), "num_warps": 1}
    else:
        tiles = {"TOKENS": 1, "BC": min(block_c, 128), "num_warps": 2}
    tiles = {"enable_fp_fusion": True} | tiles | options
    grid = (cdiv(channels, tiles["BC"]), 1, len(context_lens))
    operands, extras = (x, dt, A, B, C, state), (D, z, dt_bias)
    strides = tuple(t.stride() for t in operands)
    extra_strides = optional_strides(D, 1), optional_strides(z, 2), optional_strides(dt_bias, 1)
    selective_kernel[grid](
        operands, strides, extras, extra_strides,
        out, cu_seqlens, context_lens, state_slots, tokens, SOFTPLUS=dt_softplus,
        SKIPPED=_TYPES[skipped], CHANNELS=channels, S=size, BS=block_s, num_stages=1, **dependent(x.device), **tiles,
    )  # fmt: skip
    return out


_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit(do_not_specialize=["num_tokens"])
def selective_kernel(
    operands, strides, extras, extra_strides,
    out_ptr, cu_seqlens_ptr, context_lens_ptr, state_slots_ptr, num_tokens,
    SOFTPLUS: tl.constexpr, SKIPPED: tl.constexpr, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr, S: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (tile of BC channels, sequence). SKIPPED: the dtype that x and D promote to."""
    wait_for_last(DEPENDENT)
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, state_ptr = operands
    x_by, dt_by, a_by, b_by, c_by, state_by = strides
    d_ptr, z_ptr, bias_ptr = extras
    d_by, z_by, bias_by = extra_strides
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    c_C = tl.program_id(0) * BC + tl.arange(0, BC)
    s_S = tl.arange(0, BS)
    is_in_C, is_in_S = c_C < CHANNELS, s_S < S
    start, end, slot, context = own_sequence(cu_seqlens_ptr, context_lens_ptr, state_slots_ptr)
    if start < end:
        cells = (
            state_ptr + slot * state_by[0] + c_C[:, None] * state_by[1] + s_S[None, :] * state_by[2]
        )
        is_cell = is_in_C[:, None] & is_in_S[None, :]
        # What another sequence left in the slot is not read: it may be NaN.
        is_own = (c_C < tl.where(context > 0, CHANNELS, 0))[:, None] & is_in_S[None, :]
        state = tl.load(cells, mask=is_own, other=0.0)
        a_at = a_ptr + c_C[:, None] * a_by[0] + s_S[None, :] * a_by[1]
        a = tl.load(a_at, mask=is_cell, other=0.0).to(tl.float32)
        d_C = tl.zeros([BC], tl.float32)
        if d_ptr is not None:
            d_C = tl.load(d_ptr + c_C * d_by[0], mask=is_in_C, other=0.0).to(tl.float32)
        bias = None
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + c_C * bias_by[0], mask=is_in_C, other=0.0).to(tl.float32)
        row = start.to(tl.int64)
        for _ in range(start, end, TOKENS):
            # All loads before the first store: one wait for several tokens. One behind the last changes nothing.
            inputs, gates = (), ()
            for i in tl.static_range(TOKENS):
                is_token_C = c_C < tl.where(row + i < end, CHANNELS, 0)
                is_token_S = s_S < tl.where(row + i < end, S, 0)
                x = tl.load(x_ptr + (row + i) * x_by[0] + c_C * x_by[1], mask=is_token_C, other=0.0)
                dt_at = dt_ptr + (row + i) * dt_by[0] + c_C * dt_by[1]
                dt = tl.load(dt_at, mask=is_token_C, other=0.0)
                b = tl.load(b_ptr + (row + i) * b_by[0] + s_S * b_by[1], mask=is_token_S, other=0.0)
                c = tl.load(c_ptr + (row + i) * c_by[0] + s_S * c_by[1], mask=is_token_S, other=0.0)
                inputs += ((x, dt, b, c),)
                if z_ptr is not None:
                    z_at = z_ptr + (row + i) * z_by[0] + c_C * z_by[1]
                    gates += (tl.load(z_at, mask=is_token_C, other=0.0),)
            for i in tl.static_range(TOKENS):
                is_token_C = c_C < tl.where(row + i < end, CHANNELS, 0)
                x, dt, b, c = inputs[i]
                x = x.to(tl.float32)
                dt = tl.where(is_token_C, time_step(dt, bias, SOFTPLUS), 0.0)
                update = (dt * x)[:, None] * b.to(tl.float32)[None, :]
                state = tl.exp(a * dt[:, None]) * state + update
                read = rounded(state, dtype) * c.to(dtype).to(tl.float32)[None, :]
                out = rounded(tl.sum(read, 1), dtype)
                if d_ptr is not None:
                    out = rounded(out + rounded(x * d_C, SKIPPED), SKIPPED)
                if z_ptr is not None:
                    z = gates[i].to(tl.float32)
                    out = out * rounded(z / (1.0 + tl.exp(-z)), z_ptr.dtype.element_ty)
                to = out_ptr + (row + i) * CHANNELS + c_C
                tl.store(to, out.to(out_ptr.dtype.element_ty), mask=is_token_C)
            row += TOKENS
        tl.store(cells, state, mask=is_cell)
    zero_rows_of_nobody(out_ptr, cu_seqlens_ptr, num_tokens, CHANNELS, c_C, is_in_C)
