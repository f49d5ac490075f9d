"""What pooling windows, selecting entries and attending to both means: one token at a time, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from regraft.kernels.indexed_attention.naive import WIDE, tokens
from regraft.kernels.paged_attention.naive import is_attended


def pool_windows_naive(
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
    """`pool_windows` by its definition; see there."""
    value_cache.view(-1, values.shape[1])[slot_mapping] = values
    gate_cache.view(-1, gates.shape[1])[slot_mapping] = gates
    rate, width, page_size = len(bias), values.shape[1] // spans, value_cache.shape[1]
    out = values.new_zeros(len(values), width)
    for token, pos, pages in tokens(cu_seqlens, context_lens, block_table):
        if (pos + 1) % rate:
            continue
        first = pos + 1 - spans * rate
        terms = []
        for at in range(max(0, first), pos + 1):
            part = (at - first) // rate
            features = slice(part * width, part * width + width)
            place = pages[at // page_size], at % page_size
            gate = gate_cache[place][features].to(WIDE) + bias[at % rate, features].to(WIDE)
            terms.append((gate, value_cache[place][features].to(WIDE)))
        shares = torch.stack([gate for gate, _ in terms]).softmax(0)
        out[token] = sum(share * value for share, (_, value) in zip(shares, terms, strict=True)).to(
            out.dtype
        )
    return out


def store_naive(
    entries: Tensor, cache: Tensor, page_size: int, rate: int, cu_seqlens: Tensor, context_lens: Tensor,
    block_table: Tensor,
) -> None:  # fmt: skip
    """Every entry to the page of its window's last token, behind those of windows that end earlier in that page."""
    for token, pos, pages in tokens(cu_seqlens, context_lens, block_table):
        if (pos + 1) % rate == 0:
            page, window = pos // page_size, pos // rate
            cache[pages[page], window - earlier(page, page_size, rate)] = entries[token]


def earlier(page: int, page_size: int, rate: int) -> int:
    """The number of the first window that ends in a page or behind it."""
    return next(w for w in range(page * page_size + 1) if (w + 1) * rate > page * page_size)


def entry_of(window: int, cache: Tensor, pages: Tensor, page_size: int, rate: int) -> Tensor:
    page = (window * rate + rate - 1) // page_size
    return cache[pages[page], window - earlier(page, page_size, rate)].to(WIDE)


def index_entries_naive(
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
    """`index_entries` by its definition; see there."""
    page_size = paged.shape[1]
    store_naive(entries, cache, page_size, rate, cu_seqlens, context_lens, block_table)
    selected = torch.full((len(q), topk), -1, dtype=torch.int32, device=q.device)
    for token, pos, pages in tokens(cu_seqlens, context_lens, block_table):
        scored = []
        for window in range((pos + 1) // rate):
            products = q[token].to(WIDE) @ entry_of(window, cache, pages, page_size, rate)
            products = products.clamp(min=0) if relu else products
            scored.append((-scale * float(weights[token].to(WIDE) @ products), window))
        chosen = sorted(window for _, window in sorted(scored)[:topk])
        selected[token, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return selected


def compressed_attention_naive(
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
    """`compressed_attention` by its definition; see there."""
    page_size = row_cache.shape[1]
    row_cache.view(-1, rows.shape[1])[slot_mapping] = rows
    store_naive(entries, entry_cache, page_size, rate, cu_seqlens, context_lens, entry_table)
    out = torch.zeros_like(q)
    of_entries = tokens(cu_seqlens, context_lens, entry_table)
    of_rows = tokens(cu_seqlens, context_lens, block_table)
    for (token, pos, pages), (_, _, entry_pages) in zip(of_rows, of_entries, strict=True):
        keys = [
            row_cache[pages[at // page_size], at % page_size].to(WIDE)
            for at in range(pos + 1)
            if is_attended(pos, at, window, 0)
        ]
        keys += [
            entry_of(number, entry_cache, entry_pages, page_size, rate)
            for number in range((pos + 1) // rate)
            if selected is None or number in selected[token].tolist()
        ]
        held = torch.stack(keys)
        for head in range(q.shape[1]):
            scores = scale * (held @ q[token, head].to(WIDE))
            if sinks is not None:
                scores = torch.cat([scores, sinks[head, None].to(WIDE)])
            out[token, head] = (scores.softmax(0)[: len(held)] @ held).to(q.dtype)
    return out
