"""What the walk over chunks of the delta rule needs of their tokens, all chunks side by side.

w, u: the two solutions; query: decayed from the chunk's start; key: decayed to its end; scores: decayed q_i . k_j for
j <= i; decay: of the whole chunk. All of it float32.
"""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

import triton
import triton.language as tl

from .triton_chunks import own_chunk


@triton.jit(do_not_specialize=["num_seqs"])
def prepare_by_head_kernel(
    operands, strides, parts, cu_seqlens_ptr, num_seqs, scale,
    L2NORM: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head). Decays are summed in float64: two large sums may differ by little, and it is
    their difference that counts.
    """
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr = operands
    q_by, k_by, v_by, g_by, beta_by = strides
    w_ptr, query_ptr, key_ptr, u_ptr, scores_ptr, decay_ptr = parts
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    key_head = head // SHARE
    k_K, v_V, c_C = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, C)
    begin, end = own_chunk(cu_seqlens_ptr, num_seqs, C, R)
    if begin < end:
        row_C = (begin + c_C).to(tl.int64)
        is_token_C = row_C < end
        is_key_CK = is_token_C[:, None] & (k_K < K)[None, :]
        is_value_CV = is_token_C[:, None] & (v_V < V)[None, :]
        q_at = q_ptr + row_C[:, None] * q_by[0] + key_head * q_by[1] + k_K[None, :] * q_by[2]
        k_at = k_ptr + row_C[:, None] * k_by[0] + key_head * k_by[1] + k_K[None, :] * k_by[2]
        q = tl.load(q_at, mask=is_key_CK, other=0.0).to(tl.float32)
        k = tl.load(k_at, mask=is_key_CK, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + row_C * g_by[0] + head * g_by[1], mask=is_token_C, other=0.0)
        beta = tl.load(
            beta_ptr + row_C * beta_by[0] + head * beta_by[1], mask=is_token_C, other=0.0
        )
        beta = beta.to(tl.float32)
        if L2NORM:
            q = q / tl.sqrt(tl.sum(q * q, 1) + 1e-6)[:, None]
            k = k / tl.sqrt(tl.sum(k * k, 1) + 1e-6)[:, None]
        q = q * scale
        total_C = tl.cumsum(g.to(tl.float64), 0)
        total = tl.sum(g.to(tl.float64), 0)
        start_C = tl.exp(total_C.to(tl.float32))
        gap_CC = (total_C[:, None] - total_C[None, :]).to(tl.float32)

        at_C = row_C * num_heads + head
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        is_earlier_CC = c_C[:, None] >= c_C[None, :]
        scores = tl.where(is_earlier_CC, scores * tl.exp(tl.where(is_earlier_CC, gap_CC, 0.0)), 0.0)
        tl.store(scores_ptr + at_C[:, None] * C + c_C[None, :], scores, mask=is_token_C[:, None])
        tl.store(query_ptr + at_C[:, None] * K + k_K[None, :], q * start_C[:, None], mask=is_key_CK)
        to_end_C = tl.exp((total - total_C).to(tl.float32))
        tl.store(key_ptr + at_C[:, None] * K + k_K[None, :], k * to_end_C[:, None], mask=is_key_CK)
        decay_at = decay_ptr + (tl.program_id(0).to(tl.int64) * num_heads + head) * K + k_K
        tl.store(decay_at, tl.zeros([BK], tl.float32) + tl.exp(total.to(tl.float32)), mask=k_K < K)

        # The system's matrix turned round, so that a row of it is summed into where the solution's rows lie.
        is_later_CC = c_C[:, None] < c_C[None, :]
        system_CC = tl.dot(k, tl.trans(k), input_precision=PRECISION) * beta[None, :]
        system_CC = tl.where(
            is_later_CC, system_CC * tl.exp(tl.where(is_later_CC, -gap_CC, 0.0)), 0.0
        )
        inverse_CC = (c_C[:, None] == c_C[None, :]).to(tl.float32)
        for place in range(1, C):
            factor_C = tl.sum(tl.where((c_C == place)[None, :], system_CC, 0.0), 1)
            solved_C = (c_C == place).to(tl.float32) - tl.sum(factor_C[:, None] * inverse_CC, 0)
            inverse_CC = tl.where((c_C == place)[:, None], solved_C[None, :], inverse_CC)
        w = tl.dot(inverse_CC, k * (beta * start_C)[:, None], input_precision=PRECISION)
        tl.store(w_ptr + at_C[:, None] * K + k_K[None, :], w, mask=is_key_CK)
        v_at = v_ptr + row_C[:, None] * v_by[0] + head * v_by[1] + v_V[None, :] * v_by[2]
        v = tl.load(v_at, mask=is_value_CV, other=0.0).to(tl.float32)
        u = tl.dot(inverse_CC, v * beta[:, None], input_precision=PRECISION)
        tl.store(u_ptr + at_C[:, None] * V + v_V[None, :], u, mask=is_value_CV)


@triton.jit(do_not_specialize=["num_seqs"])
def prepare_by_channel_kernel(
    operands, strides, parts, cu_seqlens_ptr, num_seqs, scale,
    L2NORM: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, head). Walks the chunk's tokens, decaying the keys so far by one place each: products of
    factors lose nothing where the exponential of a difference of long sums would.
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
