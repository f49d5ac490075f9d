"""Which page of one group holds the rows of which block of which text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from .page_groups import Held, PageGroup
from .prefix_keys import Block


class PageIndex:
    """The pages of a group that can be found: once they are full and all their tokens are read.

    A text can be gone on with from where all pages are there that its next token reads: those in its rows' reach.
    `on_evict` is told the name of a block whose page is given to somebody else.
    """

    def __init__(self, group: PageGroup, on_evict: Callable[[bytes], None]) -> None:
        self.group = group
        self._on_evict = on_evict
        self._by_key: dict[bytes, int] = {}
        self._content: dict[int, Block] = {}
        group.pool.on_evict = self._evicted

    def __len__(self) -> int:
        return len(self._content)

    def look_up(self, blocks: Sequence[Block]) -> Found:
        """What is there of a text."""
        pages: list[int] = []
        before: Block | None = None
        for block in blocks:
            page = self._by_key.get(block.key, 0)
            content = self._content.get(page)
            if content is not None and not _is_same(content, block, before):
                page, content = 0, None
            if not page and not self.group.reach.size:
                break
            pages.append(page)
            before = content
        return Found(self.group, pages)

    def keep(self, block: Block, page: int) -> None:
        """From now on the page is found, unless somebody computed the same beside it."""
        if block.key not in self._by_key:
            self._by_key[block.key] = page
            self._content[page] = block
            self.group.pool.keep(page)

    def forget(self, block: Block) -> None:
        """Nobody finds what is known by the name of this block."""
        page = self._by_key.pop(block.key, 0)
        if page:
            del self._content[page]
            self.group.pool.forget(page)

    def clear(self) -> None:
        """Nobody finds anything that is there now."""
        for block in list(self._content.values()):
            self.forget(block)

    def _evicted(self, page: int) -> None:
        key = self._content.pop(page).key
        del self._by_key[key]
        self._on_evict(key)


class Found:
    """The page of each of a text's first blocks, 0 for one that is not there."""

    def __init__(self, group: PageGroup, pages: Sequence[int]) -> None:
        self._group, self._pages = group, pages
        # Behind so many blocks: how many of the last ones are there without a gap.
        longer = accumulate(pages, lambda count, page: count + 1 if page else 0, initial=0)
        self._unbroken = list(longer)

    def __len__(self) -> int:
        return len(self._pages)

    def reaches(self, count: int) -> bool:
        """Whether all is there that the token behind the first `count` blocks reads."""
        return count <= len(self._pages) and self._unbroken[count] >= count - self._first(count)

    def held(self, count: int) -> Held:
        """The pages of that token."""
        first = self._first(count)
        return Held(first, list(self._pages[first:count]))

    def _first(self, count: int) -> int:
        return self._group.first_page(count * self._group.page_size)


def _is_same(content: Block, block: Block, before: Block | None) -> bool:
    """Whether a page's block is this one. `before` is the block found in front of it, if there is one."""
    if content.parent is before and before is not None:
        return content.text == block.text
    return content.is_same(block)
