"""The causal convolution, and its bare windows, on the GPU.

A tap is read from the packed row, or from the sequence's slot where it lies before this step's first token. One
program a (block of channels, sequence) does all of a decode step, the new window last, behind a barrier. A longer row
is cut into tiles of tokens, which only read the old window: a second launch writes the new one.
"""

# mypy: disable-error-code="no-untyped-def, misc, assignment, unreachable"
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from regraft.kernels.dependent import dependent
from regraft.kernels.recurrent.triton import (
    lookup_size,
    optional_strides,
    own_sequence,
    own_tile,
    rounded,
    zero_rows,
    zero_rows_of_nobody,
)
from regraft.kernels.triton_wait import wait_for_last
from regraft.kernels.whole import cdiv, power_of_2

_TILE = 16
"""Tokens a program takes of a row that has more than one of some sequence."""


def causal_conv_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    dilation: int,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    state_slots: Tensor,
    fusion: bool = True,
) -> Tensor:
    """See `causal_conv`. With `fusion` a tap's product and sum may be rounded once."""
    out = x.new_empty(x.shape)
    sequences = (cu_seqlens, context_lens, state_slots)
    _launch(
        x, weight, bias, out, conv_state, sequences, weight.shape[1], dilation, activation == "silu", fusion
    )  # fmt: skip
    return out


def causal_window_triton(
    x: Tensor,
    width: int,
    dilation: int,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    state_slots: Tensor,
) -> Tensor:
    """See `causal_window`."""
    out = x.new_empty(*x.shape, width)
    sequences = (cu_seqlens, context_lens, state_slots)
    _launch(x, None, None, out, conv_state, sequences, width, dilation, False)
    return out


