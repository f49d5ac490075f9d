"""The delta rule by chunks on the GPU, for sequences of many tokens; see `delta` for the algebra.

Within a chunk of C tokens the corrections solve a unit lower triangular system, whose right hand sides are known but
for the state at the chunk's start: solved for both parts of them, [u, w], the corrections are u - w S. So all chunks
are prepared side by side, and only products with the state remain for the walk from chunk to chunk.
"""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton import own_sequence
from .triton_chunks import dot_precision, own_chunk

CHUNK = 32
"""Tokens."""

WALK = {"BV": 16, "num_warps": 8, "num_stages": 2}
"""Values a tile of the walk."""


def delta_chunks_triton(
    operands: tuple[Tensor, ...],
    out: Tensor,
    sequences: tuple[Tensor, Tensor, Tensor],
    scale: float,
    qk_l2norm: bool,
) -> None:
    """Outputs and states of the sequences that have several tokens. Operands: q, k, v, g, beta, state.

    Takes 4 (3 K + V + C) bytes of scratch a token and value head.
    """
    q, k, v, g, beta, state = operands
    tokens, heads, width = v.shape
    keys, seqs = q.shape[2], len(sequences[1])
    if g.dim() == 2:
        g = g[:, :, None].expand(tokens, heads, keys)
    chunks = tokens // CHUNK + seqs
    block_k = max(16, triton.next_power_of_2(keys))
    scratch = v.new_empty(
        tokens * heads * (3 * keys + width + CHUNK) + chunks * heads * keys, dtype=torch.float32
    )
    sizes = [keys, keys, keys, width, CHUNK]
    parts = tuple(
        scratch[: -chunks * heads * keys].split([tokens * heads * size for size in sizes])
    )
    parts += (scratch[-chunks * heads * keys :],)
    common: dict[str, Any] = {
        "K": keys,
        "V": width,
        "C": CHUNK,
        "BK": block_k,
        "enable_fp_fusion": True,
    }
    inputs = (q, k, v, g, beta)
    prepare_kernel[(chunks, heads)](
        inputs, tuple(x.stride() for x in inputs), parts, sequences[0], seqs, scale,
        L2NORM=qk_l2norm, SHARE=heads // q.shape[1], BV=max(16, triton.next_power_of_2(width)),
        R=triton.next_power_of_2(seqs), num_warps=8, num_stages=1, **common,
    )  # fmt: skip
    walk_kernel[(triton.cdiv(width, WALK["BV"]), heads, seqs)](
        parts, state, state.stride(), out, *sequences, PRECISION=dot_precision(q.dtype), **WALK, **common
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs"])
def prepare_kernel(
    operands, strides, parts, cu_seqlens_ptr, num_seqs, scale,
    L2NORM: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head): what the walk needs of its tokens, all of it in float32.

    w, u: the two solutions; query_in: decayed from the chunk's start; key_out: decayed to its end; scores: decayed
    q_i . k_j for j <= i; decay: of the whole chunk. Walks the chunk's tokens, decaying the keys so far by one place
    each: products of factors lose nothing where the exponential of a difference of long sums would.
    """
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr = operands
    q_by, k_by, v_by, g_by, beta_by = strides
    w_ptr, query_ptr, key_ptr, u_ptr, scores_ptr, decay_ptr = parts
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    key_head = head // SHARE
    k_K, v_V, c_C = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, C)
    is_in_K, is_in_V = k_K < K, v_V < V
    begin, end = own_chunk(cu_seqlens_ptr, num_seqs, C, R)
    if begin < end:
        w_CK = tl.zeros([C, BK], tl.float32)
        keys_CK = tl.zeros([C, BK], tl.float32)
        u_CV = tl.zeros([C, BV], tl.float32)
        so_far_K = tl.zeros([BK], tl.float32) + 1.0
        row = begin.to(tl.int64)
        for _ in range(begin, end):
            q_at = q_ptr + row * q_by[0] + key_head * q_by[1] + k_K * q_by[2]
            k_at = k_ptr + row * k_by[0] + key_head * k_by[1] + k_K * k_by[2]
            v_at = v_ptr + row * v_by[0] + head * v_by[1] + v_V * v_by[2]
            g_at = g_ptr + row * g_by[0] + head * g_by[1] + k_K * g_by[2]
            q = tl.load(q_at, mask=is_in_K, other=0.0).to(tl.float32)
            k = tl.load(k_at, mask=is_in_K, other=0.0).to(tl.float32)
            v = tl.load(v_at, mask=is_in_V, other=0.0).to(tl.float32)
            g = tl.load(g_at, mask=is_in_K, other=0.0).to(tl.float32)
            beta = tl.load(beta_ptr + row * beta_by[0] + head * beta_by[1]).to(tl.float32)
            if L2NORM:
                q = q / tl.sqrt(tl.sum(q * q, 0) + 1e-6)
                k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
            q = q * scale
            factor_K = tl.exp(g)
            so_far_K = so_far_K * factor_K
            # Rows from this one on are still zero, so that sums over rows are sums over earlier ones.
            keys_CK = keys_CK * factor_K[None, :]
            dots_C = tl.sum(keys_CK * k[None, :], 1)
            w_K = beta * (k * so_far_K - tl.sum(dots_C[:, None] * w_CK, 0))
            u_V = beta * (v - tl.sum(dots_C[:, None] * u_CV, 0))
            is_place_C = begin + c_C == row
            w_CK = tl.where(is_place_C[:, None], w_K[None, :], w_CK)
            u_CV = tl.where(is_place_C[:, None], u_V[None, :], u_CV)
            keys_CK = tl.where(is_place_C[:, None], k[None, :], keys_CK)
            at = row * num_heads + head
            tl.store(scores_ptr + at * C + c_C, tl.sum(keys_CK * q[None, :], 1))
            tl.store(query_ptr + at * K + k_K, q * so_far_K, mask=is_in_K)
            row += 1
        at_C = (begin + c_C).to(tl.int64) * num_heads + head
        is_token_C = c_C < end - begin
        is_key_CK = is_token_C[:, None] & is_in_K[None, :]
        tl.store(w_ptr + at_C[:, None] * K + k_K[None, :], w_CK, mask=is_key_CK)
        tl.store(key_ptr + at_C[:, None] * K + k_K[None, :], keys_CK, mask=is_key_CK)
        is_value_CV = is_token_C[:, None] & is_in_V[None, :]
        tl.store(u_ptr + at_C[:, None] * V + v_V[None, :], u_CV, mask=is_value_CV)
        decay_at = decay_ptr + (tl.program_id(0).to(tl.int64) * num_heads + head) * K + k_K
        tl.store(decay_at, so_far_K, mask=is_in_K)


@triton.jit
def walk_kernel(
    parts, state_ptr, state_by, out_ptr, cu_seqlens_ptr, context_lens_ptr, state_slots_ptr,
    PRECISION: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program a (tile of BV values, value head, sequence of several tokens)."""
    w_ptr, query_ptr, key_ptr, u_ptr, scores_ptr, decay_ptr = parts
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    k_K, c_C = tl.arange(0, BK), tl.arange(0, C)
    v_V = tl.program_id(0) * BV + tl.arange(0, BV)
    is_in_K, is_in_V = k_K < K, v_V < V
    start, end, slot, context = own_sequence(cu_seqlens_ptr, context_lens_ptr, state_slots_ptr)
    if end - start > 1:
        cells = state_ptr + slot * state_by[0] + head.to(tl.int64) * state_by[1]
        cells = cells + k_K[:, None] * state_by[2] + v_V[None, :] * state_by[3]
        is_own = (k_K < tl.where(context > 0, K, 0))[:, None] & is_in_V[None, :]
        state = tl.load(cells, mask=is_own, other=0.0)
        chunk = (start // C + tl.program_id(2)).to(tl.int64)
        row_C = (start + c_C).to(tl.int64)
        for _ in range(start, end, C):
            is_token_C = row_C < end
            at_C = row_C * num_heads + head
            key_at_CK = at_C[:, None] * K + k_K[None, :]
            is_key_CK = is_token_C[:, None] & is_in_K[None, :]
            is_value_CV = is_token_C[:, None] & is_in_V[None, :]
            w = tl.load(w_ptr + key_at_CK, mask=is_key_CK, other=0.0)
            q = tl.load(query_ptr + key_at_CK, mask=is_key_CK, other=0.0)
            k = tl.load(key_ptr + key_at_CK, mask=is_key_CK, other=0.0)
            u = tl.load(u_ptr + at_C[:, None] * V + v_V[None, :], mask=is_value_CV, other=0.0)
            scores = tl.load(
                scores_ptr + at_C[:, None] * C + c_C[None, :], mask=is_token_C[:, None], other=0.0
            )
            decay = tl.load(
                decay_ptr + (chunk * num_heads + head) * K + k_K, mask=is_in_K, other=0.0
            )
            correction = u - tl.dot(w, state, input_precision=PRECISION)
            out = tl.dot(q, state, input_precision=PRECISION)
            out += tl.dot(scores, correction, input_precision=PRECISION)
            state = state * decay[:, None]
            state += tl.dot(tl.trans(k), correction, input_precision=PRECISION)
            to = out_ptr + at_C[:, None] * V + v_V[None, :]
            tl.store(to, out.to(out_ptr.dtype.element_ty), mask=is_value_CV)
            row_C += C
            chunk += 1
        tl.store(cells, state, mask=is_in_K[:, None] & is_in_V[None, :])
