"""Attention over a window of rows and over entries, in torch.

On the host each sequence has one matrix of the rows and entries that its tokens may see. Elsewhere every token gathers
its own, without a look at the metadata from the host: a first form, which reads what neighbours share once for each.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regraft.kernels.indexed_attention.gather import shares_of
from regraft.kernels.indexed_attention.select import places

from . import pages
from .pages import Entries, store

_ELEMENTS = 1 << 23
"""About the number of elements of an intermediate result; more tokens go block by block."""

Part = tuple[slice, Tensor, Tensor]
"""Tokens, the keys [M, D] or [n, M, D] that they may see, and which they do [n, M]."""


def compressed_attention_torch(
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
    """`compressed_attention` on any device."""
    row_cache.view(-1, row_cache.shape[2]).index_copy_(0, slot_mapping, rows)
    held = Entries(entry_cache, entry_table, rate, row_cache.shape[1])
    store(entries, held, cu_seqlens, context_lens)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    if pages.on_host(q):
        parts = _by_sequence(
            q, row_cache, held, selected, cu_seqlens, context_lens, block_table, window
        )
    else:
        seq, pos = places(cu_seqlens, context_lens, len(q))
        parts = _by_token(q, row_cache, held, selected, seq, pos, block_table, window)
    for tokens, keys, seen in parts:
        out[tokens] = attend(q[tokens], keys, seen, scale, sinks).to(q.dtype)
    return out


def _by_sequence(
    q: Tensor, row_cache: Tensor, held: Entries, selected: Tensor | None, cu_seqlens: Tensor,
    context_lens: Tensor, block_table: Tensor, window: int,
) -> Iterator[Part]:  # fmt: skip
    bounds, page_size = cu_seqlens.tolist(), row_cache.shape[1]
    flat = row_cache.view(-1, row_cache.shape[2])
    for i, context in enumerate(context_lens.tolist()):
        start, end = bounds[i], bounds[i + 1]
        if start == end:
            continue
        total = context + end - start
        at = torch.arange(max(0, context - window + 1) if window else 0, total)
        numbers = torch.arange(total // held.rate)
        slots = block_table[i, at // page_size].long() * page_size + at % page_size
        keys = torch.cat([flat[slots], held.flat[held.places(torch.tensor(i), numbers)]])
        block = max(1, _ELEMENTS // (len(keys) * q.shape[1]))
        for first in range(start, end, block):
            tokens = slice(first, min(first + block, end))
            pos = torch.arange(tokens.start, tokens.stop)[:, None] + (context - start)
            near = (at <= pos) & ((pos - at < window) if window else True)
            far = numbers < (pos + 1) // held.rate
            if selected is not None:
                far &= chosen(selected[tokens], len(numbers))
            yield tokens, keys, torch.cat([near, far], 1)


def chosen(selected: Tensor, count: int) -> Tensor:
    """[n, K] numbers, -1 for none -> [n, count] True where a number is among them."""
    found = torch.zeros(len(selected), count + 1, dtype=torch.bool, device=selected.device)
    kept = (selected >= 0) & (selected < count)
    return found.scatter_(1, torch.where(kept, selected, count).long(), True)[:, :count]


def _by_token(
    q: Tensor, row_cache: Tensor, held: Entries, selected: Tensor | None, seq: Tensor, pos: Tensor,
    block_table: Tensor, window: int,
) -> Iterator[Part]:  # fmt: skip
    page_size = row_cache.shape[1]
    flat = row_cache.view(-1, row_cache.shape[2])
    longest = block_table.shape[1] * page_size
    distance = torch.arange(min(window, longest) if window else longest, device=q.device)
    numbers = torch.arange(held.most, device=q.device)[None]
    count = len(distance) + (numbers if selected is None else selected).shape[1]
    block = max(1, _ELEMENTS // (count * (q.shape[1] + q.shape[2])))
    for first in range(0, len(q), block):
        tokens = slice(first, min(first + block, len(q)))
        own, last = seq[tokens, None], pos[tokens, None]
        at = last - distance
        near, at = at >= 0, at.clamp(min=0)
        slots = block_table[own, at // page_size].long() * page_size + at % page_size
        some = numbers if selected is None else selected[tokens]
        far = (some >= 0) & (some < (last + 1) // held.rate)
        where = held.places(own, torch.where(far, some, 0).long())
        keys = torch.cat([flat[slots], held.flat[where]], 1)
        yield tokens, keys, torch.cat([near, far], 1)


def attend(q: Tensor, keys: Tensor, seen: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """Softmax attention [n, H, D] of each token to the keys that it sees, which are values too; 0 where to none."""
    wide = torch.promote_types(q.dtype, torch.float32)
    if keys.dim() == 3:  # what is in a row that is not seen may be anything, a NaN too
        keys = keys.masked_fill(~seen[..., None], 0)
    keys = keys.to(wide)
    scores = (q.to(wide) @ keys.transpose(-1, -2) * scale).masked_fill(~seen[:, None], -torch.inf)
    return shares_of(scores, sinks) @ keys
