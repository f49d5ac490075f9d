"""Linear attention with a constant decay on the GPU: token by token, and by chunks for longer sequences."""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from regraft.kernels.dependent import dependent
from regraft.kernels.recurrent.triton import (
    own_sequence,
    own_state,
    state_tiles,
    zero_rows_of_nobody,
)
from regraft.kernels.recurrent.triton_chunks import dot_precision, linear_chunk, pays_by_chunks
from regraft.kernels.triton_wait import wait_for_last
from regraft.kernels.whole import cdiv

CHUNKS = {"C": 32, "BV": 32, "num_warps": 4, "num_stages": 2}
"""Tokens and values a tile of the chunked form."""


def decayed_linear_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    state_slots: Tensor,
    by_chunks: bool | None = None,
    **options: Any,
) -> Tensor:
    """See `decayed_linear`. `by_chunks` says how several tokens of a sequence are taken, by default a matter of shapes;
    `options` replace the tile BV and what the kernel of single tokens is compiled with.
    """
    tokens, heads, width = v.shape
    out = q.new_empty(tokens, heads, width)
    if not len(context_lens):
        return out.zero_()
    block_k, block_v, warps = state_tiles(q.shape[2], width)
    tiles = {"BV": block_v, "num_warps": warps, "enable_fp_fusion": True} | options
    grid = (cdiv(width, tiles["BV"]), heads, len(context_lens))
    operands = (q, k, v, decay, state)
    common: dict[str, Any] = {
        "operands": operands,
        "strides": tuple(x.stride() for x in operands),
        "out_ptr": out,
        "cu_seqlens_ptr": cu_seqlens,
        "context_lens_ptr": context_lens,
        "state_slots_ptr": state_slots,
        "K": q.shape[2],
        "V": width,
        **dependent(q.device),
    }
    if by_chunks is None:
        by_chunks = pays_by_chunks(tokens, len(context_lens))
    linear_kernel[grid](
        num_tokens=tokens, ONE_TOKEN=by_chunks, BK=block_k, num_stages=1, **common, **tiles
    )
    if by_chunks:
        linear_chunk_kernel[(cdiv(width, CHUNKS["BV"]), heads, len(context_lens))](
            PRECISION=dot_precision(q.dtype), BK=max(16, block_k), enable_fp_fusion=True, **CHUNKS, **common
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    operands, strides, out_ptr, cu_seqlens_ptr, context_lens_ptr, state_slots_ptr, num_tokens,
    ONE_TOKEN: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (tile of BV values, head, sequence). ONE_TOKEN leaves sequences with more to the chunks."""
    wait_for_last(DEPENDENT)
    q_ptr, k_ptr, v_ptr, decay_ptr, state_ptr = operands
    q_by, k_by, v_by, decay_by, state_by = strides
    head = tl.program_id(1)
    row_size = tl.num_programs(1) * V
    k_K = tl.arange(0, BK)
    v_V = tl.program_id(0) * BV + tl.arange(0, BV)
    is_in_K, is_in_V = k_K < K, v_V < V
    at_V = head * V + v_V
    start, end, slot, context = own_sequence(cu_seqlens_ptr, context_lens_ptr, state_slots_ptr)
    if ONE_TOKEN:
        end = tl.where(end - start == 1, end, start)
    if start < end:
        cells, is_cell, state = own_state(state_ptr, state_by, slot, head, context, k_K, v_V, K, V)
        factor = tl.exp(tl.load(decay_ptr + head * decay_by[0]).to(tl.float32))
        row = start.to(tl.int64)
        for _ in range(start, end):
            q_at = q_ptr + row * q_by[0] + head * q_by[1] + k_K * q_by[2]
            k_at = k_ptr + row * k_by[0] + head * k_by[1] + k_K * k_by[2]
            v_at = v_ptr + row * v_by[0] + head * v_by[1] + v_V * v_by[2]
            q = tl.load(q_at, mask=is_in_K, other=0.0).to(tl.float32)
            k = tl.load(k_at, mask=is_in_K, other=0.0).to(tl.float32)
            v = tl.load(v_at, mask=is_in_V, other=0.0).to(tl.float32)
            state = factor * state + k[:, None] * v[None, :]
            out = tl.sum(state * q[:, None], 0)
            to = out_ptr + row * row_size + at_V
            tl.store(to, out.to(out_ptr.dtype.element_ty), mask=is_in_V)
            row += 1
        tl.store(cells, state, mask=is_cell)
    zero_rows_of_nobody(out_ptr, cu_seqlens_ptr, num_tokens, row_size, at_V, is_in_V)


@triton.jit
def linear_chunk_kernel(
    operands, strides, out_ptr, cu_seqlens_ptr, context_lens_ptr, state_slots_ptr,
    PRECISION: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (tile of BV values, head, sequence of several tokens)."""
    wait_for_last(DEPENDENT)
    q_ptr, k_ptr, v_ptr, decay_ptr, state_ptr = operands
    q_by, k_by, v_by, decay_by, state_by = strides
    head = tl.program_id(1)
    row_size = tl.num_programs(1) * V
    k_K, c_C = tl.arange(0, BK), tl.arange(0, C)
    v_V = tl.program_id(0) * BV + tl.arange(0, BV)
    is_in_K, is_in_V = k_K < K, v_V < V
    start, end, slot, context = own_sequence(cu_seqlens_ptr, context_lens_ptr, state_slots_ptr)
    if end - start > 1:
        cells, is_cell, state = own_state(state_ptr, state_by, slot, head, context, k_K, v_V, K, V)
        decay = tl.load(decay_ptr + head * decay_by[0]).to(tl.float32)
        row_C = (start + c_C).to(tl.int64)
        for _ in range(start, end, C):
            is_token_C = row_C < end
            is_key_CK = is_token_C[:, None] & is_in_K[None, :]
            is_value_CV = is_token_C[:, None] & is_in_V[None, :]
            q_at = q_ptr + row_C[:, None] * q_by[0] + head * q_by[1] + k_K[None, :] * q_by[2]
            k_at = k_ptr + row_C[:, None] * k_by[0] + head * k_by[1] + k_K[None, :] * k_by[2]
            v_at = v_ptr + row_C[:, None] * v_by[0] + head * v_by[1] + v_V[None, :] * v_by[2]
            q = tl.load(q_at, mask=is_key_CK, other=0.0).to(tl.float32)
            k = tl.load(k_at, mask=is_key_CK, other=0.0).to(tl.float32)
            v = tl.load(v_at, mask=is_value_CV, other=0.0).to(tl.float32)
            out, state = linear_chunk(q, k, v, tl.where(is_token_C, decay, 0.0), state, PRECISION)
            to = out_ptr + row_C[:, None] * row_size + head * V + v_V[None, :]
            tl.store(to, out.to(out_ptr.dtype.element_ty), mask=is_value_CV)
            row_C += C
        tl.store(cells, state, mask=is_cell)
