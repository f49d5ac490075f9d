"""Where each sequence of a packed row has its tokens and its history: metadata read on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .last_row import Metadata, OfLastRow


@dataclass(frozen=True)
class Span:
    """One sequence with new tokens in this step."""

    start: int
    """Row of its first new token; its new tokens end before row `end`."""
    end: int
    context: int
    """Position of its first new token."""
    first: int
    """The first position that any of its queries attends to."""
    slot: int
    """Row of the pool with position `first`, if the pages from there on are consecutive; or -1."""
    pages: Tensor
    """The pages that hold positions `first` and up, int64."""
    skip: int
    """Where in the first of these pages position `first` is."""

    @property
    def length(self) -> int:
        """Number of positions from `first` to its last token's."""
        return self.context + self.end - self.start - self.first


@dataclass(frozen=True)
class Plan:
    """The sequences of a packed row, those with one new token apart from those with more."""

    singles: tuple[Span, ...]
    single_rows: Tensor
    """Rows of the singles' tokens, int64."""
    longer: tuple[Span, ...]
    covered: int
    """Number of rows that belong to a sequence."""


def first_key(pos: int, window: int, chunk: int) -> int:
    """The first position that a query at `pos` attends to."""
    return max(0, pos - window + 1 if window else 0, pos // chunk * chunk if chunk else 0)


def plan(
    cu_seqlens: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    page_size: int,
    window: int,
    chunk: int,
) -> Plan:
    """The plan of a packed row."""
    row = Metadata(cu_seqlens, context_lens, block_table)
    return _plans(row, page_size, window, chunk)


def _make_plan(row: Metadata, page_size: int, window: int, chunk: int) -> Plan:
    bounds = row.cu_seqlens.tolist()
    spans = []
    for seq, context in enumerate(row.context_lens.tolist()):
        start, end = bounds[seq], bounds[seq + 1]
        if start == end:
            continue
        first = first_key(context, window, chunk)
        last_page = (context + end - start - 1) // page_size
        pages = row.block_table[seq, first // page_size : last_page + 1].long()
        skip = first % page_size
        consecutive = bool((pages.diff() == 1).all())
        slot = int(pages[0]) * page_size + skip if consecutive else -1
        spans.append(Span(start, end, context, first, slot, pages, skip))
    singles = tuple(s for s in spans if s.end - s.start == 1)
    return Plan(
        singles,
        torch.tensor([s.start for s in singles], dtype=torch.int64),
        tuple(s for s in spans if s.end - s.start > 1),
        bounds[-1],
    )


_plans = OfLastRow(_make_plan)
