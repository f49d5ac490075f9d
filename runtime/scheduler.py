"""Which tokens of which requests the next step computes, and who holds pages and slots."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection

from .capacity import Capacity
from .checkpoints import Checkpoints
from .config import EngineConfig
from .pages import BlockTables, PagePool
from .prefix_cache import Hit, PrefixCache
from .prefix_plan import cut, is_coming, mark_cuts
from .request import Request, Span, Status
from .states import SlotPool
from .stats import EngineStats

MOST_PREEMPTIONS = 3
"""Times that a request is preempted for older ones that grow: it then waits until there is room for all of them."""


class Scheduler:
    """Continuous batching in order of arrival.

    Running requests are served decodes first, then unfinished prompts, each oldest first; what is
    left of the step's tokens admits waiting requests, oldest first. A request is admitted with the
    pages of all its known tokens, and grows a page at a time as it decodes. When no page is left,
    the youngest running request gives up all its own and waits again, to be recomputed: the oldest
    request gets on in every step, so every request ends. `running` and `waiting` are sorted by
    arrival, and every running request is older than every waiting one.

    With a prefix cache a request is admitted with what is there of its tokens' beginning. It waits
    a step where another is about to compute more of it. States are copied to and from checkpoints:
    `take_restores` before a step, `take_saves` behind it.
    """

    def __init__(
        self,
        config: EngineConfig,
        capacity: Capacity,
        switch_lengths: Collection[int] = (),
        *,
        has_states: bool = False,
    ) -> None:
        self.config = config
        self.pages = PagePool(capacity.num_pages, capacity.page_size)
        self.slots = SlotPool(capacity.num_slots)
        self.tables = BlockTables(capacity.num_slots, width=1)
        self.running: list[Request] = []
        self.waiting: OrderedDict[int, Request] = OrderedDict()
        self.num_preemptions = 0
        self.computed_tokens = 0
        self.prefix = PrefixCache(
            self.pages,
            Checkpoints(capacity.num_slots, capacity.num_checkpoints),
            math.lcm(capacity.page_size or 1, config.chunk_size) if has_states else 0,
            switch_lengths,
            is_on=config.prefix_cache,
        )
        self._switch_lengths = frozenset(switch_lengths)
        self._restores: dict[int, int] = {}
        self._saves: dict[int, int] = {}
        self._queried_tokens = 0
        self._hit_tokens = 0

    def add(self, request: Request) -> None:
        """Queues a request. Arrivals come in order."""
        self.waiting[request.arrival] = request

    def schedule(self) -> list[Span]:
        """The spans of the next step, at most `max_batch_tokens` tokens in all.

        Empty only if no request can get on: none is left, or all wait for their last token to be read. The caches
        have room for every span.
        """
        preempted = self._grow_running()
        budget, chunk_size = self.config.max_batch_tokens, self.config.chunk_size
        spans: list[Span] = []
        active = [r for r in self.running if not (r.is_full or r.is_held)]
        decodes = [request for request in active if request.num_remaining == 1]
        prompts = [request for request in active if request.num_remaining > 1]
        # The oldest unfinished prompt gets on in every step, however many requests decode.
        reserved = prompts[0].quantum(chunk_size) if prompts else 0
        for request in prompts:
            mark_cuts(self.prefix, request, 0, self.waiting.values())
        for request in decodes[: budget - reserved]:
            budget -= self._plan(spans, request, budget)
        for request in prompts:
            budget -= self._plan(spans, request, budget)
        if not preempted:
            self._admit(spans, budget)
        is_idle = not (self.running or self.waiting)
        assert spans or is_idle or len(active) < len(self.running), "no request can get on"
        return spans

    def commit(self, span: Span) -> None:
        """Notes that a span's rows and states are in the caches."""
        request = span.request
        request.num_cached = span.end
        self.computed_tokens += span.num_tokens
        self.prefix.keep(request)
        checkpoint = self.prefix.take_checkpoint(request)
        if checkpoint is not None:
            self._saves[checkpoint.slot] = request.slot

    def take_restores(self) -> dict[int, int]:
        """By slot of a request, the checkpoint's slot that its states have to be copied from before the next step."""
        restores, self._restores = self._restores, {}
        return restores

    def take_saves(self) -> dict[int, int]:
        """By slot of a checkpoint, the request's slot whose states have to be copied there as they are now."""
        saves, self._saves = self._saves, {}
        return saves

    def append(self, request: Request, token: int) -> None:
        """Adds a token that was just chosen."""
        if len(request.tokens) in self._switch_lengths:
            # From this length on every cached row would have been another one.
            self._start_over(request)
        request.tokens.append(token)

    def renew_weights(self, version: int) -> None:
        """Makes every running request recompute all its tokens; nothing that is cached is found any more."""
        self._restores.clear()
        self.prefix.clear(version)
        for request in self.running:
            self._start_over(request)

    def distrust(self) -> None:
        """After a step that failed: nothing that is cached is found any more."""
        self._saves.clear()
        self.prefix.clear()

    def remove(self, request: Request, *, is_sound: bool = True) -> None:
        """Takes a request out for good, whatever it was doing, and its pages and slot back.

        If it is not sound, nobody finds what it computed.
        """
        if is_sound:
            self.prefix.keep(request)
        else:
            self.prefix.forget(request)
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._release(request)
        elif request.status is Status.WAITING:
            self.waiting.pop(request.arrival, None)
        request.status = Status.FINISHED

    def _plan(self, spans: list[Span], request: Request, budget: int) -> int:
        """Plans what fits of a running request; the number of tokens planned."""
        end = cut(request, request.next_end(budget, self.config.chunk_size))
        if end > request.num_cached:
            spans.append(Span(request, request.num_cached, end))
        return end - request.num_cached

    def _admit(self, spans: list[Span], budget: int) -> None:
        while self.waiting and self.slots.num_free and len(self.running) < self.config.max_requests:
            request = next(iter(self.waiting.values()))
            hit = self.prefix.find(request)
            if is_coming(self.prefix, request, hit, self.running):
                return
            self._share(request, hit)
            mark_cuts(self.prefix, request, hit.matched, self.waiting.values())
            planned = self._plan(spans, request, budget) if self._has_room(request) else 0
            if planned == 0:
                self._unshare(request)
                return
            budget -= planned
            del self.waiting[request.arrival]
            request.slot = self.slots.take()
            request.status = Status.RUNNING
            self.running.append(request)
            self._begin(request, hit)
            self._take_pages(request, self._missing_pages(request))

    def _share(self, request: Request, hit: Hit) -> None:
        self.pages.share(hit.pages)
        request.pages = list(hit.pages)
        request.num_cached = hit.length

    def _unshare(self, request: Request) -> None:
        self.pages.give_back(request.pages)
        request.pages = []
        request.num_cached = 0

    def _begin(self, request: Request, hit: Hit) -> None:
        """A request that has a slot begins behind what was found of it."""
        self.tables.extend(request.slot, 0, request.pages)
        self.prefix.use(request, hit)
        if hit.checkpoint is not None:
            self._restores[request.slot] = hit.checkpoint.slot
        if self.prefix.serves(request):
            self._queried_tokens += len(request.tokens)
            self._hit_tokens += hit.length

    def _has_room(self, request: Request) -> bool:
        """Whether there are pages for a newcomer that has those of its hit."""
        missing = self._missing_pages(request)
        if request.num_preemptions >= MOST_PREEMPTIONS:
            # Room for all that it and those before it can come to need: none of them will want its pages.
            growth = sum(map(self._coming_pages, self.running))
            return self._coming_pages(request) + growth <= self.pages.num_free
        # A page to spare for each running request, or the newcomer would soon be preempted.
        spare = len(self.running) if missing else 0
        return missing + spare <= self.pages.num_free

    def _grow_running(self) -> bool:
        """Gives every running request the pages of all its tokens, oldest first.

        When none are left, the youngest loses all of its own. True if that happened.
        """
        before = self.num_preemptions
        for request in list(self.running):
            if request.status is not Status.RUNNING or request.is_full:
                continue
            if request.num_cached == 0 and not request.pages:
                self._begin_again(request)
            missing = self._missing_pages(request)
            while missing > self.pages.num_free and request.status is Status.RUNNING:
                self._preempt(self.running[-1])
            if request.status is Status.RUNNING:
                self._take_pages(request, missing)
        return self.num_preemptions > before

    def _begin_again(self, request: Request) -> None:
        """A running request that had to start over may find its beginning, computed by another."""
        hit = self.prefix.find(request)
        self._share(request, hit)
        self._begin(request, hit)
        mark_cuts(self.prefix, request, hit.matched, ())

    def _start_over(self, request: Request) -> None:
        """Makes a running request recompute all its tokens: in the pages that it has, if they are its alone."""
        self.prefix.let_go(request)
        request.prefix.num_kept = 0
        request.num_cached = 0
        if not self.pages.are_exclusive(request.pages):
            self.tables.clear(request.slot)
            self._unshare(request)

    def _preempt(self, request: Request) -> None:
        self.prefix.keep(request)
        self.running.remove(request)
        self._release(request)
        request.num_preemptions += 1
        request.num_cached = 0
        request.status = Status.WAITING
        self.waiting[request.arrival] = request
        self.waiting.move_to_end(request.arrival, last=False)
        self.num_preemptions += 1

    def _missing_pages(self, request: Request) -> int:
        return self.pages.pages_for(len(request.tokens)) - len(request.pages)

    def _coming_pages(self, request: Request) -> int:
        """Pages that a request can still come to need."""
        return self._most_pages(request) - len(request.pages)

    def _most_pages(self, request: Request) -> int:
        longest = request.num_prompt + request.params.max_new_tokens
        return min(self.pages.pages_for(longest), self.pages.num_pages - 1)

    def _take_pages(self, request: Request, count: int) -> None:
        if count > 0:
            last = request.pages[-1] if request.pages else 0
            pages = self.pages.take(count, last, self._most_pages(request))
            self.tables.extend(request.slot, len(request.pages), pages)
            request.pages.extend(pages)

    def _release(self, request: Request) -> None:
        self.prefix.let_go(request)
        request.prefix.num_kept = 0
        self.pages.give_back(request.pages)
        self.tables.clear(request.slot)
        self.slots.give_back(request.slot)
        request.pages = []
        request.slot = 0

    @property
    def stats(self) -> EngineStats:
        """What was done and what is held."""
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_preemptions=self.num_preemptions,
            computed_tokens=self.computed_tokens,
            free_pages=self.pages.num_free - self.pages.num_kept,
            cached_pages=self.prefix.num_pages,
            prefix_queried_tokens=self._queried_tokens,
            prefix_hit_tokens=self._hit_tokens,
            prefix_evictions=self.pages.num_evictions,
            checkpoints=len(self.prefix.checkpoints),
            checkpoint_evictions=self.prefix.checkpoints.num_evictions,
        )
