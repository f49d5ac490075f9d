"""Where entries are: one for each window of R tokens, in the page of the window's last token.

A page is shared by requests whose texts agree up to its end. What is in it may therefore depend on those tokens alone,
as the entry of a window does that ends there. Windows that end in one page have their entries in it side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def on_host(tensor: Tensor) -> bool:
    """Whether metadata may be looked at: where that waits for nothing."""
    return tensor.device.type == "cpu"


@dataclass(frozen=True)
class Entries:
    """A cache of entries [num_pages, ceil(page_size / rate), D] and whose pages are which."""

    cache: Tensor
    block_table: Tensor
    rate: int
    page_size: int

    @property
    def flat(self) -> Tensor:
        """[num_pages * entries of a page, D]."""
        return self.cache.view(-1, self.cache.shape[2])

    @property
    def most(self) -> int:
        """The most windows that a sequence may have."""
        return self.block_table.shape[1] * self.page_size // self.rate

    def places(self, seq: Tensor, window: Tensor) -> Tensor:
        """Rows of `flat`, int64, where the entries of these windows of these sequences are."""
        last = window * self.rate + self.rate - 1
        page = self.block_table[seq, last // self.page_size].long()
        return page * self.cache.shape[1] + last % self.page_size // self.rate


@dataclass(frozen=True)
class Ending:
    """The windows that become whole in this step, by sequence. Where `real` is False there is none."""

    seq: Tensor
    window: Tensor
    row: Tensor
    """Of the window's last token, in the packed row."""
    real: Tensor


def ending_windows(cu_seqlens: Tensor, context_lens: Tensor, num_tokens: int, rate: int) -> Ending:
    """No more than one in `rate` tokens and one a sequence. On the host the real ones alone."""
    first = context_lens // rate
    ends = ((context_lens + cu_seqlens.diff()) // rate - first).cumsum(0)
    index = torch.arange(num_tokens // rate + len(context_lens), device=cu_seqlens.device)
    seq = torch.searchsorted(ends, index, right=True)
    real = seq < len(context_lens)
    if on_host(cu_seqlens):
        index, seq, real = index[real], seq[real], real[real]
    seq = torch.where(real, seq, 0)
    # the windows that end in earlier sequences come before, so this counts those of its own from its last back
    window = (context_lens + cu_seqlens.diff())[seq] // rate - ends[seq] + index
    window = torch.where(real, window, 0)
    row = cu_seqlens[seq] + window * rate + rate - 1 - context_lens[seq]
    return Ending(seq, window, torch.where(real, row, num_tokens), real)


def store(entries: Tensor, into: Entries, cu_seqlens: Tensor, context_lens: Tensor) -> None:
    """Write the entries [N, D] of windows that become whole, from the rows of their last tokens."""
    ending = ending_windows(cu_seqlens, context_lens, len(entries), into.rate)
    # what is no window goes where page 0, which no request owns, has its first entry
    places = torch.where(ending.real, into.places(ending.seq, ending.window), 0)
    rows = torch.where(ending.real, ending.row, 0)
    into.flat.index_copy_(0, places, entries[rows])
