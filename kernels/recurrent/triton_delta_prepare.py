"""What the walk over chunks of the delta rule needs of their tokens, all chunks side by side.

w, u: the two solutions; query: decayed from the chunk's start; key: decayed to its end; scores: decayed q_i . k_j for
j <= i; decay: of the whole chunk. All of it float32.
"""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

import triton
import triton.language as tl

from regraft.kernels.triton_wait import wait_for_last

from .triton_chunks import goes_by_chunks, own_chunk


@triton.jit(do_not_specialize=["num_seqs", "long"])
def prepare_by_head_kernel(
    operands, strides, parts, cu_seqlens_ptr, num_seqs, long, scale,
    L2NORM: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head). Decays are summed in float64: two large sums may differ by little, and it is
    their difference that counts.
    """
    wait_for_last(DEPENDENT)
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr = operands
    q_by, k_by, v_by, g_by, beta_by = strides
    w_ptr, query_ptr, key_ptr, u_ptr, scores_ptr, decay_ptr = parts
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    key_head = head // SHARE
    k_K, v_V, c_C = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, C)
    begin, end = own_chunk(cu_seqlens_ptr, num_seqs, C, R)
    if (begin < end) & goes_by_chunks(cu_seqlens_ptr, num_seqs, long, R):
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

        is_later_CC = c_C[:, None] < c_C[None, :]
        system_CC = tl.dot(k, tl.trans(k), input_precision=PRECISION) * beta[None, :]
        system_CC = tl.where(
            is_later_CC, system_CC * tl.exp(tl.where(is_later_CC, -gap_CC, 0.0)), 0.0
        )
        inverse_CC = inverse_of_unit_lower(system_CC)
        w = tl.dot(inverse_CC, k * (beta * start_C)[:, None], input_precision=PRECISION)
        tl.store(w_ptr + at_C[:, None] * K + k_K[None, :], w, mask=is_key_CK)
        v_at = v_ptr + row_C[:, None] * v_by[0] + head * v_by[1] + v_V[None, :] * v_by[2]
        v = tl.load(v_at, mask=is_value_CV, other=0.0).to(tl.float32)
        u = tl.dot(inverse_CC, v * beta[:, None], input_precision=PRECISION)
        tl.store(u_ptr + at_C[:, None] * V + v_V[None, :], u, mask=is_value_CV)


@triton.jit
def inverse_of_unit_lower(turned_CC):
    """Of I + A [C, C] with A strictly lower triangular, given A turned round: so a row of it is summed into where the
    rows of the inverse lie. Row by row: nothing grows that the inverse itself does not hold.
    """
    c_C = tl.arange(0, turned_CC.shape[0])
    inverse_CC = (c_C[:, None] == c_C[None, :]).to(tl.float32)
    for place in range(1, turned_CC.shape[0]):
        factor_C = tl.sum(tl.where((c_C == place)[None, :], turned_CC, 0.0), 1)
        solved_C = (c_C == place).to(tl.float32) - tl.sum(factor_C[:, None] * inverse_CC, 0)
        inverse_CC = tl.where((c_C == place)[:, None], solved_C[None, :], inverse_CC)
    return inverse_CC


@triton.jit(do_not_specialize=["num_seqs", "long"])
def prepare_by_channel_kernel(
    operands, strides, parts, cu_seqlens_ptr, num_seqs, long, scale,
    L2NORM: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, head). A decay between two places is the exponential of a difference of sums, each kept in
    two float32 numbers: their difference may be far smaller than they are.
    """
    wait_for_last(DEPENDENT)
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr = operands
    q_by, k_by, v_by, g_by, beta_by = strides
    w_ptr, query_ptr, key_ptr, u_ptr, scores_ptr, decay_ptr = parts
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    key_head = head // SHARE
    k_K, v_V, c_C = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, C)
    is_in_K = k_K < K
    begin, end = own_chunk(cu_seqlens_ptr, num_seqs, C, R)
    if (begin < end) & goes_by_chunks(cu_seqlens_ptr, num_seqs, long, R):
        row_C = (begin + c_C).to(tl.int64)
        is_token_C = row_C < end
        is_key_CK = is_token_C[:, None] & is_in_K[None, :]
        is_value_CV = is_token_C[:, None] & (v_V < V)[None, :]
        q_at = q_ptr + row_C[:, None] * q_by[0] + key_head * q_by[1] + k_K[None, :] * q_by[2]
        k_at = k_ptr + row_C[:, None] * k_by[0] + key_head * k_by[1] + k_K[None, :] * k_by[2]
        g_at = g_ptr + row_C[:, None] * g_by[0] + head * g_by[1] + k_K[None, :] * g_by[2]
        q = tl.load(q_at, mask=is_key_CK, other=0.0).to(tl.float32)
        k = tl.load(k_at, mask=is_key_CK, other=0.0).to(tl.float32)
        g = tl.load(g_at, mask=is_key_CK, other=0.0).to(tl.float64)
        beta = tl.load(
            beta_ptr + row_C * beta_by[0] + head * beta_by[1], mask=is_token_C, other=0.0
        )
        beta = beta.to(tl.float32)
        if L2NORM:
            q = q / tl.sqrt(tl.sum(q * q, 1) + 1e-6)[:, None]
            k = k / tl.sqrt(tl.sum(k * k, 1) + 1e-6)[:, None]
        q = q * scale
        total_CK = tl.cumsum(g, 0)
        total_K = tl.sum(g, 0)
        large_CK = total_CK.to(tl.float32)
        small_CK = (total_CK - large_CK.to(tl.float64)).to(tl.float32)

        # Scratch that is written for good below: from there, a place's row is had by all.
        at_C = row_C * num_heads + head
        key_at_CK = at_C[:, None] * K + k_K[None, :]
        tl.store(w_ptr + key_at_CK, large_CK, mask=is_key_CK)
        tl.store(query_ptr + key_at_CK, small_CK, mask=is_key_CK)
        tl.store(key_ptr + key_at_CK, k, mask=is_key_CK)
        tl.debug_barrier()
        at = (begin.to(tl.int64) * num_heads + head) * K
        scores_CC, system_CC = decayed_scores(
            q, k, large_CK, small_CK, (w_ptr + at, query_ptr + at, key_ptr + at), num_heads * K, end - begin, K
        )  # fmt: skip
        # Every thread has read the scratch before one writes it for good.
        tl.debug_barrier()
        tl.store(scores_ptr + at_C[:, None] * C + c_C[None, :], scores_CC, mask=is_token_C[:, None])
        start_CK = tl.exp(large_CK)
        tl.store(query_ptr + key_at_CK, q * start_CK, mask=is_key_CK)
        to_end_CK = tl.exp((total_K[None, :] - total_CK).to(tl.float32))
        tl.store(key_ptr + key_at_CK, k * to_end_CK, mask=is_key_CK)
        decay_at = decay_ptr + (tl.program_id(0).to(tl.int64) * num_heads + head) * K + k_K
        tl.store(decay_at, tl.exp(total_K.to(tl.float32)), mask=is_in_K)

        system_CC = tl.where(c_C[:, None] > c_C[None, :], system_CC * beta[:, None], 0.0)
        inverse_CC = inverse_of_unit_lower(tl.trans(system_CC))
        w = tl.dot(inverse_CC, k * beta[:, None] * start_CK, input_precision=PRECISION)
        tl.store(w_ptr + key_at_CK, w, mask=is_key_CK)
        v_at = v_ptr + row_C[:, None] * v_by[0] + head * v_by[1] + v_V[None, :] * v_by[2]
        v = tl.load(v_at, mask=is_value_CV, other=0.0).to(tl.float32)
        u = tl.dot(inverse_CC, v * beta[:, None], input_precision=PRECISION)
        tl.store(u_ptr + at_C[:, None] * V + v_V[None, :], u, mask=is_value_CV)


