"""Linear attention with a constant decay on the GPU, token by token."""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from regraft.kernels.recurrent.triton import own_sequence, state_tiles, zero_rows_of_nobody


def decayed_linear_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    state_slots: Tensor,
    **options: Any,
) -> Tensor:
    """See `decayed_linear`. `options` replace the tile BV and the number of warps."""
    tokens, heads, width = v.shape
    out = q.new_empty(tokens, heads, width)
    if not len(context_lens):
        return out.zero_()
    block_k, block_v, warps = state_tiles(q.shape[2], width)
    tiles = {"BV": block_v, "num_warps": warps} | options
    grid = (triton.cdiv(width, tiles["BV"]), heads, len(context_lens))
    operands = (q, k, v, decay, state)
    linear_kernel[grid](
        operands, tuple(x.stride() for x in operands), out, cu_seqlens, context_lens, state_slots, tokens,
        K=q.shape[2], V=width, BK=block_k, num_stages=1, enable_fp_fusion=True, **tiles,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    operands, strides, out_ptr, cu_seqlens_ptr, context_lens_ptr, state_slots_ptr, num_tokens,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program a (tile of BV values, head, sequence)."""
    q_ptr, k_ptr, v_ptr, decay_ptr, state_ptr = operands
    q_by, k_by, v_by, decay_by, state_by = strides
    head = tl.program_id(1)
    row_size = tl.num_programs(1) * V
    k_K = tl.arange(0, BK)
    v_V = tl.program_id(0) * BV + tl.arange(0, BV)
    is_in_K, is_in_V = k_K < K, v_V < V
    at_V = head * V + v_V
    zero_rows_of_nobody(out_ptr, cu_seqlens_ptr, num_tokens, row_size, at_V, is_in_V)
    start, end, slot, context = own_sequence(cu_seqlens_ptr, context_lens_ptr, state_slots_ptr)
    if start < end:
        cells = state_ptr + slot * state_by[0] + head.to(tl.int64) * state_by[1]
        cells = cells + k_K[:, None] * state_by[2] + v_V[None, :] * state_by[3]
        is_cell = is_in_K[:, None] & is_in_V[None, :]
        # What another sequence left in the slot is not read: it may be NaN.
        is_own = (k_K < tl.where(context > 0, K, 0))[:, None] & is_in_V[None, :]
        state = tl.load(cells, mask=is_own, other=0.0)
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