def _launch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    conv_state: Tensor,
    sequences: tuple[Tensor, Tensor, Tensor],
    width: int,
    dilation: int,
    silu: bool,
    fusion: bool = True,
) -> None:
    tokens, channels = x.shape
    seqs = len(sequences[1])
    if not seqs:
        out.zero_()
        return
    decode_only = tokens <= seqs
    kept = (width - 1) * dilation
    common: dict[str, Any] = {
        "CHANNELS": channels,
        "KEPT": kept,
        "BC": min(128, power_of_2(channels)),
        "BW": power_of_2(max(1, kept)),
        "num_stages": 1,
        "enable_fp_fusion": fusion,
        **dependent(x.device),
    }
    blocks = cdiv(channels, common["BC"])
    state = (x, x.stride(), conv_state, conv_state.stride())
    factors = (weight, optional_strides(weight, 2), bias, optional_strides(bias, 1))
    taps: dict[str, Any] = {
        "TAPS": width,
        "DILATION": dilation,
        "SILU": silu,
        "STORED": width if weight is None else 1,
    }
    if decode_only:
        step_kernel[(blocks, 1, seqs)](
            *state, *factors, out, *sequences, tokens, HANDS_ON=kept > 0, num_warps=2, **taps, **common
        )  # fmt: skip
        return
    tile_kernel[(tokens // _TILE + seqs, blocks)](
        *state, *factors, out, *sequences, seqs, tokens, BT=_TILE, R=lookup_size(seqs), num_warps=4, **taps, **common
    )  # fmt: skip
    if kept:
        hand_on_kernel[(blocks, 1, seqs)](*state, *sequences, num_warps=2, **common)


@triton.jit(do_not_specialize=["num_tokens"])
def step_kernel(
    x_ptr, x_by, state_ptr, state_by, weight_ptr, weight_by, bias_ptr, bias_by, out_ptr,
    cu_seqlens_ptr, context_lens_ptr, state_slots_ptr, num_tokens,
    CHANNELS: tl.constexpr, KEPT: tl.constexpr, TAPS: tl.constexpr, DILATION: tl.constexpr, SILU: tl.constexpr,
    STORED: tl.constexpr, HANDS_ON: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (block of BC channels, sequence), meant for one token each. Without a weight the taps themselves
    are stored: STORED numbers a channel.
    """
    wait_for_last(DEPENDENT)
    c_C = tl.program_id(0) * BC + tl.arange(0, BC)
    is_in_C = c_C < CHANNELS
    start, end, slot, context = own_sequence(cu_seqlens_ptr, context_lens_ptr, state_slots_ptr)
    if HANDS_ON and DILATION == 1:
        if end - start == 1:
            one_token(
                x_ptr, x_by, state_ptr, state_by, weight_ptr, weight_by, bias_ptr, bias_by, out_ptr,
                start.to(tl.int64), slot, context, c_C, is_in_C, CHANNELS, TAPS, SILU,
            )  # fmt: skip
        else:
            several_tokens(
                x_ptr, x_by, state_ptr, state_by, weight_ptr, weight_by, bias_ptr, bias_by, out_ptr,
                start, start, end, slot, context, c_C, is_in_C, CHANNELS, KEPT, TAPS, DILATION, SILU, 1,
            )  # fmt: skip
            hand_on_alone(
                x_ptr, x_by, state_ptr, state_by, start, end, slot, context, c_C, is_in_C, KEPT, BW
            )  # fmt: skip
    else:
        several_tokens(
            x_ptr, x_by, state_ptr, state_by, weight_ptr, weight_by, bias_ptr, bias_by, out_ptr,
            start, start, end, slot, context, c_C, is_in_C, CHANNELS, KEPT, TAPS, DILATION, SILU, 1,
        )  # fmt: skip
        if HANDS_ON:
            hand_on_alone(
                x_ptr, x_by, state_ptr, state_by, start, end, slot, context, c_C, is_in_C, KEPT, BW
            )  # fmt: skip
    for j in tl.static_range(STORED):
        zero_rows_of_nobody(
            out_ptr, cu_seqlens_ptr, num_tokens, CHANNELS * STORED, c_C * STORED + j, is_in_C
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def tile_kernel(
    x_ptr, x_by, state_ptr, state_by, weight_ptr, weight_by, bias_ptr, bias_by, out_ptr,
    cu_seqlens_ptr, context_lens_ptr, state_slots_ptr, num_seqs, num_tokens,
    CHANNELS: tl.constexpr, KEPT: tl.constexpr, TAPS: tl.constexpr, DILATION: tl.constexpr, SILU: tl.constexpr,
    STORED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr, R: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (tile of BT tokens of a sequence, block of BC channels)."""
    wait_for_last(DEPENDENT)
    c_C = tl.program_id(1) * BC + tl.arange(0, BC)
    is_in_C = c_C < CHANNELS
    seq, start, begin, end = own_tile(cu_seqlens_ptr, num_seqs, BT, R)
    slot = tl.load(state_slots_ptr + seq).to(tl.int64)
    several_tokens(
        x_ptr, x_by, state_ptr, state_by, weight_ptr, weight_by, bias_ptr, bias_by, out_ptr,
        start, begin, end, slot, tl.load(context_lens_ptr + seq), c_C, is_in_C,
        CHANNELS, KEPT, TAPS, DILATION, SILU, BT,
    )  # fmt: skip
    first = tl.load(cu_seqlens_ptr + num_seqs) + tl.program_id(0)
    for j in tl.static_range(STORED):
        at_C = c_C * STORED + j
        zero_rows(out_ptr, first, tl.num_programs(0), num_tokens, CHANNELS * STORED, at_C, is_in_C)


@triton.jit
def several_tokens(
    x_ptr, x_by, state_ptr, state_by, weight_ptr, weight_by, bias_ptr, bias_by, out_ptr,
    start, first, end, slot, context, c_C, is_in_C,
    CHANNELS: tl.constexpr, KEPT: tl.constexpr, TAPS: tl.constexpr, DILATION: tl.constexpr, SILU: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """Tokens `first` to `end` of a sequence that begins at `start`, BT a tile."""
    t_T = tl.arange(0, BT)
    token = first.to(tl.int64)
    for _ in range(first, end, BT):
        is_in_TC = (token + t_T < end)[:, None] & is_in_C[None, :]
        to_TC = t_T[:, None] * CHANNELS + c_C[None, :]
        sum_TC = tl.zeros([BT, c_C.shape[0]], tl.float32)
        if bias_ptr is not None:
            bias_C = tl.load(bias_ptr + c_C * bias_by[0], mask=is_in_C, other=0.0)
            sum_TC += bias_C.to(tl.float32)[None, :]
        for j in tl.static_range(TAPS):
            tap_TC = load_inputs(
                x_ptr, x_by, state_ptr, state_by, token, t_T - (TAPS - 1 - j) * DILATION, c_C, is_in_TC,
                start, slot, context, KEPT,
            )  # fmt: skip
            if weight_ptr is None:
                tl.store(
                    out_ptr + token * (CHANNELS * TAPS) + to_TC * TAPS + j, tap_TC, mask=is_in_TC
                )
            else:
                factor_at = weight_ptr + c_C * weight_by[0] + j * weight_by[1]
                factor_C = tl.load(factor_at, mask=is_in_C, other=0.0).to(tl.float32)
                sum_TC += rounded(tap_TC, weight_ptr.dtype.element_ty) * factor_C[None, :]
        if weight_ptr is not None:
            sum_TC = activated(sum_TC, weight_ptr.dtype.element_ty, SILU)
            to_TC = out_ptr + token * CHANNELS + to_TC
            tl.store(to_TC, sum_TC.to(out_ptr.dtype.element_ty), mask=is_in_TC)
        token += BT


@triton.jit
def one_token(
    x_ptr, x_by, state_ptr, state_by, weight_ptr, weight_by, bias_ptr, bias_by, out_ptr,
    token, slot, context, c_C, is_in_C, CHANNELS: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A sequence's only new token, taps side by side: each but the first stays in the window, a place on."""
    state_C = state_ptr + slot * state_by[0] + c_C * state_by[1]
    is_own_C = c_C < tl.where(context > 0, CHANNELS, 0)
    taps = ()
    for j in tl.static_range(TAPS - 1):
        # What another sequence left in the slot is not read: it may be NaN.
        taps += (tl.load(state_C + j * state_by[2], mask=is_own_C, other=0.0),)
    taps += (tl.load(x_ptr + token * x_by[0] + c_C * x_by[1], mask=is_in_C, other=0.0),)
    if weight_ptr is None:
        for j in tl.static_range(TAPS):
            tl.store(out_ptr + (token * CHANNELS + c_C) * TAPS + j, taps[j], mask=is_in_C)
    else:
        sum_C = tl.zeros(c_C.shape, tl.float32)
        if bias_ptr is not None:
            sum_C += tl.load(bias_ptr + c_C * bias_by[0], mask=is_in_C, other=0.0).to(tl.float32)
        for j in tl.static_range(TAPS):
            factor_at = weight_ptr + c_C * weight_by[0] + j * weight_by[1]
            factor_C = tl.load(factor_at, mask=is_in_C, other=0.0).to(tl.float32)
            sum_C += rounded(taps[j], weight_ptr.dtype.element_ty) * factor_C
        sum_C = activated(sum_C, weight_ptr.dtype.element_ty, SILU)
        to_C = out_ptr + token * CHANNELS + c_C
        tl.store(to_C, sum_C.to(out_ptr.dtype.element_ty), mask=is_in_C)
    # Every thread has read the old window before one writes the new one.
    tl.debug_barrier()
    for j in tl.static_range(TAPS - 1):
        tl.store(state_C + j * state_by[2], taps[j + 1], mask=is_in_C)


@triton.jit
def activated(x, dtype: tl.constexpr, SILU: tl.constexpr):
    """`x`, or its silu, as computed in `dtype`; float32."""
    x = rounded(x, dtype)
    if SILU:
        x = rounded(x / (1.0 + tl.exp(-x)), dtype)
    return x


@triton.jit
def hand_on_kernel(
    x_ptr, x_by, state_ptr, state_by, cu_seqlens_ptr, context_lens_ptr, state_slots_ptr,
    CHANNELS: tl.constexpr, KEPT: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (block of BC channels, sequence): only the new window."""
    wait_for_last(DEPENDENT)
    c_C = tl.program_id(0) * BC + tl.arange(0, BC)
    start, end, slot, context = own_sequence(cu_seqlens_ptr, context_lens_ptr, state_slots_ptr)
    hand_on(
        x_ptr, x_by, state_ptr, state_by, start, end, slot, context, c_C, c_C < CHANNELS, KEPT, BW
    )  # fmt: skip


@triton.jit
def hand_on_alone(
    x_ptr, x_by, state_ptr, state_by, start, end, slot, context, c_C, is_in_C,
    KEPT: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """As `hand_on`, in the program that reads the old window: when every thread has."""
    tl.debug_barrier()
    hand_on(x_ptr, x_by, state_ptr, state_by, start, end, slot, context, c_C, is_in_C, KEPT, BW)


@triton.jit
def hand_on(
    x_ptr, x_by, state_ptr, state_by, start, end, slot, context, c_C, is_in_C,
    KEPT: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Write the last KEPT inputs of a sequence that has new ones to its slot."""
    w_W = tl.arange(0, BW)
    is_in_WC = (w_W < tl.where(start < end, KEPT, 0))[:, None] & is_in_C[None, :]
    x_WC = load_inputs(
        x_ptr, x_by, state_ptr, state_by, end.to(tl.int64), w_W - KEPT, c_C, is_in_WC, start, slot, context, KEPT
    )  # fmt: skip
    # A window shorter than it is long moves within the slot: it is read before any of it is written.
    tl.debug_barrier()
    to_WC = state_ptr + slot * state_by[0] + w_W[:, None] * state_by[2] + c_C[None, :] * state_by[1]
    tl.store(to_WC, x_WC, mask=is_in_WC)


@triton.jit
def load_inputs(
    x_ptr, x_by, state_ptr, state_by, token, t_T, c_C, is_wanted_TC, start, slot, context, KEPT: tl.constexpr
):  # fmt: skip
    """Inputs [T, C] at rows `token` + `t_T` of a sequence; those before its first new token lie in its slot, oldest
    first.
    """
    back_T = t_T + (token - start).to(tl.int32)
    is_new_T = back_T >= 0
    x_at = x_ptr + ((token + t_T) * x_by[0])[:, None] + c_C[None, :] * x_by[1]
    new_TC = tl.load(x_at, mask=is_wanted_TC & is_new_T[:, None], other=0.0)
    state_at = state_ptr + slot * state_by[0] + (KEPT + back_T)[:, None] * state_by[2]
    # Most tiles of a long row do not reach back to the slot.
    # What another sequence left there is not read: it may be NaN.
    if (tl.min(back_T, 0) < 0) & (context > 0):
        is_old_TC = is_wanted_TC & (back_T < 0)[:, None]
        old_TC = tl.load(state_at + c_C[None, :] * state_by[1], mask=is_old_TC, other=0.0)
        new_TC = tl.where(is_new_T[:, None], new_TC, old_TC)
    return new_TC
