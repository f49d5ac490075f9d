"""Pages: fixed runs of cache rows, handed to requests and taken back; and who owns which."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class PagePool:
    """Numbers of free pages. Page 0 is scratch: padding writes there and no request owns it.

    A model that declares no rows needs no pages: with `page_size` 0 no request ever asks for one.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = np.ones(num_pages, dtype=np.bool_)
        self._free[0] = False
        self._num_free = num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that a request can still be given."""
        return self._num_free

    @property
    def free(self) -> list[int]:
        """The numbers of the free pages, ascending."""
        return [int(page) for page in np.flatnonzero(self._free)]

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold the rows of `num_tokens` tokens."""
        return -(-num_tokens // self.page_size) if self.page_size else 0

    def take(self, count: int, after: int = 0) -> list[int]:
        """Hands out `count` pages, those behind page `after` if they are free. Ask `num_free` first.

        Consecutive pages are one view of the pool: on the CPU, attention reads them in place.
        """
        assert count <= self._num_free, f"{count} pages wanted, {self._num_free} free"
        if count == 0:
            return []
        behind = self._free[after + 1 : after + 1 + count]
        if after and len(behind) == count and behind.all():
            taken = list(range(after + 1, after + 1 + count))
        else:
            taken = self._spread(count)
        self._free[taken] = False
        self._num_free -= count
        return taken

    def _spread(self, count: int) -> list[int]:
        """Pages from the middle of the longest free run, so that both neighbours can grow in place."""
        edges = np.diff(self._free.astype(np.int8), append=np.int8(0))  # page 0 is never free
        starts, ends = np.flatnonzero(edges == 1) + 1, np.flatnonzero(edges == -1) + 1
        lengths = ends - starts
        longest = int(lengths.argmax())
        start, length = int(starts[longest]), int(lengths[longest])
        if length < count:
            return [int(page) for page in np.flatnonzero(self._free)[:count]]
        if start > 1 and length > 2 * count:
            start += length // 2
        return list(range(start, start + count))

    def give_back(self, pages: Sequence[int]) -> None:
        """Takes pages back. What they hold stays, and is never read before it is rewritten."""
        assert not self._free[list(pages)].any(), "a page was given back twice"
        self._free[list(pages)] = True
        self._num_free += len(pages)


class BlockTables:
    """The pages of each running request, as one array by slot: row `s` belongs to slot `s`.

    Row 0, of the scratch slot, stays zero: every position of a padding token lies in page 0.
    Entries beyond a request's pages are 0.
    """

    def __init__(self, num_slots: int, width: int) -> None:
        self.array: npt.NDArray[np.int32] = np.zeros((num_slots, max(width, 1)), dtype=np.int32)

    def extend(self, slot: int, num_pages: int, new_pages: Sequence[int]) -> None:
        """Appends `new_pages` after the `num_pages` that the slot's request has already."""
        end = num_pages + len(new_pages)
        self.widen(end)
        self.array[slot, num_pages:end] = new_pages

    def clear(self, slot: int) -> None:
        """Forgets the pages of a slot whose request has left."""
        self.array[slot] = 0

    def widen(self, width: int) -> None:
        """Makes room for `width` pages per request."""
        have = self.array.shape[1]
        if width > have:
            grown = max(width, 2 * have)
            self.array = np.pad(self.array, ((0, 0), (0, grown - have)))
