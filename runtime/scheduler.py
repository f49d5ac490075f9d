"""Which tokens of which requests the next step computes, and who holds pages and slots."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from .capacity import Capacity
from .config import EngineConfig
from .pages import BlockTables, PagePool
from .request import Request, Span, Status
from .states import SlotPool


class Scheduler:
    """Continuous batching in order of arrival.

    Running requests are served decodes first, then unfinished prompts, each oldest first; what is
    left of the step's tokens admits waiting requests, oldest first. A request is admitted with the
    pages of all its known tokens, and grows a page at a time as it decodes. When no page is left,
    the youngest running request gives up all its own and waits again, to be recomputed: the oldest
    request gets on in every step, so every request ends. `running` and `waiting` are sorted by
    arrival, and every running request is older than every waiting one.
    """

    def __init__(
        self,
        config: EngineConfig,
        capacity: Capacity,
        switch_lengths: Collection[int] = (),
    ) -> None:
        self.config = config
        self.pages = PagePool(capacity.num_pages, capacity.page_size)
        self.slots = SlotPool(capacity.num_slots)
        self.tables = BlockTables(capacity.num_slots, width=1)
        self.running: list[Request] = []
        self.waiting: OrderedDict[int, Request] = OrderedDict()
        self.num_preemptions = 0
        self._switch_lengths = frozenset(switch_lengths)

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
        span.request.num_cached = span.end

    def append(self, request: Request, token: int) -> None:
        """Adds a token that was just chosen."""
        if len(request.tokens) in self._switch_lengths:
            # From this length on every cached row would have been another one.
            request.num_cached = 0
        request.tokens.append(token)

    def restart_running(self) -> None:
        """Makes every running request recompute all its tokens, in the place that it has."""
        for request in self.running:
            request.num_cached = 0

    def remove(self, request: Request) -> None:
        """Takes a request out for good, whatever it was doing, and its pages and slot back."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._release(request)
        elif request.status is Status.WAITING:
            self.waiting.pop(request.arrival, None)
        request.status = Status.FINISHED

    def _plan(self, spans: list[Span], request: Request, budget: int) -> int:
        """Plans what fits of a running request; the number of tokens planned."""
        end = request.next_end(budget, self.config.chunk_size)
        if end > request.num_cached:
            spans.append(Span(request, request.num_cached, end))
        return end - request.num_cached

    def _admit(self, spans: list[Span], budget: int) -> None:
        while self.waiting and self._may_admit(request := next(iter(self.waiting.values()))):
            planned = self._plan(spans, request, budget)
            if planned == 0:
                return
            budget -= planned
            del self.waiting[request.arrival]
            request.slot = self.slots.take()
            request.status = Status.RUNNING
            self.running.append(request)
            self._take_pages(request, self._missing_pages(request))

    def _may_admit(self, request: Request) -> bool:
        if not self.slots.num_free or len(self.running) == self.config.max_requests:
            return False
        missing = self._missing_pages(request)
        # A page to spare for each running request, or the newcomer would soon be preempted.
        spare = len(self.running) if missing else 0
        return missing + spare <= self.pages.num_free

    def _grow_running(self) -> bool:
        """Gives every running request the pages of all its tokens, oldest first.

        When none are left, the youngest loses all of its own. True if that happened.
        """
        before = self.num_preemptions
        for request in list(self.running):
            missing = 0 if request.is_full else self._missing_pages(request)
            while missing > self.pages.num_free and request.status is Status.RUNNING:
                self._preempt(self.running[-1])
            if request.status is Status.RUNNING:
                self._take_pages(request, missing)
        return self.num_preemptions > before

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_cached = 0
        request.status = Status.WAITING
        self.waiting[request.arrival] = request
        self.waiting.move_to_end(request.arrival, last=False)
        self.num_preemptions += 1

    def _missing_pages(self, request: Request) -> int:
        return self.pages.pages_for(len(request.tokens)) - len(request.pages)

    def _take_pages(self, request: Request, count: int) -> None:
        if count > 0:
            longest = request.num_prompt + request.params.max_new_tokens
            last = request.pages[-1] if request.pages else 0
            pages = self.pages.take(count, last, self.pages.pages_for(longest))
            self.tables.extend(request.slot, len(request.pages), pages)
            request.pages.extend(pages)

    def _release(self, request: Request) -> None:
        self.pages.give_back(request.pages)
        self.tables.clear(request.slot)
        self.slots.give_back(request.slot)
        request.pages = []
        request.slot = 0
