"""Several new tokens a sequence, over a paged history: one kernel for a ragged row."""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

import triton
import triton.language as tl

from regraft.kernels.triton_wait import wait_for_last

from .triton_tile import (
    attend_history,
    attend_new,
    empty_state,
    first_key,
    load_queries,
    store_rows,
    which_heads,
    write_rows,
)


@triton.jit
def find_sequence(cu_seqlens_ptr, num_seqs, block, BLOCK_Q: tl.constexpr):
    """The sequence whose queries a block takes: block cu_seqlens[r] // BLOCK_Q + r is the first of r.

    Most sequences get a block too many, but nothing has to be counted on the host. The rows after the last sequence
    count as one more sequence.
    """
    low = block * 0
    high = low + num_seqs + 1
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(cu_seqlens_ptr + middle) // BLOCK_Q + middle
        low = tl.where(begins <= block, middle, low)
        high = tl.where(begins <= block, high, middle)
    return low


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def prefill_kernel(
    operands, strides, extras, rel_strides, out_ptr,
    cu_seqlens_ptr, context_lens_ptr, block_table_ptr, stride_table, slot_mapping_ptr,
    num_tokens, num_seqs, scale,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SCORE: tl.constexpr,
    GROUP: tl.constexpr, SHARE: tl.constexpr, PAGE_SIZE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    Q: tl.constexpr, W: tl.constexpr, M: tl.constexpr, N: tl.constexpr, UNMASKED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (block of Q tokens of one sequence, key head and share of its heads).

    Row m is head m % SHARE of the program's, of the block's token m // SHARE. A block writes its tokens' keys and
    values to the pages (W is Q rounded up to a power of two), and all read this step's from `k` and `v`.
    Sequences with one new token are the decode kernel's. With UNMASKED the tiles of keys that all rows see are taken
    without masks first. The last blocks of a sequence, which see the most, begin first.
    """
    wait_for_last(DEPENDENT)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    seq = find_sequence(cu_seqlens_ptr, num_seqs, block, Q)
    is_seq = seq < num_seqs
    start = tl.load(cu_seqlens_ptr + seq)
    end = tl.load(cu_seqlens_ptr + seq + 1, mask=is_seq, other=num_tokens)
    context = tl.load(context_lens_ptr + seq, mask=is_seq, other=0)
    from_token = start + (block - start // Q - seq) * Q
    to_token = tl.minimum(end, from_token + Q)
    to_token = tl.where(is_seq & (end - start == 1), from_token, to_token)

    m_M = tl.arange(0, M)
    token_M = from_token + m_M // SHARE
    kv_head, head_M, is_head_M, num_heads = which_heads(m_M % SHARE, 1, GROUP, SHARE)
    is_row_M = is_head_M & (m_M < Q * SHARE) & (token_M < to_token)
    pos = context + from_token - start
    q, queries = load_queries(
        operands, strides, extras, rel_strides, token_M, head_M, is_row_M, pos + m_M // SHARE, WINDOW, CHUNK, D
    )  # fmt: skip
    state = empty_state(extras[0], is_seq, head_M, is_row_M, M, DV)
    works = is_seq & (from_token < to_token)
    history_end = tl.where(works, context, 0)
    new_end = tl.where(works, context + to_token - start, 0)
    history = first_key(pos, WINDOW, CHUNK)
    new = tl.maximum(history, context)
    table_ptr = block_table_ptr + seq.to(tl.int64) * stride_table
    if UNMASKED:
        tl.static_assert(WINDOW == 0 and CHUNK == 0, "every row sees its whole past")
        state = attend_history(
            state, q, queries, operands, strides, table_ptr, kv_head,
            0, history_end // N * N, scale, SCORE, PAGE_SIZE, D, DV, N, True,
        )  # fmt: skip
        history = history_end // N * N
    state = attend_history(
        state, q, queries, operands, strides, table_ptr, kv_head,
        history, history_end, scale, SCORE, PAGE_SIZE, D, DV, N,
    )  # fmt: skip
    if UNMASKED:
        seen_by_all = context + tl.where(works, from_token - start, 0) // N * N
        state = attend_new(
            state, q, queries, operands, strides, start - context, kv_head,
            context, seen_by_all, scale, SCORE, D, DV, N, True,
        )  # fmt: skip
        new = seen_by_all
    state = attend_new(
        state, q, queries, operands, strides, start - context, kv_head,
        new, new_end, scale, SCORE, D, DV, N,
    )  # fmt: skip

    _, sum_M, acc = state
    sum_M = tl.where(sum_M == 0.0, 1.0, sum_M)[
        :, None
    ]  # rows of nobody have seen no key: they become zero
    at_M = (token_M.to(tl.int64) * num_heads + head_M) * DV[0]
    store_rows(out_ptr, (acc[0] / sum_M, acc[1] / sum_M), at_M, is_row_M, 1, DV)
    token_W = from_token + tl.arange(0, W)
    is_written_W = (tl.arange(0, W) < Q) & (token_W < tl.where(works, to_token, 0))
    write_rows(
        operands, strides, slot_mapping_ptr, token_W, is_written_W, kv_head, PAGE_SIZE, D, DV
    )
