"""Transformers' ContinuousBatchingManager over this engine: its methods, without its known faults."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from . import batching_config
from .errors import EngineFailedError, RequestError
from .results import Mailbox

if TYPE_CHECKING:
    from .engine import Engine

logger = logging.getLogger(__name__)

FULL_QUEUE_SECONDS = 10.0
"""How long a submission waits for room in a full queue, as in transformers."""


class Manager:
    """Submits requests from any thread, and hands their results to whom they belong.

    Each result goes to one consumer: to the iterator, handler or `get_result` that asks for its
    request by id, else to whoever takes any. Nothing is lost when the manager stops: what is
    finished can still be taken. A bad request is a RequestError at the call. `on_keep` is called
    when it is stopped to be kept for the next session.
    """

    def __init__(
        self,
        engine: Engine,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        on_keep: Callable[[Manager], None] | None = None,
    ) -> None:
        self.engine = engine
        self.warmed_up = False
        self.continuous_batching_config = batching_config.check(continuous_batching_config)
        self._config = generation_config
        self._on_keep = on_keep
        self._numbers = itertools.count()
        self._results = Mailbox(engine.background)
        self._started = False
        self._accepts = True

    @property
    def generation_config(self) -> GenerationConfig:
        """What requests are made with where they say nothing else."""
        return self._config or self.engine.generation_config or GenerationConfig()

    @property
    def num_return_sequences(self) -> int:
        """Sequences of each prompt, by the generation config."""
        return self.generation_config.num_return_sequences or 1

    @property
    def fatal_error(self) -> Exception | None:
        """What ended the thread; None while nothing did."""
        return self.engine.background.fatal_error

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Nothing: the model and its attention are never changed, and so have not to be switched back."""

    def is_running(self) -> bool:
        """Whether the thread runs for this manager."""
        return self._started and self.engine.background.is_alive

    def start(self) -> None:
        """Starts to serve; requests may have been added before. Starting twice is nothing."""
        self._started = self._accepts = True
        self.engine.background.hold(self)

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Takes no more requests; those under way are finished, or fail at once with `hard_stop`.

        `block` waits for that, for `timeout` seconds at most. `keep_for_next_session` gives this
        manager to the next session on its model. From within `pause` it is a RuntimeError.
        """
        if not self._started:
            return
        if self.engine.background.is_paused:
            raise RuntimeError("stop would wait for ever within pause: leave that first")
        begin = time.perf_counter()
        self._accepts = False
        if hard_stop:
            self.engine.abandon(self._results.live())
        self._results.when_idle(self._let_go)
        if block:
            self.join(begin, timeout)
        if keep_for_next_session and self._on_keep is not None:
            self._on_keep(self)

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Waits until what was submitted before `stop` is finished, for `timeout` seconds at most."""
        if self.engine.background.wait(lambda: not self._started, timeout):
            self.engine.background.release(self)  # and until the thread is gone, if it goes
        elif self.is_running():
            waited = time.perf_counter() - stop_trigger_time
            logger.warning("requests are still under way %.1f s after stop", waited)

    def destroy(self) -> None:
        """Stops at once. Twice is nothing."""
        self.stop(hard_stop=True)

    def pause(self) -> AbstractContextManager[None]:
        """A context in which no step runs, so that the model may be changed in place; nothing is lost."""
        if not self.is_running():
            raise RuntimeError("nothing runs that could be paused: start the manager")
        return self.engine.background.pause()

    def warmup(self) -> None:
        """One short request through the whole engine, which compiles and records what it needs."""
        self.engine.generate([[0]], GenerationConfig(max_new_tokens=2, eos_token_id=-1))
        self.warmed_up = True

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **fields: Any,
    ) -> str:
        """Submits one prompt; its id. `fields` are those of `Engine.generate`, each request's own.

        With `streaming` there is a result after each token, else one at the end. A manager that was
        stopped, or whose thread died, raises instead of dropping the request. A full queue
        (`max_queue_size`) makes the call wait, and after ten seconds is `queue.Full`.
        """
        self._check_accepts()
        given = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        fields.update((name, value) for name, value in given.items() if value is not None)
        if self.continuous_batching_config is not None:
            number = next(self._numbers)
            numbers = range(number, number + 1)
            config = self.continuous_batching_config
            fields = {**batching_config.request_fields(config, numbers), **fields}
        requests = self.engine.make_requests([input_ids], self._config, fields, request_id)
        self._wait_for_room()
        self._results.expect(requests, streaming=streaming, timed=record_timestamps)
        try:
            self.engine.submit(requests)
        except RequestError:
            self._results.forget(requests)
            raise
        return requests[0].request_id

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **fields: Any,
    ) -> list[str]:
        """Submits several prompts alike; their ids, in order. All are checked before one is submitted."""
        given = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
        self.engine.make_requests(inputs, self._config, {**fields, **given})
        fields = {**fields, "streaming": streaming, "record_timestamps": record_timestamps, **given}
        return [self.add_request(prompt, **fields) for prompt in inputs]

    def cancel_request(self, request_id: str) -> None:
        """Ends a request: its result comes as failed, "cancelled". One that ended already is nothing."""
        request = self._results.find(request_id)
        if request is not None:
            self.engine.abandon([request])

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """The next result: of that request, or any that nobody asks for by its id.

        Waits for it, `timeout` seconds at most. None after that, or where none can come any more.
        The id of no request under way or with a result to take is a RequestError.
        """
        return self._results.take(request_id, timeout, self.is_running)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Results as they come, until the manager stopped and all are taken."""
        while (result := self.get_result()) is not None:
            yield result

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """The results of one request to its end, from this call on for nobody else."""
        return self._results.follow(request_id, self.is_running)

    def register_result_handler(
        self, request_id: str, callback: Callable[[GenerationOutput], None]
    ) -> None:
        """Has the running event loop call `callback` with each result of one request.

        The request may be added later; the handler goes with its last result.
        """
        self._results.handle(request_id, callback, asyncio.get_running_loop())

    def _let_go(self) -> None:
        self._started = False
        self.engine.background.release(self, timeout=0)

    def _check_accepts(self) -> None:
        if self.fatal_error is not None:
            raise EngineFailedError(
                f"a step failed, and the manager takes no more: {self.fatal_error}"
            )
        if not self._accepts:
            raise RequestError("the manager was stopped: start it again to add requests")

    def _wait_for_room(self) -> None:
        config = self.continuous_batching_config
        limit = 0 if config is None else config.max_queue_size
        if limit and not self.engine.background.wait(
            lambda: self.engine.num_waiting < limit, FULL_QUEUE_SECONDS
        ):
            raise queue.Full(f"{limit} requests wait already (max_queue_size)")
