"""What is known of the beginnings of texts: pages of rows and checkpoints of states, found by the tokens before them.

A page can be found once it is full and all its tokens are read. A hit is the longest beginning of a request's tokens,
short of the last one, behind which all pages are there that the next token reads: every one, but for rows of a bounded
reach. A model with recurrent states needs a checkpoint at its end as well, and there are checkpoints only at multiples
of `grid` tokens from a request's own start.

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
from .page_groups import Held, PageGroup
from .prefix_keys import Block, KeyChain, Root, encode, num_shared
from .prefix_pages import Found, PageIndex

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
    """The first `length` tokens need not be computed: what is read of them is in `held`, the pages of each group (none
    at all for no hit), and the states are in `checkpoint`.

    `matched` tokens were seen before, `length` at least.
    """

    length: int = 0
    held: Sequence[Held] = ()
    checkpoint: Checkpoint | None = None
    matched: int = 0


class PrefixCache:
    """Finds and keeps. One that `is_on` not finds nothing and keeps nothing.

    `grid` is 0 for a model without states; else a multiple of the page size, if the model has rows.
    """

    def __init__(
        self,
        groups: Sequence[PageGroup],
        checkpoints: Checkpoints,
        grid: int,
        switch_lengths: Collection[int] = (),
        *,
        is_on: bool,
    ) -> None:
        self.is_on = is_on
        self.grid = grid
        self.block_size = groups[0].page_size or grid
        self.checkpoints = checkpoints
        self._indexes = [
            # Without the beginning of a text, states behind it are of no use.
            PageIndex(group, (lambda key: None) if group.reach.size else checkpoints.drop_key)
            for group in groups
            if group.page_size
        ]
        self._switch_lengths = tuple(switch_lengths)
        self._version = 0
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_pages(self) -> list[int]:
        """Pages of each group that can be found, used or not."""
        return [len(index) for index in self._indexes]

    def serves(self, request: Request) -> bool:
        """Whether the request may be given what others computed, and others what it computes."""
        return self.is_on and request.reuses_prefix and bool(self.block_size)

    def blocks(self, request: Request, num_tokens: int) -> list[Block]:
        """The request's full blocks among its first `num_tokens` tokens, all of them read."""
        length = len(request.tokens)
        passed = sum(length > switch for switch in self._switch_lengths)
        root: Root = (self._version, passed, request.params.cache_salt)
        return request.prefix.chain.upto(root, request.tokens, num_tokens, self.block_size)

    def find(self, request: Request) -> Hit:
        """The longest beginning that need not be computed. Nothing is taken: see `PagePool.share`."""
        if not self.serves(request):
            return Hit()
        size = self.block_size
        blocks = self.blocks(request, len(request.tokens) - 1)
        found = [index.look_up(blocks) for index in self._indexes]
        most = min(map(len, found), default=len(blocks))
        ends = [n for n in range(most, 0, -1) if all(one.reaches(n) for one in found)]
        matched = (ends[0] if ends else 0) * size if found else self._num_seen(blocks)
        if not self.grid:
            return self._hit(found, matched, None, matched)
        for length in (n * size for n in ends if n * size % self.grid == 0):
            key = blocks[length // size - 1].key
            if self.checkpoints.has(key):
                checkpoint = self.checkpoints.find(key, encode(request.tokens[:length]))
                if checkpoint is not None:
                    return self._hit(found, length, checkpoint, max(matched, length))
        return Hit(matched=matched)

    def keep(self, request: Request) -> None:
        """Makes findable what the request has computed, if all tokens of it are read."""
        if not self.serves(request):
            return
        state, size = request.prefix, self.block_size
        num_known = min(request.num_cached, request.num_read)
        count = num_known // size
        if count > state.num_kept:
            blocks = self.blocks(request, num_known)
            for at in range(state.num_kept, count):
                self._keep_block(request, blocks[at], at)
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
        if is_read and self.checkpoints.has(self.blocks(request, length)[-1].key):
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
            for block in KeyChain().upto(root, known, len(known), self.block_size):
                for index in self._indexes:
                    index.forget(block)
                self.checkpoints.drop_key(block.key)

    def clear(self, version: int | None = None) -> None:
        """Nobody finds anything again that is there now; `version` is that of the weights from now on."""
        for index in self._indexes:
            index.clear()
        self.checkpoints.clear()
        self._seen.clear()
        if version is not None:
            self._version = version

    def num_common(self, one: Request, two: Request) -> int:
        """Tokens at the beginning of both, the last of neither, that one could compute for the other."""
        if not (self.serves(one) and self.serves(two)):
            return 0
        shorter = min(len(one.tokens), len(two.tokens)) - 1
        blocks = num_shared(self.blocks(one, shorter), self.blocks(two, shorter))
        return self.floor(blocks * self.block_size)

    def floor(self, length: int) -> int:
        """The largest length that a hit may have and that is not above `length`, a multiple of blocks."""
        return length - length % self.grid if self.grid else length

    def _hit(
        self, found: Sequence[Found], length: int, checkpoint: Checkpoint | None, matched: int
    ) -> Hit:
        held = [one.held(length // self.block_size) for one in found] if length else []
        return Hit(length, held, checkpoint, matched)

    def _num_seen(self, blocks: Sequence[Block]) -> int:
        """Tokens that some text began with before. Only a hint, so it may forget."""
        unseen = (at for at, block in enumerate(blocks) if block.key not in self._seen)
        return next(unseen, len(blocks)) * self.block_size

    def _keep_block(self, request: Request, block: Block, at: int) -> None:
        if not self._indexes:
            self._seen[block.key] = None
            self._seen.move_to_end(block.key)
            if len(self._seen) > _MOST_SEEN:
                self._seen.popitem(last=False)
        for index, held in zip(self._indexes, request.held):
            if at >= held.first:  # else it was out of reach before its last token was read
                index.keep(block, held.pages[at - held.first])

    def _name(self, request: Request, checkpoint: Checkpoint) -> None:
        length, state = checkpoint.length, request.prefix
        key = self.blocks(request, length)[-1].key
        is_named = self.checkpoints.name(checkpoint, key, encode(request.tokens[:length]))
        if is_named and length not in state.cuts:
            state.passing = checkpoint
