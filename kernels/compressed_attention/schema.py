"""The operators' signatures, shapes and checks.

Tokens 0 to R - 1 of a sequence are its first window, and so on: a window is whole, and has an entry, once its last
token is there. Entries have pages like rows, one entry in place of R rows: see RowSpec.every in rewriter/declare.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attend import compressed_attention_torch
from .pool import pool_windows_torch
from .select import index_entries_torch

torch.library.define(
    "regraft::pool_windows",
    "(Tensor values, Tensor gates, Tensor bias, Tensor(a!) value_cache, Tensor(b!) gate_cache, Tensor cu_seqlens, "
    "Tensor context_lens, Tensor block_table, Tensor slot_mapping, int spans=1) -> Tensor",
)
torch.library.define(
    "regraft::index_entries",
    "(Tensor q, Tensor entries, Tensor weights, Tensor(a!) cache, Tensor paged, Tensor cu_seqlens, "
    "Tensor context_lens, Tensor block_table, int rate, int topk, float scale, bool relu=True) -> Tensor",
)
torch.library.define(
    "regraft::compressed_attention",
    "(Tensor q, Tensor rows, Tensor entries, Tensor(a!) row_cache, Tensor(b!) entry_cache, Tensor? selected, "
    "Tensor cu_seqlens, Tensor context_lens, Tensor block_table, Tensor slot_mapping, Tensor entry_table, int rate, "
    "float scale, int window=0, Tensor? sinks=None) -> Tensor",
)


def pool_windows(
    values: Tensor,
    gates: Tensor,
    bias: Tensor,
    value_cache: Tensor,
    gate_cache: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    spans: int = 1,
) -> Tensor:
    """Write the new rows to their pages, then weigh the rows of each window that becomes whole into one.

    Feature by feature, over the R tokens of the window and of the `spans` - 1 windows before it,

        pooled[d] = sum_t softmax_t(gates[t, d'] + bias[t mod R, d']) * values[t, d']

    where d' is feature d of a row's j-th part, j = 0 for the first of these windows and so on. Windows before the
    sequence's start count for nothing.

    Args:
        values, gates: [N, spans * D] the new rows.
        bias: [R, spans * D].
        value_cache, gate_cache: [num_pages, page_size, spans * D], written. Rows of the last spans * R tokens are read.
        cu_seqlens, context_lens, block_table, slot_mapping: as in `paged_attention`, for these caches.

    Returns:
        [N, D] in the dtype of values: a window's row in that of its last token, zero in all others.

    Raises:
        ValueError: shapes do not fit together.
    """
    return torch.ops.regraft.pool_windows.default(
        values, gates, bias, value_cache, gate_cache, cu_seqlens, context_lens, block_table, slot_mapping, spans,
    )  # fmt: skip


def index_entries(
    q: Tensor,
    entries: Tensor,
    weights: Tensor,
    cache: Tensor,
    paged: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    rate: int,
    topk: int,
    scale: float,
    relu: bool = True,
) -> Tensor:
    """Write the new entries to their pages, then select for each token the best entries of its own sequence.

    Scores are those of `index_topk`, of the entries of windows that are whole at the token; of equals the first.

    Args:
        q: [N, I, E] index queries of I index heads.
        entries: [N, E] that of a window in the row of its last token; other rows are not read.
        weights: [N, I] of the heads, in any float dtype.
        cache: [num_pages, ceil(page_size / rate), E], written.
        paged: [num_pages, page_size, ...] any cache of rows, for its page size.
        cu_seqlens, context_lens, block_table: as in `paged_attention`, for `cache`.
        rate: R, tokens in a window.
        topk: how many entries a token may select.
        scale, relu: as in `index_topk`.

    Returns:
        [N, topk] int32: numbers of windows, ascending, then -1.

    Raises:
        ValueError: shapes do not fit together.
    """
    return torch.ops.regraft.index_entries.default(
        q, entries, weights, cache, paged, cu_seqlens, context_lens, block_table, rate, topk, scale, relu,
    )  # fmt: skip


def compressed_attention(
    q: Tensor,
    rows: Tensor,
    entries: Tensor,
    row_cache: Tensor,
    entry_cache: Tensor,
    selected: Tensor | None,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    entry_table: Tensor,
    rate: int,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write the new rows and entries to their pages, then attend within each sequence to rows and entries together.

    A row, and an entry, is key and value of all heads. The token at p attends to the rows of tokens j <= p (with
    p - j < window, if there is one), and to the entries of windows that are whole at p: all of them, or those of them
    that are selected.

    Args:
        q: [N, H, D] queries.
        rows: [N, D] the new rows.
        entries: [N, D] that of a window in the row of its last token; other rows are not read.
        row_cache: [num_pages, page_size, D], written.
        entry_cache: [num_pages, ceil(page_size / rate), D], written.
        selected: [N, K] int32, distinct numbers of windows, -1 for none; None for all.
        cu_seqlens, context_lens, block_table, slot_mapping: as in `paged_attention`, for `row_cache`.
        entry_table: the block table of `entry_cache`.
        rate: R, tokens in a window.
        scale, window, sinks: as in `paged_attention`.

    Returns:
        [N, H, D] in q's dtype; zero in rows of no sequence.

    Raises:
        ValueError: shapes do not fit together.
    """
    return torch.ops.regraft.compressed_attention.default(
        q, rows, entries, row_cache, entry_cache, selected, cu_seqlens, context_lens, block_table, slot_mapping,
        entry_table, rate, scale, window, sinks,
    )  # fmt: skip


def _check_pool(*args: Any) -> int:
    """The number of spans, which may be left out."""
    values, gates, bias, value_cache, gate_cache = args[:5]
    spans: int = args[9] if len(args) > 9 else 1
    if values.dim() != 2 or gates.shape != values.shape or bias.shape[1:] != values.shape[1:]:
        raise ValueError(
            f"values {[*values.shape]}, gates {[*gates.shape]} and bias {[*bias.shape]} differ in width"
        )
    if spans < 1 or values.shape[1] % spans:
        raise ValueError(f"rows {[*values.shape]} have no {spans} parts of one width")
    _check_cache(values, value_cache, 1)
    _check_cache(gates, gate_cache, 1)
    return spans


def _check_cache(rows: Tensor, cache: Tensor, rate: int, page_size: int = 0) -> None:
    if cache.shape[2:] != rows.shape[1:] or cache.dtype != rows.dtype:
        raise ValueError(
            f"cache {[*cache.shape]} {cache.dtype} does not hold {rows.dtype} rows {[*rows.shape]}"
        )
    if page_size and cache.shape[1] != -(-page_size // rate):
        raise ValueError(
            f"a page of {page_size} tokens has {-(-page_size // rate)} entries of {rate}, not {cache.shape[1]}"
        )


def _check_index(
    q: Tensor, entries: Tensor, weights: Tensor, cache: Tensor, paged: Tensor, rate: int, topk: int
) -> None:
    if q.dim() != 3 or entries.shape != (q.shape[0], q.shape[2]):
        raise ValueError(f"entries {[*entries.shape]} do not fit index queries {[*q.shape]}")
    if weights.shape != q.shape[:2]:
        raise ValueError(f"weights {[*weights.shape]} do not fit index queries {[*q.shape]}")
    if rate < 1 or topk < 1:
        raise ValueError(f"{rate=}, {topk=}: nothing to select")
    _check_cache(entries, cache, rate, paged.shape[1])


def _check_attention(*args: Any) -> None:
    q, rows, entries, row_cache, entry_cache, selected = args[:6]
    rate: int = args[11]
    if q.dim() != 3 or rows.shape != (q.shape[0], q.shape[2]) or entries.shape != rows.shape:
        raise ValueError(
            f"rows {[*rows.shape]} and entries {[*entries.shape]} do not fit q {[*q.shape]}"
        )
    if rate < 1:
        raise ValueError(f"{rate=}")
    _check_cache(rows, row_cache, 1)
    _check_cache(entries, entry_cache, rate, row_cache.shape[1])
    if selected is not None and (
        selected.dim() != 2 or len(selected) != len(q) or selected.dtype != torch.int32
    ):
        raise ValueError(
            f"selected: expected int32 [{len(q)}, K], got {selected.dtype} {[*selected.shape]}"
        )


@torch.library.register_fake("regraft::pool_windows")
def _fake_pool(*args: Any, **kwargs: Any) -> Tensor:
    values, spans = args[0], _check_pool(*args)
    return values.new_empty(values.shape[0], values.shape[1] // spans)


@torch.library.register_fake("regraft::index_entries")
def _fake_index(*args: Any, **kwargs: Any) -> Tensor:
    q, topk = args[0], args[9]
    _check_index(*args[:5], *args[8:10])
    return q.new_empty(q.shape[0], topk, dtype=torch.int32)


@torch.library.register_fake("regraft::compressed_attention")
def _fake_attention(*args: Any, **kwargs: Any) -> Tensor:
    _check_attention(*args)
    return torch.empty_like(args[0], memory_format=torch.contiguous_format)


@torch.library.impl("regraft::pool_windows", ("cpu", "cuda"))
def _run_pool(*args: Any, **kwargs: Any) -> Tensor:
    _check_pool(*args)
    return pool_windows_torch(*args, **kwargs)


@torch.library.impl("regraft::index_entries", ("cpu", "cuda"))
def _run_index(*args: Any, **kwargs: Any) -> Tensor:
    _check_index(*args[:5], *args[8:10])
    return index_entries_torch(*args, **kwargs)


@torch.library.impl("regraft::compressed_attention", ("cpu", "cuda"))
def _run_attention(*args: Any, **kwargs: Any) -> Tensor:
    _check_attention(*args)
    return compressed_attention_torch(*args, **kwargs)
