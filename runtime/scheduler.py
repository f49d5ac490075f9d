"""Which tokens of which requests the next step computes, and who holds pages and slots."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence

from .capacity import Capacity
from .checkpoints import Checkpoints
from .config import EngineConfig
from .page_groups import Held, PageGroup, tables_of
from .prefix_cache import Hit, PrefixCache
from .prefix_plan import cut, is_coming, mark_cuts
from .request import Request, Span, Status
from .states import SlotPool
from .stats import EngineStats

MOST_PREEMPTIONS = 3
"""Times that a request is preempted for older ones that grow: it then waits until there is room for all of them."""

TURN = 128
"""Tokens of one prompt in a step before others have theirs, of a model with states: a recurrence takes a sequence's
tokens one after another, but sequences side by side, so that one long one would leave a GPU idle.
"""


class Scheduler:
    """Continuous batching in order of arrival.

    Running requests are served decodes first, then unfinished prompts, each oldest first; what is
    left of the step's tokens admits waiting requests, oldest first. With states, prompts take turns
    (TURN), and what is left then goes to those that have more, oldest first. A request is admitted with the
    pages of all its known tokens, and grows a page at a time as it decodes. When no page is left,
    the youngest running request gives up all its own and waits again, to be recomputed: the oldest
    request gets on in every step, so every request ends. `running` and `waiting` are sorted by
    arrival, and every running request is older than every waiting one.

    Of rows with a bounded reach a request has pages only for what a step reads and writes: it takes
    them when the step is planned, and a prompt's step is shortened to what there is. Where that is
    nothing it waits for what others leave behind, unless it is the oldest.

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
        self.page_size = capacity.page_size
        self.groups = [
            PageGroup(reach, pages, capacity.page_size, capacity.num_slots)
            for reach, pages in capacity.pages.items()
        ]
        self.tables = tables_of(self.groups)
        self.slots = SlotPool(capacity.num_slots)
        self.running: list[Request] = []
        self.waiting: OrderedDict[int, Request] = OrderedDict()
        self.num_preemptions = 0
        self.computed_tokens = 0
        self.prefix = PrefixCache(
            self.groups,
            Checkpoints(capacity.num_slots, capacity.num_checkpoints),
            math.lcm(capacity.page_size or 1, config.chunk_size) if has_states else 0,
            switch_lengths,
            is_on=config.prefix_cache,
        )
        self._turn = max(TURN, config.chunk_size) if has_states else config.max_batch_tokens
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
        before = self.num_preemptions
        for request in [*decodes[: budget - reserved], *prompts]:
            if request.status is not Status.RUNNING:
                continue
            if request in (active[0], *prompts[:1]):
                self._make_room(spans, request, budget)
            budget -= self._plan(
                spans, request, self._next_end(request, self._own_turn(request, budget))
            )
        if not preempted and self.num_preemptions == before:
            budget = self._admit(spans, budget)
        self._extend(spans, budget)
        is_idle = not (self.running or self.waiting)
        assert spans or is_idle or len(active) < len(self.running), "no request can get on"
        return spans

    def commit(self, span: Span) -> None:
        """Notes that a span's rows and states are in the caches."""
        request = span.request
        request.num_cached = span.end
        self.computed_tokens += span.num_tokens
        self.prefix.keep(request)
        for group, held in zip(self.groups, request.held):
            group.leave(request.slot, held, request.num_cached)
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

    def _own_turn(self, request: Request, budget: int) -> int:
        """What a request may have of a step's tokens while others have none: enough to get on, whatever it needs."""
        return min(budget, max(self._turn, request.quantum(self.config.chunk_size)))

    def _extend(self, spans: Sequence[Span], budget: int) -> None:
        """Hands what is left of a step's tokens to its unfinished prompts, in further turns, oldest first."""
        growing = [span for span in spans if span.end < len(span.request.tokens)]
        before = -1
        while budget != before:
            before = budget
            for span in growing:
                budget -= self._lengthen(span, min(budget, self._turn))

    def _lengthen(self, span: Span, budget: int) -> int:
        """Plans up to `budget` tokens more of a planned request; their number."""
        request, before = span.request, span.end
        end = self._next_end(request, span.num_tokens + budget, len(self.running))
        if end > before:
            self._take_reached(request, end)
            span.end = end
        return span.end - before

    def _next_end(self, request: Request, budget: int, spare: int = 0) -> int:
        """Where a step over a request's tokens ends, within a budget and the pages that are free but for `spare`."""
        rooms = [
            group.room(held, request.num_cached, spare)
            for group, held in zip(self.groups, request.held)
            if group.reach.size
        ]
        return cut(request, request.next_end(min([budget, *rooms]), self.config.chunk_size))

    def _plan(self, spans: list[Span], request: Request, end: int) -> int:
        """Plans the tokens of a running request up to `end`, and gives it their pages; the number of tokens planned."""
        if end <= request.num_cached:
            return 0
        self._take_reached(request, end)
        spans.append(Span(request, request.num_cached, end))
        return end - request.num_cached

    def _take_reached(self, request: Request, end: int) -> None:
        """Gives a request the pages of rows with a bounded reach for its tokens up to `end`."""
        for group, held in zip(self.groups, request.held):
            if group.reach.size:
                self._take_pages(request, group, held, group.missing(held, end))

    def _make_room(self, spans: list[Span], request: Request, budget: int) -> None:
        """Preempts the youngest, planned or not, until a request that would get on within the budget has the pages."""
        if request.next_end(budget, self.config.chunk_size) <= request.num_cached:
            return
        while self._next_end(request, budget) <= request.num_cached:
            if self.running[-1] is request:
                return
            self._preempt(self.running[-1])
            spans[:] = [span for span in spans if span.request.status is Status.RUNNING]

    def _admit(self, spans: list[Span], budget: int) -> int:
        """Lets waiting requests begin; what is left of the budget."""
        while self.waiting and self.slots.num_free and len(self.running) < self.config.max_requests:
            request = next(iter(self.waiting.values()))
            hit = self.prefix.find(request)
            if is_coming(self.prefix, request, hit, self.running):
                break
            self._share(request, hit)
            mark_cuts(self.prefix, request, hit.matched, self.waiting.values())
            has_room = self._has_room(request)
            turn = self._own_turn(request, budget)
            end = self._next_end(request, turn, len(self.running)) if has_room else 0
            if end <= request.num_cached:
                self._unshare(request)
                break
            del self.waiting[request.arrival]
            request.slot = self.slots.take()
            request.status = Status.RUNNING
            self.running.append(request)
            self._begin(request, hit)
            self._grow(request)
            budget -= self._plan(spans, request, end)
        return budget

    def _share(self, request: Request, hit: Hit) -> None:
        request.held = list(hit.held) or [Held() for _ in self.groups]
        for group, held in zip(self.groups, request.held):
            group.share(held)
        request.num_cached = hit.length

    def _unshare(self, request: Request) -> None:
        for group, held in zip(self.groups, request.held):
            group.give_back(held)
        request.num_cached = 0

    def _begin(self, request: Request, hit: Hit) -> None:
        """A request that has a slot begins behind what was found of it."""
        for group, held in zip(self.groups, request.held):
            group.begin(request.slot, held)
        self.prefix.use(request, hit)
        if hit.checkpoint is not None:
            self._restores[request.slot] = hit.checkpoint.slot
        if self.prefix.serves(request):
            self._queried_tokens += len(request.tokens)
            self._hit_tokens += hit.length

    def _has_room(self, request: Request) -> bool:
        """Whether there are pages for a newcomer that has those of its hit."""
        if request.num_preemptions >= MOST_PREEMPTIONS:
            # Room for all that it and those before it can come to need: none of them will want its pages.
            everybody = [*self.running, request]
            return all(
                sum(self._coming_pages(one, at) for one in everybody) <= group.pool.num_free
                for at, group in enumerate(self.groups)
            )
        for group, held in zip(self.groups, request.held):
            missing = 0 if group.reach.size else group.missing(held, len(request.tokens))
            # A page to spare for each running request, or the newcomer would soon be preempted.
            if missing and missing + len(self.running) > group.pool.num_free:
                return False
        return True

    def _grow_running(self) -> bool:
        """Gives every running request the pages of all its tokens, oldest first.

        When none are left, the youngest loses all of its own. True if that happened.
        """
        before = self.num_preemptions
        for request in list(self.running):
            if request.status is not Status.RUNNING or request.is_full:
                continue
            if request.num_cached == 0 and not any(held.pages for held in request.held):
                self._begin_again(request)
            while request.status is Status.RUNNING and not self._grow(request):
                self._preempt(self.running[-1])
        return self.num_preemptions > before

    def _grow(self, request: Request) -> bool:
        """Gives a running request the pages of all its tokens, where rows are read back to its start; False for want of
        pages.
        """
        for group, held in zip(self.groups, request.held):
            missing = 0 if group.reach.size else group.missing(held, len(request.tokens))
            if missing > group.pool.num_free:
                return False
            self._take_pages(request, group, held, missing)
        return True

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
        if not all(group.is_its_alone(held) for group, held in zip(self.groups, request.held)):
            self._clear_tables(request)
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

    def _coming_pages(self, request: Request, at: int) -> int:
        """Pages of a group that a request can still come to need, to get on however slowly."""
        num_new = request.largest_quantum(self.config.chunk_size)
        most = self._most_pages(request, self.groups[at], num_new)
        return max(0, most - len(request.held[at].pages))

    def _most_pages(self, request: Request, group: PageGroup, num_new: int) -> int:
        return group.most(request.most_cached, num_new)

    def _take_pages(self, request: Request, group: PageGroup, held: Held, count: int) -> None:
        if count > 0:  # most decode steps need no page
            room = self._most_pages(request, group, self.config.max_batch_tokens)
            group.take(request.slot, held, count, room)

    def _clear_tables(self, request: Request) -> None:
        for tables in self.tables.values():
            tables.clear(request.slot)

    def _release(self, request: Request) -> None:
        self.prefix.let_go(request)
        request.prefix.num_kept = 0
        for group, held in zip(self.groups, request.held):
            group.give_back(held)
        self._clear_tables(request)
        self.slots.give_back(request.slot)
        request.slot = 0

    @property
    def stats(self) -> EngineStats:
        """What was done and what is held."""
        pools = [group.pool for group in self.groups]
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_preemptions=self.num_preemptions,
            computed_tokens=self.computed_tokens,
            free_pages=sum(pool.num_free - pool.num_kept for pool in pools),
            cached_pages=sum(self.prefix.num_pages),
            prefix_queried_tokens=self._queried_tokens,
            prefix_hit_tokens=self._hit_tokens,
            prefix_evictions=sum(pool.num_evictions for pool in pools),
            checkpoints=len(self.prefix.checkpoints),
            checkpoint_evictions=self.prefix.checkpoints.num_evictions,
            pools=tuple(
                group.stats(cached, self.config.max_batch_tokens)
                for group, cached in zip(self.groups, self.prefix.num_pages)
            ),
        )
