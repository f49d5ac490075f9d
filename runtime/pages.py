"""Pages: fixed runs of cache rows, handed to requests and taken back; and who owns which."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt


class PagePool:
    """Who uses which page. Page 0 is scratch: padding writes there and no request owns it.

    A page is free, or used by one request or several, or kept: nobody uses it, but what it holds may be asked for
    again. Kept pages are handed out when free ones run out, the least recently used first; `on_evict` is told of each.

    A model that declares no rows needs no pages: with `page_size` 0 no request ever asks for one.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_evictions = 0
        self.on_evict: Callable[[int], None] | None = None
        self._free = np.ones(num_pages, dtype=np.bool_)
        self._free[0] = False
        self._num_free = num_pages - 1
        self._users = np.zeros(num_pages, dtype=np.int32)
        self._wanted = np.zeros(num_pages, dtype=np.bool_)
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._next = 1

    @property
    def num_free(self) -> int:
        """Pages that a request can still be given."""
        return self._num_free + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Pages that nobody uses and whose content may be asked for."""
        return len(self._kept)

    @property
    def free(self) -> list[int]:
        """The numbers of the free pages, ascending."""
        return [int(page) for page in np.flatnonzero(self._free)]

    @property
    def kept(self) -> list[int]:
        """The numbers of the kept pages, the least recently used first."""
        return list(self._kept)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold the rows of `num_tokens` tokens."""
        return -(-num_tokens // self.page_size) if self.page_size else 0

    def take(self, count: int, after: int = 0, room: int = 0) -> list[int]:
        """Hands out `count` pages, at least one, those behind page `after` if they are free. Ask `num_free` first.

        Consecutive pages are one view of the pool: on the CPU, attention reads them in place. A new request says how
        much `room` it may come to need, and the next one starts behind that. Placed one after the other, requests touch
        little memory that was not touched before.
        """
        assert 0 < count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        while self._num_free < count:
            self._evict()
        start = after + 1
        if not after or not self._are_free(start, count):
            start = self._place(count, room)
        if start:
            taken = list(range(start, start + count))
        else:
            taken = [int(page) for page in np.flatnonzero(self._free)[:count]]
        self._free[taken] = False
        self._num_free -= count
        self._users[taken] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more request uses these pages, which are used or kept."""
        self._users[list(pages)] += 1
        for page in pages:
            self._kept.pop(page, None)

    def give_back(self, pages: Sequence[int]) -> None:
        """One request less uses these pages. What they hold stays, and is never read unless asked for or rewritten."""
        numbers = np.array(pages, dtype=np.int64)
        assert (self._users[numbers] > 0).all(), "a page was given back twice"
        self._users[numbers] -= 1
        unused = numbers[self._users[numbers] == 0]
        wanted = self._wanted[unused]
        # A text's end is of no use without its beginning, so it goes first.
        self._kept.update((int(page), None) for page in unused[wanted][::-1])
        self._set_free(unused[~wanted])

    def keep(self, page: int) -> None:
        """When nobody uses this page any more it is to be kept."""
        self._wanted[page] = True

    def forget(self, page: int) -> None:
        """What this page holds will not be asked for."""
        self._wanted[page] = False
        if page in self._kept:
            del self._kept[page]
            self._set_free([page])

    def are_exclusive(self, pages: Sequence[int]) -> bool:
        """Whether one request alone uses these pages, and nobody will ask for what they hold."""
        numbers = list(pages)
        return bool((self._users[numbers] == 1).all() and not self._wanted[numbers].any())

    def _evict(self) -> None:
        page = next(iter(self._kept))
        self.forget(page)
        self.num_evictions += 1
        if self.on_evict is not None:
            self.on_evict(page)

    def _set_free(self, pages: Sequence[int] | npt.NDArray[np.int64]) -> None:
        self._free[pages] = True
        self._num_free += len(pages)

    def _are_free(self, start: int, count: int) -> bool:
        return start + count <= self.num_pages and bool(self._free[start : start + count].all())

    def _place(self, count: int, room: int) -> int:
        """Where a new run of pages starts; 0 if there is none as long as that behind the last or at the beginning."""
        if self._num_free == self.num_pages - 1:
            self._next = 1
        for start in (self._next, 1):
            if self._are_free(start, count):
                self._next = start + max(room, count)
                return start
        return 0


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
