"""Pages by reach: rows that are read equally far back share pages, and give up what nobody will read any more.

A request holds, of each group, a run of its pages: all from its start on where rows are read back to there, else those
from the first row on that its next token reads. What left that reach goes back to the pool while the request runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from regraft.rewriter.declare import Reach

from .pages import BlockTables, PagePool
from .stats import PoolStats


@dataclass(slots=True)
class Held:
    """Pages that a request has of one group: those of its pages number `first` and on."""

    first: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The number of the first page behind them."""
        return self.first + len(self.pages)


def most_pages(reach: Reach, num_new: int, page_size: int) -> int:
    """The most pages that rows of a bounded reach lie in which a step of `num_new` tokens reads and writes."""
    return -(-(reach.size - 1 + num_new - 1) // page_size) + 1


class PageGroup:
    """The pages of rows of one reach, and which of them are whose. `held` is what a request has of this group."""

    def __init__(self, reach: Reach, num_pages: int, page_size: int, num_slots: int) -> None:
        self.reach = reach
        self.pool = PagePool(num_pages, page_size)
        self.tables = BlockTables(num_slots, width=1)

    @property
    def page_size(self) -> int:
        return self.pool.page_size

    def first_page(self, position: int) -> int:
        """The first page that the token at `position`, or any behind it, reads."""
        return self.reach.first(position) // self.page_size if self.page_size else 0

    def missing(self, held: Held, num_tokens: int) -> int:
        """Pages that a request lacks for its first `num_tokens` tokens."""
        return max(0, self.pool.pages_for(num_tokens) - held.end)

    def room(self, held: Held, num_cached: int, spare: int = 0) -> int:
        """How many tokens behind its first `num_cached` a request finds room for, with `spare` pages left free."""
        if not self.page_size:
            return sys.maxsize
        pages = held.end + max(0, self.pool.num_free - spare)
        return max(0, pages * self.page_size - num_cached)

    def most(self, num_tokens: int, num_new: int) -> int:
        """The most pages that a request of `num_tokens` tokens has at once, at most `num_new` of them new in a step."""
        most = min(self.pool.pages_for(num_tokens), self.pool.num_pages - 1)
        if not (self.reach.size and self.page_size):
            return most
        return min(most, most_pages(self.reach, num_new, self.page_size))

    def share(self, held: Held) -> None:
        """One more request begins with these pages."""
        self.pool.share(held.pages)

    def begin(self, slot: int, held: Held) -> None:
        """A request with these pages gets a slot."""
        self.tables.extend(slot, held.first, held.pages)

    def take(self, slot: int, held: Held, count: int, room: int) -> None:
        """Gives a request `count` pages more; it may come to have `room` of them."""
        last = held.pages[-1] if held.pages else 0
        pages = self.pool.take(count, last, room)
        self.tables.extend(slot, held.end, pages)
        held.pages.extend(pages)

    def leave(self, slot: int, held: Held, num_cached: int) -> None:
        """Takes back the pages that no token behind the first `num_cached` reads."""
        first = self.first_page(num_cached)
        if first > held.first:
            gone = held.pages[: first - held.first]
            self.pool.give_back(gone)
            self.tables.array[slot, held.first : first] = 0
            held.first, held.pages = first, held.pages[len(gone) :]

    def give_back(self, held: Held) -> None:
        """Takes back all pages of a request."""
        self.pool.give_back(held.pages)
        held.first, held.pages = 0, []

    def stats(self, num_cached: int, max_batch_tokens: int) -> PoolStats:
        """What is held now; `num_cached` pages can be found."""
        pool, bounded = self.pool, bool(self.reach.size)
        most = self.most(sys.maxsize, max_batch_tokens) if bounded else None
        free = pool.num_free - pool.num_kept
        return PoolStats(str(self.reach), pool.num_pages - 1, free, num_cached, most)

    def is_its_alone(self, held: Held) -> bool:
        """Whether a request has all its pages from its start on, and nobody else uses or may ask for one."""
        return held.first == 0 and self.pool.are_exclusive(held.pages)


def tables_of(groups: Sequence[PageGroup]) -> dict[Reach, BlockTables]:
    """The block tables by reach."""
    return {group.reach: group.tables for group in groups}
