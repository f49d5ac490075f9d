"""An engine for asyncio: its steps run in a thread, its tokens arrive in the event loop."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from .errors import EngineClosedError, EngineFullError, RequestError
from .output import RequestOutput, StreamToken
from .request import Request

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from .engine import Engine


class _Inbox:
    """One request's tokens on their way from the step thread to the event loop."""

    def __init__(self, request: Request, owner: AsyncEngine) -> None:
        self.request = request
        self.tokens: deque[StreamToken] = deque()
        self.arrival = asyncio.Event()
        self.is_done = False
        self._owner = owner
        self._stall: asyncio.TimerHandle | None = None
        request.sink = self._take

    def close(self) -> None:
        """Cancels the request if it has not ended."""
        self.release()
        if self.request.output is None:
            self._owner.engine.abandon([self.request])

    def release(self) -> None:
        """Lets the request get on, now that its tokens are read."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if self.request.is_held:
            self.request.is_held = False
            self._owner.engine.background.wake()

    def arrive(self) -> None:
        """In the event loop, after tokens were taken in."""
        self.arrival.set()
        if self.request.is_held and self._stall is None:
            loop = asyncio.get_running_loop()
            self._stall = loop.call_later(self._owner.stall_seconds, self.close)

    def _take(self, token: StreamToken) -> None:
        """Called in the thread that made the token, or that cancelled."""
        self.tokens.append(token)
        if len(self.tokens) >= self._owner.max_unread and token.output is None:
            self.request.is_held = True
        self._owner.notify(self)


class AsyncTokenStream(AsyncIterator[StreamToken]):
    """The tokens of one request, as they are made in the background.

    One that is closed or dropped before its end, or whose reader is cancelled, cancels its request;
    `async with` closes it.
    While `max_unread` tokens wait to be read the request rests, and after `stall_seconds` without a
    reader it is cancelled. `output` is the whole result once it has ended. Past its deadline the
    request is cancelled and reading is a TimeoutError; after a fatal error, an EngineFailedError.
    """

    def __init__(self, inbox: _Inbox, owner: AsyncEngine, deadline: float | None) -> None:
        self.request_id = inbox.request.request_id
        self._inbox = inbox
        self._owner = owner
        self._deadline = deadline
        self._is_over = (
            False  # the last token was read: its request has an output some time before that
        )

    @property
    def request(self) -> Request:
        """What it streams."""
        return self._inbox.request

    @property
    def output(self) -> RequestOutput | None:
        """The whole result, None until the request has ended."""
        return self._inbox.request.output

    async def read(self) -> list[StreamToken]:
        """All tokens that wait to be read, at least one, the last perhaps none's; nothing after the end."""
        inbox = self._inbox
        await self._wait()
        tokens = [inbox.tokens.popleft() for _ in range(len(inbox.tokens))]
        self._is_over = self._is_over or tokens[-1].output is not None
        inbox.release()
        return tokens

    async def __anext__(self) -> StreamToken:
        await self._wait()
        tokens = self._inbox.tokens
        while tokens:
            token = tokens.popleft()
            self._is_over = token.output is not None
            if len(tokens) <= self._owner.max_unread // 2:
                self._inbox.release()
            if token.token_id is not None:
                return token
        raise StopAsyncIteration

    async def result(self) -> RequestOutput:
        """Reads to the end; the whole result."""
        while await self.read():
            pass
        assert self.output is not None, "nothing is left to read before the end"
        return self.output

    async def aclose(self) -> None:
        """Cancels the request if it has not ended."""
        self._inbox.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inbox.close()

    def __del__(self) -> None:
        if self.output is None:
            self._owner.engine.abandon([self._inbox.request])

    async def _wait(self) -> None:
        """Until there is a token to read, or the request has ended."""
        inbox = self._inbox
        while not inbox.tokens:
            if self._is_over:
                if self.output is not None and self.output.finish_reason == "error":
                    # Its own error, or everybody's.
                    await asyncio.to_thread(self._owner.engine.background.settle)
                    self._owner.check_alive()
                return
            inbox.arrival.clear()
            try:
                async with asyncio.timeout_at(self._deadline):
                    await inbox.arrival.wait()
            except (TimeoutError, asyncio.CancelledError):
                inbox.close()  # a reader that is cancelled goes away, as with an async generator
                raise


