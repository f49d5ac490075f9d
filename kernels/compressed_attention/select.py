"""Index scores over entries, and the best of them, in torch.

On the host each sequence scores against a matrix of its own entries. Elsewhere tokens go in blocks against the pages
their sequence may have, without a look at the metadata from the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regraft.kernels.indexed_attention.select import best, places, weigh, wide

from . import pages
from .pages import Entries, store

_ELEMENTS = 1 << 23
"""About the number of elements of an intermediate result; more tokens go block by block."""


def index_entries_torch(
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
    """`index_entries` on any device."""
    held = Entries(cache, block_table, rate, paged.shape[1])
    store(entries, held, cu_seqlens, context_lens)
    selected = torch.full((len(q), topk), -1, dtype=torch.int32, device=q.device)
    seq, pos = places(cu_seqlens, context_lens, len(q))
    for rows, numbers, found in _groups(q, held, cu_seqlens, context_lens, seq):
        # a token of no sequence has position -1, and sees nothing
        seen = numbers < (pos[rows, None] + 1) // rate
        scores = weigh(wide(q[rows]) @ wide(found).transpose(-1, -2), weights[rows], scale, relu)
        selected[rows] = best(scores, seen, topk)
    return selected


def _groups(
    q: Tensor, held: Entries, cu_seqlens: Tensor, context_lens: Tensor, seq: Tensor
) -> list[tuple[slice, Tensor, Tensor]]:
    """(tokens, numbers of windows [L], their entries [L, E] or [n, L, E]) some tokens at a time."""
    groups = []
    heads, width = q.shape[1:]
    if pages.on_host(q):
        bounds = cu_seqlens.tolist()
        for i, context in enumerate(context_lens.tolist()):
            start, end = bounds[i], bounds[i + 1]
            count = (context + end - start) // held.rate
            if start == end or not count:
                continue
            numbers = torch.arange(count)
            found = held.flat[held.places(torch.tensor(i), numbers)]
            block = max(1, _ELEMENTS // (count * heads))
            groups += [
                (slice(first, min(first + block, end)), numbers, found)
                for first in range(start, end, block)
            ]
        return groups
    numbers = torch.arange(held.most, device=q.device)
    block = max(1, _ELEMENTS // (max(1, held.most) * (width + heads)))
    for first in range(0, len(q), block):
        rows = slice(first, min(first + block, len(q)))
        groups.append((rows, numbers, held.flat[held.places(seq[rows, None], numbers)]))
    return groups
