"""What is known of the beginnings of texts: pages of rows and checkpoints of states, found by the tokens before them.

A page can be found once it is full and all its tokens are read. A hit is the longest beginning of a request's tokens,
short of the last one, whose pages are all there; a model with recurrent states needs a checkpoint at its end as well,
and there are checkpoints only at multiples of `grid` tokens from a request's own start.

What a row depends on beside the tokens before it is part of its name: the version of the weights, the number of
`switch_lengths` that the request has passed (its rotary embedding differs beyond each of them), and its `cache_salt`.
The model is not: a cache is one engine's, and so one model's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .checkpoints import Checkpoint, Checkpoints
from .pages import PagePool
from .prefix_keys import KeyChain, Root, encode, num_shared

if TYPE_CHECKING:
    from .request import Request

_MOST_SEEN = 1 << 14
"""Names that a model without rows remembers, to know where texts part."""


@dataclass(slots=True)
class PrefixState:
    """What the prefix cache notes on one request."""

    chain: KeyChain = field(default_factory=KeyChain)
    num_kept: int = 0
    """Its first blocks that can be found already."""
    cuts: set[int] = field(default_factory=set)
    """Where a step over its tokens has to end for the sake of a checkpoint (tokens from its start)."""
    unnamed: Checkpoint | None = None
    """One with a token that is not read yet."""
    passing: Checkpoint | None = None
    """Its last one that is at no cut: the next takes its place."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The first `length` tokens need not be computed: their rows are in `pages`, the states in `checkpoint`.

    `matched` tokens were seen before, `length` at least.
    """

    length: int = 0
    pages: Sequence[int] = ()
    checkpoint: Checkpoint | None = None
    matched: int = 0


@dataclass(slots=True)
class _Page:
    key: bytes
    parent: bytes
    text: bytes


class PrefixCache:
    """Finds and keeps. One that `is_on` not finds nothing and keeps nothing.

    `grid` is 0 for a model without states; else a multiple of the page size, if the model has rows.
    """

    def __init__(
        self,
        pages: PagePool,
        checkpoints: Checkpoints,
        grid: int,
        switch_lengths: Collection[int] = (),
        *,
        is_on: bool,
    ) -> None:
        self.is_on = is_on
        self.grid = grid
        self.block_size = pages.page_size or grid
        self.checkpoints = checkpoints
        self._pages = pages
        pages.on_evict = self._evicted
        self._switch_lengths = tuple(switch_lengths)
        self._version = 0
        self._by_key: dict[bytes, int] = {}
        self._content: dict[int, _Page] = {}
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_pages(self) -> int:
        """Pages that can be found, used or not."""
        return len(self._content)

    def serves(self, request: Request) -> bool:
        """Whether the request may be given what others computed, and others what it computes."""
        return self.is_on and request.reuses_prefix and bool(self.block_size)

    def keys(self, request: Request, num_tokens: int) -> list[bytes]:
        """The names of the request's full blocks among its first `num_tokens` tokens, all of them read."""
        length = len(request.tokens)
        passed = sum(length > switch for switch in self._switch_lengths)
        root: Root = (self._version, passed, request.params.cache_salt)
        return request.prefix.chain.upto(root, request.tokens, num_tokens, self.block_size)

    def find(self, request: Request) -> Hit:
        """The longest beginning that need not be computed. Nothing is taken: see `PagePool.share`."""
        if not self.serves(request):
            return Hit()
        keys = self.keys(request, len(request.tokens) - 1)
        if not self._pages.page_size:
            return self._with_states(request, keys, (), self._num_seen(keys))
        pages = self._matching_pages(request, keys)
        matched = len(pages) * self.block_size
        if self.grid:
            return self._with_states(request, keys, pages, matched)
        return Hit(matched, pages, None, matched)

    def keep(self, request: Request) -> None:
        """Makes findable what the request has computed, if all tokens of it are read."""
        if not self.serves(request):
            return
        state, size = request.prefix, self.block_size
        num_known = min(request.num_cached, request.num_read)
        count = num_known // size
        if count > state.num_kept:
            keys = self.keys(request, num_known)
            for at in range(state.num_kept, count):
                self._keep_block(request, keys, at)
            state.num_kept = count
        if state.unnamed is not None and state.unnamed.length <= request.num_read:
            self._name(request, state.unnamed)
            state.unnamed = None

    def take_checkpoint(self, request: Request) -> Checkpoint | None:
        """A checkpoint to copy the request's states to, as they are after the step just made; None if none is due."""
        length, state = request.num_cached, request.prefix
        if not (self.grid and self.serves(request)) or length == 0 or length % self.grid:
            return None
        is_read = length <= request.num_read
        if is_read and self.checkpoints.has(self.keys(request, length)[-1]):
            return None
        self.let_go(request)
        if state.passing is not None and not state.passing.num_hits:
            self.checkpoints.drop(state.passing)
        state.passing = None
        made = self.checkpoints.take(length)
        if made is not None and is_read:
            self._name(request, made)
        else:
            state.unnamed = made
        return made

    def use(self, request: Request, hit: Hit) -> None:
        """Notes that the request begins with what was found."""
        request.prefix.num_kept = hit.length // self.block_size if hit.length else 0
        if hit.checkpoint is not None:
            hit.checkpoint.num_hits += 1
            self.checkpoints.touch(hit.checkpoint)

    def let_go(self, request: Request) -> None:
        """The request leaves, or starts over: a checkpoint that has no name yet is lost."""
        unnamed, request.prefix.unnamed = request.prefix.unnamed, None
        if unnamed is not None:
            self.checkpoints.give_back(unnamed)

    def forget(self, request: Request) -> None:
        """What was computed of this request's tokens is not to be trusted: nobody finds any of it again."""
        if not self.serves(request):
            return
        known = request.tokens[: request.num_read]
        for passed in range(len(self._switch_lengths) + 1):
            root = (self._version, passed, request.params.cache_salt)
            for key in KeyChain().upto(root, known, len(known), self.block_size):
                if key in self._by_key:
                    self._forget_page(self._by_key[key])
                self.checkpoints.drop_key(key)

    def clear(self, version: int | None = None) -> None:
        """Nobody finds anything again that is there now; `version` is that of the weights from now on."""
        for page in list(self._content):
            self._forget_page(page)
        self.checkpoints.clear()
        self._seen.clear()
        if version is not None:
            self._version = version

    def _evicted(self, page: int) -> None:
        """Takes note that a page now holds something else; states behind it are of no use without it."""
        content = self._content.pop(page)
        del self._by_key[content.key]
        self.checkpoints.drop_key(content.key)

    def num_common(self, one: Request, two: Request) -> int:
        """Tokens at the beginning of both, the last of neither, that one could compute for the other."""
        if not (self.serves(one) and self.serves(two)):
            return 0
        shorter = min(len(one.tokens), len(two.tokens)) - 1
        blocks = num_shared(self.keys(one, shorter), self.keys(two, shorter))
        return self.floor(blocks * self.block_size)

    def floor(self, length: int) -> int:
        """The largest length that a hit may have and that is not above `length`, a multiple of blocks."""
        return length - length % self.grid if self.grid else length

    def _matching_pages(self, request: Request, keys: Sequence[bytes]) -> list[int]:
        pages: list[int] = []
        parent, size = b"", self.block_size
        for at, key in enumerate(keys):
            page = self._by_key.get(key)
            if page is None:
                break
            content = self._content[page]
            text = encode(request.tokens[at * size : (at + 1) * size])
            if content.parent != parent or content.text != text:
                break
            pages.append(page)
            parent = key
        return pages

    def _num_seen(self, keys: Sequence[bytes]) -> int:
        """Tokens that some text began with before. Only a hint, so it may forget."""
        count = next((at for at, key in enumerate(keys) if key not in self._seen), len(keys))
        return count * self.block_size

    def _with_states(
        self, request: Request, keys: Sequence[bytes], pages: Sequence[int], matched: int
    ) -> Hit:
        """The longest beginning behind which there is a checkpoint, and whose pages are there if there are any."""
        size = self.block_size
        longest = matched if self._pages.page_size else len(keys) * size
        for length in range(self.floor(longest), 0, -self.grid):
            key = keys[length // size - 1]
            if self.checkpoints.has(key):
                found = self.checkpoints.find(key, encode(request.tokens[:length]))
                if found is not None:
                    return Hit(length, pages[: length // size], found, max(matched, length))
        return Hit(matched=matched)

    def _keep_block(self, request: Request, keys: Sequence[bytes], at: int) -> None:
        key, size = keys[at], self.block_size
        if not self._pages.page_size:
            self._seen[key] = None
            self._seen.move_to_end(key)
            if len(self._seen) > _MOST_SEEN:
                self._seen.popitem(last=False)
        elif key not in self._by_key:  # else somebody computed the same beside it
            text = encode(request.tokens[at * size : (at + 1) * size])
            page = request.pages[at]
            self._by_key[key] = page
            self._content[page] = _Page(key, keys[at - 1] if at else b"", text)
            self._pages.keep(page)

    def _name(self, request: Request, checkpoint: Checkpoint) -> None:
        length, state = checkpoint.length, request.prefix
        key = self.keys(request, length)[-1]
        is_named = self.checkpoints.name(checkpoint, key, encode(request.tokens[:length]))
        if is_named and length not in state.cuts:
            state.passing = checkpoint

    def _forget_page(self, page: int) -> None:
        content = self._content.pop(page, None)
        if content is not None:
            del self._by_key[content.key]
            self._pages.forget(page)