class AsyncEngine:
    """Serves an engine to the tasks of one event loop; `async with` starts it, and drains it at the end.

    max_waiting    how many requests may wait for their first step; more wait to be taken in, or are
                   refused (requests)
    max_unread     tokens of one request that may wait to be read, before it rests (tokens)
    stall_seconds  how long it may rest, before it is cancelled (seconds)
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int = 1024,
        max_unread: int = 256,
        stall_seconds: float = 60.0,
    ) -> None:
        self.engine = engine
        self.max_waiting = max_waiting
        self.max_unread = max_unread
        self.stall_seconds = stall_seconds
        self.num_live = 0
        self._mean_seconds = 1.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived: deque[_Inbox] = deque()
        self._is_scheduled = False
        self._entrants: deque[asyncio.Future[None]] = deque()
        self._idle = asyncio.Event()
        self._is_open = False

    @property
    def is_open(self) -> bool:
        """Whether it takes requests."""
        return self._is_open

    def check_alive(self) -> None:
        """EngineFailedError after a fatal error."""
        self.engine.background.check()

    async def start(self) -> None:
        """Starts the thread."""
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._idle.set()
        self.engine.background.hold(self)

    async def drain(self, timeout: float | None = None) -> None:
        """Takes no more, waits for what is under way, `timeout` seconds at most, and cancels the rest."""
        self._is_open = False
        for entrant in self._entrants:
            if not entrant.done():
                entrant.set_exception(_closed())
        self._entrants.clear()
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            self.engine.abandon(self._own_requests())
        self.engine.background.release(self, timeout=0)
        await asyncio.to_thread(self.engine.background.release, self)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.drain(timeout=None if error is None else 0)

    async def stream(
        self,
        prompt: Any,
        generation_config: GenerationConfig | None = None,
        *,
        timeout: float | None = None,
        **fields: Any,
    ) -> AsyncTokenStream:
        """The tokens of one prompt; arguments and errors of `Engine.stream`. `timeout` is in seconds.

        Waits while the queue is full.
        """
        await self._wait_for_room()
        (stream, *others) = self._open([prompt], generation_config, timeout, fields)
        if others:
            raise RequestError(
                f"num_return_sequences={len(others) + 1} makes several requests: use streams"
            )
        return stream

    async def generate(
        self,
        prompt: Any,
        generation_config: GenerationConfig | None = None,
        *,
        timeout: float | None = None,
        **fields: Any,
    ) -> RequestOutput:
        """The whole result of one prompt; else as `stream`."""
        async with await self.stream(
            prompt, generation_config, timeout=timeout, **fields
        ) as stream:
            return await stream.result()

    def streams(
        self,
        prompts: Sequence[Any],
        generation_config: GenerationConfig | None = None,
        *,
        timeout: float | None = None,
        **fields: Any,
    ) -> list[AsyncTokenStream]:
        """A stream per prompt and sequence, at once: EngineFullError where the queue has no room."""
        self._check_open()
        self.check_room()
        return self._open(prompts, generation_config, timeout, fields)

    def _open(
        self,
        prompts: Sequence[Any],
        generation_config: GenerationConfig | None,
        timeout: float | None,
        fields: dict[str, Any],
    ) -> list[AsyncTokenStream]:
        requests = self.engine.make_requests(prompts, generation_config, fields)
        assert self._loop is not None, "not started"
        deadline = None if timeout is None else self._loop.time() + timeout
        streams = [AsyncTokenStream(_Inbox(request, self), self, deadline) for request in requests]
        for request in requests:
            request.detokenizer = request.stop_text or self.engine.detokenizer()
        self.num_live += len(requests)
        self._idle.clear()
        self.engine.submit(requests)
        return streams

    def check_room(self) -> None:
        """EngineFullError if `max_waiting` requests wait already."""
        waiting = self.engine.num_waiting
        if waiting >= self.max_waiting:
            batches = waiting / self.engine.config.max_requests
            seconds = max(1, math.ceil(batches * self._mean_seconds))
            raise EngineFullError(f"{waiting} requests wait already: try again later", seconds)

    def notify(self, inbox: _Inbox) -> None:
        """Has the event loop look at an inbox, from any thread; once for all that a step makes."""
        self._arrived.append(inbox)
        if not self._is_scheduled and self._loop is not None and not self._loop.is_closed():
            self._is_scheduled = True
            self._loop.call_soon_threadsafe(self._arrive)

    def _arrive(self) -> None:
        self._is_scheduled = False
        while self._arrived:
            inbox = self._arrived.popleft()
            inbox.arrive()
            if inbox.request.output is not None and not inbox.is_done:
                inbox.is_done = True
                self.num_live -= 1
                self._note_duration(inbox.request)
        if not self.num_live:
            self._idle.set()
        if self._entrants:
            for _ in range(min(len(self._entrants), self.max_waiting - self.engine.num_waiting)):
                entrant = self._entrants.popleft()
                if not entrant.done():
                    entrant.set_result(None)

    def _note_duration(self, request: Request) -> None:
        if request.started is not None:
            seconds = time.perf_counter() - request.started
            self._mean_seconds += 0.1 * (seconds - self._mean_seconds)

    def _own_requests(self) -> list[Request]:
        return [
            request
            for request in self.engine.live_requests()
            if isinstance(getattr(request.sink, "__self__", None), _Inbox)
        ]

    async def _wait_for_room(self) -> None:
        self._check_open()
        while self.engine.num_waiting >= self.max_waiting:
            entrant = asyncio.get_running_loop().create_future()
            self._entrants.append(entrant)
            await entrant

    def _check_open(self) -> None:
        self.check_alive()
        if not self._is_open:
            raise _closed()


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine takes no more requests: it is being shut down")
