"""Results on their way from the step thread to the consumers that they belong to."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from transformers.generation.continuous_batching.requests import GenerationOutput

from .background import Background
from .drop_in import Stopwatch, as_generation_output, so_far
from .errors import RequestError
from .output import StreamToken
from .request import Request


class _Handler(NamedTuple):
    callback: Callable[[GenerationOutput], None]
    event_loop: asyncio.AbstractEventLoop


class Box:
    """The results of one request that nobody has taken yet."""

    def __init__(self, request: Request, *, streaming: bool, timed: bool) -> None:
        self.request = request
        self.streaming = streaming
        self.timed = timed
        self.results: deque[GenerationOutput] = deque()
        self.num_claims = 0
        self.watch: Stopwatch | None = None

    def result(self, token: StreamToken) -> GenerationOutput | None:
        """What a token of the request gives: None before its end, unless it streams."""
        assert self.watch is not None, "nobody listens yet"
        if token.output is not None:
            return as_generation_output(self.request, self.watch, record_timestamps=self.timed)
        if self.streaming:
            return so_far(self.request, self.watch, record_timestamps=self.timed)
        return None


class Mailbox:
    """Keeps each result until its consumer takes it; may be used from any thread.

    A request that somebody asks for by its id is claimed: what it makes is not for those who take
    whatever comes.
    """

    def __init__(self, background: Background) -> None:
        self._background = background
        self._lock = threading.RLock()  # a stream that is collected anywhere ends its request
        self._boxes: dict[str, Box] = {}
        self._arrived: deque[Box] = deque()  # one entry for each result, in order
        self._compact_at = 64
        self._handlers: dict[str, _Handler] = {}
        self._num_live = 0
        self._when_idle: Callable[[], None] | None = None

    def expect(self, requests: Sequence[Request], *, streaming: bool, timed: bool) -> None:
        """Takes in the results of requests that are about to be submitted."""
        with self._lock:
            for request in requests:
                if request.request_id in self._boxes:
                    raise RequestError(
                        f"request_id={request.request_id!r} has a result that nobody has taken yet: "
                        "take that first, or give another id"
                    )
            for request in requests:
                box = Box(request, streaming=streaming, timed=timed)
                request.sink = lambda token, box=box: self._deliver(box, token)
                box.watch = Stopwatch([request])
                self._boxes[request.request_id] = box
            self._num_live += len(requests)

    def forget(self, requests: Sequence[Request]) -> None:
        """Undoes `expect` for requests that could not be submitted."""
        with self._lock:
            for request in requests:
                del self._boxes[request.request_id]
            self._num_live -= len(requests)

    def live(self) -> list[Request]:
        """The requests that have not ended."""
        with self._lock:
            return [box.request for box in self._boxes.values() if box.request.output is None]

    def find(self, request_id: str) -> Request | None:
        """The request, as long as it is under way or has results to take."""
        box = self._boxes.get(request_id)
        return None if box is None else box.request

    def when_idle(self, call: Callable[[], None]) -> None:
        """Calls that once no request is under way, in whatever thread ends the last."""
        with self._lock:
            if self._num_live:
                self._when_idle = call
                return
        call()

    def take(
        self, request_id: str | None, timeout: float | None, may_come: Callable[[], bool]
    ) -> GenerationOutput | None:
        """The next result of that request, or of any that is not claimed; None if none comes in time."""
        if request_id is None:
            return self._wait(self._pop_any, timeout, may_come)
        box = self._claim(request_id)
        try:
            return self._wait(lambda: self._pop(box), timeout, may_come)
        finally:
            with self._lock:
                box.num_claims -= 1

    def follow(self, request_id: str, may_come: Callable[[], bool]) -> Iterator[GenerationOutput]:
        """Results of one request to its end; claimed from this call on."""
        box = self._claim(request_id)

        def results() -> Iterator[GenerationOutput]:
            while (result := self._wait(lambda: self._pop(box), None, may_come)) is not None:
                yield result
                if result.is_finished():
                    return

        return results()

    def handle(
        self,
        request_id: str,
        callback: Callable[[GenerationOutput], None],
        event_loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Has the event loop call back with each result of one request, those that wait here included."""
        with self._lock:
            handler = self._handlers[request_id] = _Handler(callback, event_loop)
            box = self._boxes.get(request_id)
            while box is not None and box.results:
                self._call(handler, box, box.results.popleft())

    def _deliver(self, box: Box, token: StreamToken) -> None:
        """Called in the thread that runs the steps, or that cancels."""
        result = box.result(token)
        if result is None:
            return
        idle = None
        with self._lock:
            handler = self._handlers.get(box.request.request_id)
            if handler is not None:
                self._call(handler, box, result)
            else:
                box.results.append(result)
                self._arrived.append(box)
                self._compact()
            if result.is_finished():
                self._num_live -= 1
                if not self._num_live:
                    idle, self._when_idle = self._when_idle, None
        if idle is not None:
            idle()
        self._background.wake()

    def _compact(self) -> None:
        """Drops entries of results that were taken by their request's id, before they are many."""
        if len(self._arrived) <= self._compact_at:
            return
        kept: Counter[str] = Counter()
        entries, self._arrived = self._arrived, deque()
        for box in entries:
            name = box.request.request_id
            if kept[name] < len(box.results):
                kept[name] += 1
                self._arrived.append(box)
        self._compact_at = 2 * len(self._arrived) + 64

    def _call(self, handler: _Handler, box: Box, result: GenerationOutput) -> None:
        if result.is_finished():
            del self._handlers[box.request.request_id]
            del self._boxes[box.request.request_id]
        handler.event_loop.call_soon_threadsafe(handler.callback, result)

    def _claim(self, request_id: str) -> Box:
        with self._lock:
            box = self._boxes.get(request_id)
            if box is None:
                raise RequestError(
                    f"no request {request_id!r} is under way or has a result to take: it was handed "
                    "out already, or never was"
                )
            box.num_claims += 1
            return box

    def _wait(
        self,
        pop: Callable[[], GenerationOutput | None],
        timeout: float | None,
        may_come: Callable[[], bool],
    ) -> GenerationOutput | None:
        found: list[GenerationOutput] = []

        def done() -> bool:
            result = None if found else pop()
            if result is not None:
                found.append(result)
            return bool(found) or not may_come()

        if not done():
            self._background.wait(done, timeout)
        return found[0] if found else None

    def _pop(self, box: Box) -> GenerationOutput | None:
        with self._lock:
            return self._hand_out(box) if box.results else None

    def _pop_any(self) -> GenerationOutput | None:
        with self._lock:
            for _ in range(len(self._arrived)):
                box = self._arrived.popleft()
                if box.num_claims and box.results:
                    self._arrived.append(
                        box
                    )  # its claimant's; another's again if that one gives up
                elif box.results:
                    return self._hand_out(box)
        return None

    def _hand_out(self, box: Box) -> GenerationOutput:
        result = box.results.popleft()
        if result.is_finished():
            del self._boxes[box.request.request_id]
        return result