@triton.jit
def decayed_scores(q, k, large_CK, small_CK, rows, row_size, count, K: tl.constexpr):
    """q_i . k_j and k_i . k_j for j <= i, with k_j decayed from place j to place i; 0 elsewhere.

    `rows` point to the decays' sums up to a place, as a large and a small part, and to its key: `count` places,
    `row_size` numbers apart.
    """
    large_ptr, small_ptr, key_ptr = rows
    c_C, k_K = tl.arange(0, q.shape[0]), tl.arange(0, q.shape[1])
    scores_CC = tl.zeros([q.shape[0], q.shape[0]], tl.float32)
    system_CC = tl.zeros([q.shape[0], q.shape[0]], tl.float32)
    at_K = k_K.to(tl.int64)
    for place in range(count):
        large_K = tl.load(large_ptr + at_K, mask=k_K < K, other=0.0)
        small_K = tl.load(small_ptr + at_K, mask=k_K < K, other=0.0)
        key_K = tl.load(key_ptr + at_K, mask=k_K < K, other=0.0)
        gap_CK = (large_CK - large_K[None, :]) + (small_CK - small_K[None, :])
        key_CK = tl.exp(tl.minimum(gap_CK, 0.0)) * key_K[None, :]
        is_place_CC = (c_C == place)[None, :] & (c_C >= place)[:, None]
        scores_CC = tl.where(is_place_CC, tl.sum(q * key_CK, 1)[:, None], scores_CC)
        system_CC = tl.where(is_place_CC, tl.sum(k * key_CK, 1)[:, None], system_CC)
        at_K += row_size
    return scores_CC, system_CC
