"""The delta rule on the GPU, whatever decays its state: a scalar per head (gated delta rule) or per key channel (KDA).

At one token a sequence it reads and writes each state once, and nothing else of that size.
"""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from regraft.kernels.dependent import dependent
from regraft.kernels.triton_wait import wait_for_last
from regraft.kernels.whole import cdiv

from .triton import lookup_size, own_sequence, own_state, state_tiles, zero_rows_of_nobody
from .triton_chunks import goes_by_chunks
from .triton_delta_chunks import LONG, delta_chunks_triton


def delta_rule_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    state_slots: Tensor,
    scale: float,
    qk_l2norm: bool,
    by_chunks: bool | None = None,
    **options: Any,
) -> Tensor:
    """q, k [N, Hk, K], v [N, H, V], g [N, H] or [N, H, K], beta [N, H], state [slots, H, K, V], as `gated_delta_rule`
    and `kda`.

    `by_chunks` says how several tokens of a sequence are taken, by default a matter of the step's longest sequence;
    `options` replace the tile BV and what the kernel is compiled with.
    """
    tokens, heads, width = v.shape
    seqs = len(context_lens)
    out = q.new_empty(tokens, heads, width)
    if not seqs:
        return out.zero_()
    keys = q.shape[2]
    block_k, block_v, warps = state_tiles(keys, width)
    tiles = {"BV": block_v, "num_warps": warps, "enable_fp_fusion": True} | options
    grid = (cdiv(width, tiles["BV"]), heads, seqs)
    operands = (q, k, v, g, beta, state)
    long = LONG if by_chunks is None else 2
    # A matter of shapes, as it must be for a CUDA graph; which of the two kernels works is seen on the device.
    has_chunks = tokens - seqs + 1 >= long and by_chunks is not False
    delta_kernel[grid](
        operands, tuple(x.stride() for x in operands), out, cu_seqlens, context_lens, state_slots, tokens, long, scale,
        HAS_CHUNKS=has_chunks, R=lookup_size(seqs) if has_chunks else 1, BY_CHANNEL=g.dim() == 3,
        L2NORM=qk_l2norm, SHARE=heads // q.shape[1], K=keys, V=width, BK=block_k, num_stages=1,
        **dependent(q.device), **tiles,
    )  # fmt: skip
    if has_chunks:
        sequences = (cu_seqlens, context_lens, state_slots)
        delta_chunks_triton(operands, out, sequences, scale, qk_l2norm, long)
    return out


@triton.jit(do_not_specialize=["num_tokens", "long"])
def delta_kernel(
    operands, strides, out_ptr, cu_seqlens_ptr, context_lens_ptr, state_slots_ptr, num_tokens, long, scale,
    HAS_CHUNKS: tl.constexpr, R: tl.constexpr, BY_CHANNEL: tl.constexpr, L2NORM: tl.constexpr, SHARE: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (tile of BV values, value head, sequence). With HAS_CHUNKS, sequences of several tokens are left to
    the chunks in a step with a long one. A token is read while the one before it is worked on.
    """
    wait_for_last(DEPENDENT)
    head = tl.program_id(1)
    row_size = tl.num_programs(1) * V
    k_K = tl.arange(0, BK)
    v_V = tl.program_id(0) * BV + tl.arange(0, BV)
    is_in_V = v_V < V
    at_V = head * V + v_V
    start, end, slot, context = own_sequence(cu_seqlens_ptr, context_lens_ptr, state_slots_ptr)
    if HAS_CHUNKS:
        is_left = (end - start > 1) & goes_by_chunks(cu_seqlens_ptr, tl.num_programs(2), long, R)
        end = tl.where(is_left, start, end)
    if start < end:
        cells, is_cell, state = own_state(
            operands[5], strides[5], slot, head, context, k_K, v_V, K, V
        )
        row = start.to(tl.int64)
        token = load_token(
            operands, strides, row, row < end, head, k_K, v_V, BY_CHANNEL, L2NORM, SHARE, K, V
        )
        for _ in range(start, end):
            q, k, v, beta, decay, read = token
            token = load_token(
                operands, strides, row + 1, row + 1 < end, head, k_K, v_V, BY_CHANNEL, L2NORM, SHARE, K, V
            )  # fmt: skip
            if BY_CHANNEL:
                state = state * decay[:, None]
            else:
                state = state * decay
            # Both sums over the keys at once: q (S + k c) = q S + (q k) c.
            read_k = tl.sum(state * k[:, None], 0)
            read_q = tl.sum(state * q[:, None], 0)
            correction = beta * (v - read_k)
            state = state + k[:, None] * correction[None, :]
            out = scale * (read_q + read * correction)
            to = out_ptr + row * row_size + at_V
            tl.store(to, out.to(out_ptr.dtype.element_ty), mask=is_in_V)
            row += 1
        tl.store(cells, state, mask=is_cell)
    zero_rows_of_nobody(out_ptr, cu_seqlens_ptr, num_tokens, row_size, at_V, is_in_V)


@triton.jit
def load_token(
    operands, strides, row, exists, head, k_K, v_V,
    BY_CHANNEL: tl.constexpr, L2NORM: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Of a row: q, k [K], v [V], beta, decay (a number, or [K] with BY_CHANNEL) and q k, float32."""
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, _ = operands
    q_by, k_by, v_by, g_by, beta_by, _ = strides
    key_head = head // SHARE
    is_in_K, is_in_V = k_K < tl.where(exists, K, 0), v_V < tl.where(exists, V, 0)
    q_at = q_ptr + row * q_by[0] + key_head * q_by[1] + k_K * q_by[2]
    k_at = k_ptr + row * k_by[0] + key_head * k_by[1] + k_K * k_by[2]
    v_at = v_ptr + row * v_by[0] + head * v_by[1] + v_V * v_by[2]
    q = tl.load(q_at, mask=is_in_K, other=0.0).to(tl.float32)
    k = tl.load(k_at, mask=is_in_K, other=0.0).to(tl.float32)
    v = tl.load(v_at, mask=is_in_V, other=0.0).to(tl.float32)
    beta_at = beta_ptr + row * beta_by[0] + head * beta_by[1]
    beta = tl.load(beta_at, mask=exists, other=0.0).to(tl.float32)
    g_at = g_ptr + row * g_by[0] + head * g_by[1]
    if BY_CHANNEL:
        g = tl.load(g_at + k_K * g_by[2], mask=is_in_K, other=0.0).to(tl.float32)
    else:
        g = tl.load(g_at, mask=exists, other=0.0).to(tl.float32)
    if L2NORM:
        q = q / tl.sqrt(tl.sum(q * q, 0) + 1e-6)
        k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
    return q, k, v, beta, tl.exp(g), tl.sum(q * k, 0)
