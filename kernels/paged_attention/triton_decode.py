"""One new token a sequence: split the history, attend to the splits side by side, combine them."""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

import triton
import triton.language as tl

from regraft.kernels.triton_wait import wait_for_last

from .triton_tile import (
    attend_history,
    attend_new,
    attend_shared_history,
    empty_state,
    first_key,
    load_queries,
    store_rows,
    which_heads,
    write_rows,
)

NEW_TILE = tl.constexpr(16)
"""Keys of this step a tile: nearly always there is one, and a tensor core wants 16."""


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_splits"])
def decode_kernel(
    operands, strides, extras, rel_strides, out_ptr, scratch,
    cu_seqlens_ptr, context_lens_ptr, block_table_ptr, stride_table, slot_mapping_ptr,
    num_tokens, num_rows, num_splits, scale,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SCORE: tl.constexpr,
    GROUP: tl.constexpr, SHARE: tl.constexpr, PAGE_SIZE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    IS_SPLIT: tl.constexpr, MIN_SPLIT: tl.constexpr, EVERY_TOKEN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SHARED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (key head and share of its heads, split, sequence).

    The key heads of a sequence come one after the other: their rows lie side by side, and are read at about one time.

    Keys of this step are read from `k`, those before it from the pages, so no program reads what another writes.
    Split 0 takes this step's keys and writes them to the pages. A sequence with several new tokens is left to the
    prefill kernel, or with EVERY_TOKEN (no more tokens than sequences) its tokens are taken in turn. With SHARED the
    cached values are the main parts of the cached keys.
    """
    wait_for_last(DEPENDENT)
    split, seq = tl.program_id(1), tl.program_id(2)
    g_M = tl.arange(0, M)
    kv_head, head_M, is_row_M, num_heads = which_heads(g_M, 0, GROUP, SHARE)
    start = tl.load(cu_seqlens_ptr + seq)
    end = tl.load(cu_seqlens_ptr + seq + 1)
    context = tl.load(context_lens_ptr + seq)
    if EVERY_TOKEN:
        zero_row_of_nobody(out_ptr, cu_seqlens_ptr, num_tokens, head_M, is_row_M, num_heads, DV, M)
    else:
        end = tl.where(end - start == 1, end, start)

    for token in range(start, end):
        pos = context + token - start
        token_M = token + g_M * 0
        q, queries = load_queries(
            operands, strides, extras, rel_strides, token_M, head_M, is_row_M, pos + g_M * 0, WINDOW, CHUNK, D
        )  # fmt: skip
        state = empty_state(extras[0], split == 0, head_M, is_row_M, M, DV)
        first = first_key(pos, WINDOW, CHUNK)
        state = attend_new(
            state, q, queries, operands, strides, start - context, kv_head,
            tl.maximum(first, context), tl.where(split == 0, pos + 1, 0), scale, SCORE, D, DV, NEW_TILE,
        )  # fmt: skip
        share = tl.maximum(MIN_SPLIT, tl.cdiv(tl.maximum(context - first, 0), num_splits))
        share = tl.cdiv(share, N) * N
        begin = first + split * share
        behind = tl.minimum(context, begin + share)
        table_ptr = block_table_ptr + seq.to(tl.int64) * stride_table
        if SHARED:
            state = attend_shared_history(
                state, q, queries, operands, strides, table_ptr, kv_head, begin, behind, scale,
                SCORE, PAGE_SIZE, D, N,
            )  # fmt: skip
        else:
            state = attend_history(
                state, q, queries, operands, strides, table_ptr, kv_head, begin, behind, scale,
                SCORE, PAGE_SIZE, D, DV, N,
            )  # fmt: skip
        token_1 = token + tl.arange(0, 1)
        is_writer_1 = tl.arange(0, 1) + split == 0
        write_rows(
            operands, strides, slot_mapping_ptr, token_1, is_writer_1, kv_head, PAGE_SIZE, D, DV
        )
        row_M = token_M if EVERY_TOKEN else seq + g_M * 0
        store_state(
            state, out_ptr, scratch, token_M, row_M, num_rows, head_M, is_row_M, num_heads,
            split, num_splits, IS_SPLIT, DV,
        )  # fmt: skip


@triton.jit
def zero_row_of_nobody(
    out_ptr, cu_seqlens_ptr, num_tokens, head_M, is_row_M, num_heads, DV: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    """Zero the row with this sequence's number if it lies after the last sequence's tokens."""
    row = tl.program_id(2)
    covered = tl.load(cu_seqlens_ptr + tl.num_programs(2))
    is_nobodys = (tl.program_id(1) == 0) & (row >= covered) & (row < num_tokens)
    _, _, zeros = empty_state(None, False, head_M, is_row_M, M, DV)
    at_M = (row.to(tl.int64) * num_heads + head_M) * DV[0]
    store_rows(
        out_ptr, zeros, at_M, is_row_M & (head_M < tl.where(is_nobodys, num_heads, 0)), 1, DV
    )


@triton.jit
def store_state(
    state, out_ptr, scratch, token_M, row_M, num_rows, head_M, is_row_M, num_heads, split, num_splits,
    IS_SPLIT: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Store the result of the only split, or one split's state in its row of scratch."""
    top_M, sum_M, acc = state
    if not IS_SPLIT:
        at_M = (token_M.to(tl.int64) * num_heads + head_M) * DV[0]
        store_rows(
            out_ptr, (acc[0] / sum_M[:, None], acc[1] / sum_M[:, None]), at_M, is_row_M, 1, DV
        )
    else:
        partial_ptr, stats_ptr = scratch
        at_M = (row_M.to(tl.int64) * num_heads + head_M) * num_splits + split
        tl.store(stats_ptr + at_M, top_M, mask=is_row_M)
        behind = num_rows.to(tl.int64) * num_heads * num_splits
        tl.store(stats_ptr + behind + at_M, sum_M, mask=is_row_M)
        store_rows(partial_ptr, acc, at_M * DV[0], is_row_M & (top_M > float("-inf")), 1, DV)


@triton.jit(do_not_specialize=["num_seqs", "num_rows", "num_splits"])
def combine_kernel(
    scratch, out_ptr, cu_seqlens_ptr, num_seqs, num_rows, num_splits,
    EVERY_TOKEN: tl.constexpr, DV: tl.constexpr, S: tl.constexpr, V: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (row of scratch, head). Splits that had no key left their values unwritten.

    Everything is loaded at once, what a later choice leaves out too: most of the time goes by waiting for memory.
    """
    wait_for_last(DEPENDENT)
    partial_ptr, stats_ptr = scratch
    row, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    s_S, d_V = tl.arange(0, S), tl.arange(0, V)
    at_S = (row.to(tl.int64) * num_heads + head) * num_splits + s_S
    is_split_S = s_S < num_splits
    is_in_V = d_V < DV
    top_S = tl.load(stats_ptr + at_S, mask=is_split_S, other=float("-inf"))
    behind = num_rows.to(tl.int64) * num_heads * num_splits
    sum_S = tl.load(stats_ptr + behind + at_S, mask=is_split_S, other=0.0)
    is_in_SV = is_split_S[:, None] & is_in_V[None, :]
    acc_SV = tl.load(partial_ptr + at_S[:, None] * DV + d_V[None, :], mask=is_in_SV, other=0.0)
    if EVERY_TOKEN:
        token = row
        exists = row < tl.load(cu_seqlens_ptr + num_seqs)
    else:
        token = tl.load(cu_seqlens_ptr + row)
        exists = tl.load(cu_seqlens_ptr + row + 1) - token == 1
    had_key_S = top_S > float("-inf")
    weight_S = tl.exp2(top_S - tl.where(exists, tl.max(top_S, 0), 0.0))
    total = tl.sum(tl.where(had_key_S, sum_S, 0.0) * weight_S, 0)
    total = tl.where(exists, total, 1.0)
    acc_V = tl.sum(tl.where(had_key_S[:, None], acc_SV, 0.0) * weight_S[:, None], 0) / total
    to = out_ptr + (token.to(tl.int64) * num_heads + head) * DV + d_V
    tl.store(to, acc_V.to(out_ptr.dtype.element_ty), mask=d_V < tl.where(exists, DV, 0))
