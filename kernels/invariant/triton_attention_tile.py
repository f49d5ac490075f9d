"""The kernels of invariant attention; see `triton_attention`, and `paged_attention.triton_tile` for what they share.

The state of a softmax is top_M (maximum so far), sum_MC (the weights' sum, in each of 16 equal columns) and the
weighted values (main, rest). With IN_MEMORY those of all segments lie in memory: two would be too many for registers.
"""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

import triton
import triton.language as tl

from regraft.kernels.paged_attention.triton_prefill import find_sequence
from regraft.kernels.paged_attention.triton_tile import (
    LOG2E,
    first_key,
    load_queries,
    load_rows,
    shape_scores,
    store_rows,
)
from regraft.kernels.triton_wait import wait_for_last

COLUMNS = tl.constexpr(16)
"""As narrow as a product of tensor cores is."""


@triton.jit(do_not_specialize=["num_tokens"])
def write_kernel(
    operands, strides, slot_mapping_ptr, num_tokens,
    SHARED: tl.constexpr, W: tl.constexpr, PAGE_SIZE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (block of W tokens, key head): this step's keys and values to their pages. Attention then reads
    nothing but pages, whatever of them is new.
    """
    wait_for_last(DEPENDENT)
    token_W = tl.program_id(0) * W + tl.arange(0, W)
    valid_W = token_W < num_tokens
    kv_head = tl.program_id(1)
    slot_W = tl.load(slot_mapping_ptr + token_W, mask=valid_W, other=0)
    page_W, row_W = slot_W // PAGE_SIZE, slot_W % PAGE_SIZE
    token_W = token_W.to(tl.int64)
    from_W = token_W * strides[1][0] + kv_head * strides[1][1]
    to_W = page_W * strides[3][0] + row_W * strides[3][1] + kv_head * strides[3][2]
    store_rows(
        operands[3], load_rows(operands[1], from_W, valid_W, strides[1][2], D), to_W, valid_W, strides[3][3], D
    )  # fmt: skip
    if not SHARED:
        from_W = token_W * strides[2][0] + kv_head * strides[2][1]
        to_W = page_W * strides[4][0] + row_W * strides[4][1] + kv_head * strides[4][2]
        store_rows(
            operands[4], load_rows(operands[2], from_W, valid_W, strides[2][2], DV), to_W, valid_W, strides[4][3], DV
        )  # fmt: skip


@triton.jit(do_not_specialize=["stride_table", "num_tokens", "num_seqs", "num_segments"])
def segment_kernel(
    operands, strides, extras, rel_strides, out_ptr, scratch,
    cu_seqlens_ptr, context_lens_ptr, block_table_ptr, stride_table, num_tokens, num_seqs, num_segments, scale,
    SCORE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr, Q: tl.constexpr,
    IS_SPLIT: tl.constexpr, IN_MEMORY: tl.constexpr, SHARED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PAGE_SIZE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SEGMENT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (block of Q tokens of one sequence, key head and share of its heads), with IS_SPLIT for each
    segment. Row m is head m % SHARE of the program's, of the block's token m // SHARE. The last blocks begin first.
    """
    wait_for_last(DEPENDENT)
    PARTS: tl.constexpr = (GROUP + SHARE - 1) // SHARE
    PROGRAMS: tl.constexpr = KV_HEADS * PARTS
    block = tl.num_programs(0) // PROGRAMS - 1 - tl.program_id(0) // PROGRAMS
    kv_head, share = tl.program_id(0) % PROGRAMS // PARTS, tl.program_id(0) % PARTS
    seq = find_sequence(cu_seqlens_ptr, num_seqs, block, Q)
    is_seq = seq < num_seqs
    start = tl.load(cu_seqlens_ptr + seq)
    end = tl.load(cu_seqlens_ptr + seq + 1, mask=is_seq, other=num_tokens)
    context = tl.load(context_lens_ptr + seq, mask=is_seq, other=0)
    from_token = start + (block - start // Q - seq) * Q
    to_token = tl.minimum(end, from_token + Q)

    m_M = tl.arange(0, M)
    token_M = from_token + m_M // SHARE
    in_group_M = share * SHARE + m_M % SHARE
    head_M = kv_head * GROUP + in_group_M
    is_row_M = (in_group_M < GROUP) & (m_M < Q * SHARE) & (token_M < to_token)
    pos = context + from_token - start
    pos_M = pos + m_M // SHARE
    works = is_seq & (from_token < to_token)
    behind = tl.where(works, context + to_token - start, 0)
    lowest = first_key(pos, WINDOW, CHUNK)
    table_ptr = block_table_ptr + seq.to(tl.int64) * stride_table
    first, last = lowest // SEGMENT, tl.cdiv(behind, SEGMENT)
    if IS_SPLIT:
        first = tl.maximum(first, tl.program_id(1))
        last = tl.minimum(last, tl.program_id(1) + 1)
    if first < last:
        q, queries = load_queries(
            operands, strides, extras, rel_strides, token_M, head_M, is_row_M, pos_M, WINDOW, CHUNK, D
        )  # fmt: skip
        total = no_keys(M, DV)
        at_M = token_M.to(tl.int64) * (KV_HEADS * GROUP) + head_M
        for i in range(first, last):
            begin = tl.maximum(i * SEGMENT, lowest // N * N)
            state = attend_segment(
                q, queries, operands, strides, table_ptr, kv_head, begin, tl.minimum(behind, (i + 1) * SEGMENT),
                lowest, scale, SCORE, PAGE_SIZE, SHARED, D, DV, M, N,
            )  # fmt: skip
            if IS_SPLIT:
                behind_all = num_tokens.to(tl.int64) * (KV_HEADS * GROUP) * num_segments
                store_segment(state, scratch, at_M * num_segments + i, behind_all, is_row_M, DV)
            elif IN_MEMORY:
                has_acc_M = is_row_M & (m_M * 0 + i > first)
                total = merged_in_memory(total, state, scratch[0], at_M, is_row_M, has_acc_M, DV)
            else:
                total = merged(total, state, DV)
        if IN_MEMORY and not IS_SPLIT:
            total = total[0], total[1], load_rows(scratch[0], at_M * DV[0], is_row_M, 1, DV)
        if not IS_SPLIT:
            write_result(total, extras[0], out_ptr, at_M, head_M, is_row_M, DV)
    elif not IS_SPLIT:
        at_M = token_M.to(tl.int64) * (KV_HEADS * GROUP) + head_M
        store_rows(out_ptr, no_keys(M, DV)[2], at_M * DV[0], is_row_M, 1, DV)
    if IS_SPLIT:
        if (tl.program_id(1) == 0) & (kv_head + share == 0):
            end_M = tl.where(works, pos_M + 1, 0)
            tl.store(scratch[2] + token_M, end_M, mask=is_row_M & (in_group_M == 0))


@triton.jit
def no_keys(M: tl.constexpr, DV: tl.constexpr):
    """The softmax before any key."""
    MAIN: tl.constexpr = DV[1]
    REST: tl.constexpr = DV[2]
    main = tl.zeros([M, MAIN], tl.float32)
    rest = main
    if REST > 0:
        rest = tl.zeros([M, REST], tl.float32)
    return tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), (main, rest)


@triton.jit
def attend_segment(
    q, queries, operands, strides, table_ptr, kv_head, begin, end, lowest, scale,
    SCORE: tl.constexpr, PAGE_SIZE: tl.constexpr, SHARED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The softmax over positions begin..end-1, in tiles of N. A key before `lowest` or from `end` on is not even read:
    it may be another's by now, or NaN. Offsets have 64 bits: pools are large.
    """
    top_M, _, acc = no_keys(M, DV)
    main, rest = acc
    sum_MC = tl.zeros([M, COLUMNS], tl.float32)
    k_page, k_slot, k_head, k_element = strides[3]
    v_page, v_slot, v_head, v_element = strides[4]
    for n in range(begin, end, N):
        pos_N = n + tl.arange(0, N)
        valid_N = (pos_N >= lowest) & (pos_N < end)
        page_N = tl.load(table_ptr + pos_N // PAGE_SIZE, mask=valid_N, other=0).to(tl.int64)
        slot_N = pos_N % PAGE_SIZE
        k_N = page_N * k_page + slot_N * k_slot + kv_head * k_head
        k = load_rows(operands[3], k_N, valid_N, k_element, D)
        s_MN = tl.dot(q[0], tl.trans(k[0]), input_precision="tf32x3")
        if D[2] > 0:
            s_MN += tl.dot(q[1], tl.trans(k[1]), input_precision="tf32x3")
        s_MN = shape_scores(s_MN, queries, pos_N, valid_N, scale, SCORE)
        unit = 1.0
        if SCORE[3]:
            unit = scale * LOG2E
        new_top_M = tl.maximum(top_M, tl.max(s_MN, 1) * unit)
        shift_M = tl.where(new_top_M == float("-inf"), 0.0, new_top_M)
        p_MN = tl.exp2(s_MN * unit - shift_M[:, None]).to(operands[4].dtype.element_ty)
        fade_M = tl.exp2(top_M - shift_M)
        if SHARED:
            main = main * fade_M[:, None] + tl.dot(p_MN, k[0], input_precision="tf32x3")
        else:
            v_N = page_N * v_page + slot_N * v_slot + kv_head * v_head
            v = load_rows(operands[4], v_N, valid_N, v_element, DV)
            main = main * fade_M[:, None] + tl.dot(p_MN, v[0], input_precision="tf32x3")
            if DV[2] > 0:
                rest = rest * fade_M[:, None] + tl.dot(p_MN, v[1], input_precision="tf32x3")
        ones_NC = tl.full([N, COLUMNS], 1.0, operands[4].dtype.element_ty)
        sum_MC = sum_MC * fade_M[:, None] + tl.dot(p_MN, ones_NC, input_precision="tf32x3")
        top_M = new_top_M
    is_first_C = tl.arange(0, COLUMNS) == 0
    return top_M, tl.sum(tl.where(is_first_C[None, :], sum_MC, 0.0), 1), (main, rest)


@triton.jit
def merged(total, state, DV: tl.constexpr):
    """The softmax over the keys of both."""
    top_M, sum_M, acc = total
    with_top_M, with_sum_M, with_acc = state
    top_M, fade_M, with_fade_M = fades(top_M, with_top_M)
    acc = merged_values(acc, fade_M, with_acc, with_fade_M, DV)
    return top_M, sum_M * fade_M + with_sum_M * with_fade_M, acc


@triton.jit
def merged_in_memory(total, state, acc_ptr, at_M, is_row_M, has_acc_M, DV: tl.constexpr):
    """The same where values are too wide for registers to hold both: those of `total` lie in memory, unless this is the
    first segment.
    """
    top_M, sum_M, kept = total
    with_top_M, with_sum_M, with_acc = state
    top_M, fade_M, with_fade_M = fades(top_M, with_top_M)
    acc = load_rows(acc_ptr, at_M * DV[0], has_acc_M, 1, DV)
    acc = merged_values(acc, fade_M, with_acc, with_fade_M, DV)
    tl.debug_barrier()
    store_rows(acc_ptr, acc, at_M * DV[0], is_row_M, 1, DV)
    tl.debug_barrier()
    return top_M, sum_M * fade_M + with_sum_M * with_fade_M, kept


@triton.jit
def merged_values(acc, fade_M, with_acc, with_fade_M, DV: tl.constexpr):
    main = acc[0] * fade_M[:, None] + with_acc[0] * with_fade_M[:, None]
    rest = main
    if DV[2] > 0:
        rest = acc[1] * fade_M[:, None] + with_acc[1] * with_fade_M[:, None]
    return main, rest


@triton.jit
def fades(top, with_top):
    """The maximum of both, and what the values under each fade by."""
    new_top = tl.maximum(top, with_top)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, tl.exp2(top - shift), tl.exp2(with_top - shift)


@triton.jit
def with_sink(top, total, sink):
    """What a key without a value makes of a softmax: by what values fade, and the sum."""
    sink = sink.to(tl.float32) * LOG2E
    _, fade, added = fades(top, sink)
    return fade, total * fade + added


@triton.jit
def write_result(total, sinks_ptr, out_ptr, at_M, head_M, is_row_M, DV: tl.constexpr):
    """Values over the sum of the weights; 0 is added so that -0 becomes 0: it would tell of tiles that add nothing."""
    top_M, sum_M, acc = total
    main, rest = acc
    if sinks_ptr is not None:
        sink_M = tl.load(sinks_ptr + head_M, mask=is_row_M, other=0.0)
        fade_M, sum_M = with_sink(top_M, sum_M, sink_M)
        main = main * fade_M[:, None]
        rest = rest * fade_M[:, None]
    sum_M = tl.where(is_row_M, sum_M, 1.0)
    pair = (main / sum_M[:, None] + 0.0, rest / sum_M[:, None] + 0.0)
    store_rows(out_ptr, pair, at_M * DV[0], is_row_M, 1, DV)


@triton.jit
def store_segment(state, scratch, at_M, behind, is_row_M, DV: tl.constexpr):
    """What a segment came to, in its row of scratch."""
    top_M, sum_M, acc = state
    tl.store(scratch[1] + at_M, top_M, mask=is_row_M)
    tl.store(scratch[1] + behind + at_M, sum_M, mask=is_row_M)
    store_rows(scratch[0], acc, at_M * DV[0], is_row_M, 1, DV)


@triton.jit(do_not_specialize=["num_segments"])
def combine_kernel(
    scratch, sinks_ptr, out_ptr, num_segments, V: tl.constexpr, DV: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SEGMENT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (token, head): its segments merged in order, the same arithmetic as `merged`."""
    wait_for_last(DEPENDENT)
    token, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    end = tl.load(scratch[2] + token)
    at = (token.to(tl.int64) * heads + head) * num_segments
    behind = tl.num_programs(0).to(tl.int64) * heads * num_segments
    d_V = tl.arange(0, V)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc_V = tl.zeros([V], tl.float32)
    i_1 = tl.arange(0, 1)
    for i in range(
        first_key(tl.maximum(end - 1, 0), WINDOW, CHUNK) // SEGMENT, tl.cdiv(end, SEGMENT)
    ):
        with_top = tl.load(scratch[1] + at + i + i_1)
        with_sum = tl.load(scratch[1] + behind + at + i + i_1)
        with_V = tl.load(scratch[0] + (at + i) * DV + d_V, mask=d_V < DV, other=0.0)
        top, fade, with_fade = fades(top, with_top)
        acc_V = acc_V * fade + with_V * with_fade
        total = total * fade + with_sum * with_fade
    if sinks_ptr is not None:
        fade, total = with_sink(top, total, tl.load(sinks_ptr + head + i_1))
        acc_V = acc_V * fade
    total = tl.where(i_1 < end, total, 1.0)
    out_V = tl.where(d_V < tl.where(end > 0, DV, 0), acc_V / total + 0.0, 0.0)
    to_V = out_ptr + (token.to(tl.int64) * heads + head) * DV + d_V
    tl.store(to_V, out_V.to(out_ptr.dtype.element_ty), mask=d_V < DV)
