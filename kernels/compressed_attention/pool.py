"""Windows of rows weighed into one, in torch: the rows are gathered from their pages, some windows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from .pages import Ending, ending_windows

_ELEMENTS = 1 << 22
"""About the number of gathered elements at a time."""


def pool_windows_torch(
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
    """`pool_windows` on any device; no look at the metadata but on the host."""
    held = [cache.view(-1, cache.shape[2]) for cache in (value_cache, gate_cache)]
    for rows, new in zip(held, (values, gates)):
        rows.index_copy_(0, slot_mapping, new)
    count, rate, width = len(values), bias.shape[0], values.shape[1] // spans
    ending = ending_windows(cu_seqlens, context_lens, count, rate)
    out = values.new_zeros(count + 1, width)
    block = max(1, _ELEMENTS // (spans * rate * width))
    for first in range(0, len(ending.seq), block):
        some = Ending(*(x[first : first + block] for x in vars(ending).values()))
        slots, within = _tokens(some, block_table, value_cache.shape[1], rate, spans)
        found = weighed(held[0][slots], held[1][slots], within, bias)
        out.index_copy_(0, some.row, found.to(out.dtype))
    return out[:count]


def _tokens(
    ending: Ending, block_table: Tensor, page_size: int, rate: int, spans: int
) -> tuple[Tensor, Tensor]:
    """[n, spans, rate] where the windows' rows are, and whether a window is not before the sequence's start."""
    before = torch.arange(1 - spans, 1, device=ending.seq.device)
    windows = ending.window[:, None] + before
    within = ((windows >= 0) & ending.real[:, None])[..., None].expand(-1, -1, rate)
    tokens = windows[..., None] * rate + torch.arange(rate, device=ending.seq.device)
    tokens = torch.where(within, tokens, 0)
    pages = block_table[ending.seq[:, None, None], tokens // page_size].long()
    return pages * page_size + tokens % page_size, within


def weighed(values: Tensor, gates: Tensor, within: Tensor, bias: Tensor) -> Tensor:
    """Rows [n, spans, rate, spans * D] -> [n, D] in float32, or float64: see `pool_windows`."""
    wide = torch.promote_types(values.dtype, torch.float32)
    spans = values.shape[1]
    hidden = ~within[..., None]

    def parts(rows: Tensor) -> Tensor:
        """Part j of the rows of window j: [n, spans, rate, D]."""
        split = rows.unflatten(-1, (spans, -1))
        return torch.stack([split[:, j, :, j] for j in range(spans)], 1)

    scores = parts(gates.to(wide) + bias.to(wide)).masked_fill(hidden, -torch.inf)
    # where there is no window at all, the softmax is of nothing and its row is never read
    shares = scores.flatten(1, 2).softmax(1)
    return (shares * parts(values.to(wide)).masked_fill(hidden, 0).flatten(1, 2)).sum(1)
