"""The step loop: live requests, and the one place where they get on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from . import sampler
from .capacity import Capacity
from .config import EngineConfig
from .errors import EngineBusyError, EngineClosedError, RequestError, TextError, described
from .output import FinishReason, RequestOutput, StreamToken
from .pending import Pending
from .request import PENDING, Request, ScoreRequest, Span, Status, extras
from .runner import RewrittenModel, Runner
from .scheduler import Scheduler
from .text import decode

CHECK_SHARE = 0.01
"""Of the time of steps, how much may go into looking whether the model is still made as it was."""


class StepLoop:
    """Runs every live request, one packed row a step, and hands out what a step makes.

    `submit` and `cancel` may be called from any thread, during a step as well: what they ask for
    is taken in before and after each step. `advance` is for one thread at a time.

    With `overlaps` (by default on a GPU) the host plans a step while the device runs the one before: tokens are read a
    step later, and a request that ends without the host having known takes part in one step more, of which nothing is
    kept.
    """

    def __init__(
        self,
        model: RewrittenModel,
        config: EngineConfig,
        capacity: Capacity,
        tokenizer: Any,
        notes: list[str] | None = None,
        overlaps: bool | None = None,
    ) -> None:
        self.scheduler = Scheduler(
            config, capacity, model.switch_lengths, has_states=bool(model.states)
        )
        self.runner = Runner(model, capacity, config, notes)
        if (
            config.prefix_cache
            and model.states
            and not capacity.num_checkpoints
            and notes is not None
        ):
            notes.append(
                "prefix cache: no room for a copy of recurrent states, so nothing is reused"
            )
        self.live: dict[str, Request] = {}
        self.closed = False
        self._model = model
        self._tokenizer = tokenizer
        self._choose = sampler.choose_each if config.batch_invariant else sampler.choose
        self._weights_version = model.weights_version()
        self.has_other_weights = False
        """Set from outside: the weights were written to in a way that no version counter sees."""
        self._check_due = 0.0
        self._overlaps = model.device.type == "cuda" if overlaps is None else overlaps
        self._pending: Pending | None = None
        self._arrived: deque[Request] = deque()
        self._cancelled: deque[Request] = deque()
        self._stepping = threading.Lock()  # held by the thread that is in a step
        self._state = threading.Lock()  # guards the scheduler and the pools

    def check_open(self) -> None:
        """EngineClosedError once the engine is closed."""
        if self.closed:
            raise EngineClosedError("the engine is closed: make a new one")

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests, all or, where one's id is a live request's, none."""
        self.check_open()
        for index, request in enumerate(requests):
            if self.live.setdefault(request.request_id, request) is not request:
                for earlier in requests[:index]:
                    del self.live[earlier.request_id]
                raise RequestError(
                    f"request_id={request.request_id!r} is a live request's already: give another, "
                    "or none"
                )
        self._arrived.extend(requests)

    def cancel(self, request_id: str) -> None:
        """Ends a live request; an id of no live one is a RequestError."""
        request = self.live.pop(request_id, None)
        if request is None:
            raise RequestError(
                f"no live request has the id {request_id!r}: it ended already, or never was"
            )
        self._cancelled.append(request)
        self._settle_unless_stepping()

    def abandon(self, requests: Iterable[Request]) -> None:
        """Cancels those of the requests that are live."""
        for request in requests:
            if self.live.get(request.request_id) is request:
                del self.live[request.request_id]
                self._cancelled.append(request)
        self._settle_unless_stepping()

    def advance(self) -> None:
        """Runs one step.

        An error in the model ends the requests of that step and is raised; the others stay live.
        """
        self._refuse_autocast()
        if not self._stepping.acquire(blocking=False):
            raise EngineBusyError(
                "another thread is in a step of this engine: run its steps from one thread, and "
                "use add_request and cancel from the others"
            )
        try:
            with self._state:
                self.check_open()
                self._settle()
                self._step()
                self._settle()
        finally:
            self._stepping.release()

    def _refuse_autocast(self) -> None:
        """The operators and caches have the model's dtypes, and would meet others."""
        kind = self._model.device.type
        if torch.is_autocast_enabled(kind):
            raise RequestError(
                f"a step of the engine is run under torch.autocast({kind!r}), in which operations have other dtypes "
                "than the model: call the engine outside of it; for half precision, wrap a model in half precision"
            )

    def fail(self, error: str) -> None:
        """Ends every live request with this error."""
        with self._state:
            self._settle()
            for request in list(self.live.values()):
                self._finish(request, "error", error=error)

    def close(self) -> None:
        """Cancels what is live and frees the pools. Closing twice is nothing."""
        with self._state:
            if self.closed:
                return
            self.closed = True
            self._settle()
            self._take_pending()
            for request in list(self.live.values()):
                self._finish(request, "cancelled")
            self.runner.release()

    def _step(self) -> None:
        """Launches a step and reads the tokens of the one before, or of this one where nothing overlaps."""
        if self._pending is not None and self._pending.needs_host:
            self._read(self._take_pending())
        self._check_model()
        self._renew_weights()
        spans = self.scheduler.schedule()
        before = self._take_pending()
        try:
            if spans:
                self._pending = self._launch(spans)
        except BaseException as error:
            self._read(before)
            self.scheduler.distrust()
            for span in spans:
                if span.request.status is not Status.FINISHED:
                    self._finish(span.request, "error", error=described(error))
            raise
        self._read(before)
        if not self._overlaps:
            self._read(self._take_pending())

    def _check_model(self) -> None:
        """Where nothing was running the model may have been changed just now; else every so often."""
        start = time.perf_counter()
        if self.scheduler.running and start < self._check_due:
            return
        self._model.check_structure()
        end = time.perf_counter()
        self._check_due = end + (end - start) / CHECK_SHARE

    def _renew_weights(self) -> None:
        version = self._model.weights_version()
        if version != self._weights_version or self.has_other_weights:
            self.has_other_weights = False
            # Cached rows and states are the old weights': nothing of them may meet the new ones.
            self._read(self._take_pending())
            self.scheduler.renew_weights(version)
            self.runner.weights_changed()
            self._weights_version = version

    def _launch(self, spans: Sequence[Span]) -> Pending | None:
        """Runs the spans and chooses tokens; what was chosen, None if nothing was."""
        tables, page_size = self.scheduler.tables, self.scheduler.page_size
        # Longest history first: a GPU that began with the short ones would wait for the last long one alone.
        spans = sorted(spans, key=lambda span: span.start, reverse=True)
        self.runner.copy_states(self.scheduler.take_restores())
        logits = self.runner.run(self.runner.build(spans, tables, page_size))
        sampled: list[Request] = []
        rows: list[int] = []
        row = 0
        for span in spans:
            self.scheduler.commit(span)
            request, end = span.request, row + span.num_logits
            if isinstance(request, ScoreRequest):
                request.logits[span.start : span.end] = logits[row:end]
                if not request.num_remaining:
                    self._finish(request, "length")
            elif end > row:
                if request.prompt_scores is not None:
                    request.prompt_scores.take(span.start, logits[row:end])
                if span.end == len(request.tokens):
                    sampled.append(request)
                    rows.append(end - 1)
            row = end
        self.runner.copy_states(self.scheduler.take_saves())
        if not sampled:
            return None
        chosen = self._choose(logits if len(rows) == row else logits[rows], sampled)
        self.runner.keep_tokens(chosen[0], [request.slot for request in sampled])
        positions = [len(request.tokens) for request in sampled]
        for request in sampled:
            self.scheduler.append(request, PENDING)
        return Pending(sampled, positions, *chosen)

    def _take_pending(self) -> Pending | None:
        pending, self._pending = self._pending, None
        return pending

    def _read(self, pending: Pending | None) -> None:
        """Hands the tokens that a step chose to its requests; those that ended meanwhile get none."""
        if pending is None:
            return
        for request, position, token, logprob in pending.read():
            if request.status is not Status.FINISHED:
                self._place(request, position, token, logprob)

    def _place(self, request: Request, position: int, token: int, logprob: float) -> None:
        if logprob != logprob:
            error = f"the logits after its token {position - 1} are not finite"
            self._finish(request, "error", error=request.error or error)
            return
        request.tokens[position] = token
        request.logprobs.append(logprob)
        try:
            reason = request.finish_reason_at(position)
            text = _piece(request, token) if reason is None else ""
        except TextError as problem:
            request.error = str(problem)
            self._finish(request, "error", token=token, error=request.error)
            return
        if reason is not None:
            self._finish(request, reason, token=token)
        elif request.sink is not None:
            request.sink(_stream_token(request, token, text))

    def _settle(self) -> None:
        """Takes in what was submitted and cancelled since it was last called."""
        while self._arrived:
            request = self._arrived.popleft()
            if request.status is not Status.FINISHED:  # another thread may have cancelled it by now
                self.scheduler.add(request)
        while self._cancelled:
            request = self._cancelled.popleft()
            if request.status is not Status.FINISHED:
                self._finish(request, "cancelled")

    def _settle_unless_stepping(self) -> None:
        if self._state.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._state.release()

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        token: int | None = None,
        error: str | None = None,
    ) -> None:
        """Ends a request; `token` is the one it ends with, if it made one in this step.

        If its text cannot be told it ends with that error, or with the one that it ends with anyway.
        """
        # An error of the request's own, as of a caller's processor, says nothing of what the model computed.
        is_sound = reason != "error" or request.error is not None
        self.scheduler.remove(request, is_sound=is_sound)
        if self.live.get(request.request_id) is request:
            del self.live[request.request_id]
        made = [token for token in request.tokens[request.num_prompt :] if token != PENDING]
        text, piece = None, ""
        try:
            text, piece = self._text_of(request, made), _piece(request, token, is_last=True)
        except TextError as problem:
            reason, error = "error", error or str(problem)
        request.output = RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.tokens[: request.num_prompt],
            token_ids=made,
            logprobs=request.logprobs if request.params.logprobs else None,
            finish_reason=reason,
            text=text,
            error=error,
            **extras(request),
        )
        if request.sink is not None:
            request.sink(_stream_token(request, token, piece))

    def _text_of(self, request: Request, made: list[int]) -> str | None:
        if request.stop_text is not None:
            request.stop_text.close()
            return request.stop_text.text
        return None if self._tokenizer is None else decode(self._tokenizer, made)


def _piece(request: Request, token: int | None, *, is_last: bool = False) -> str:
    """The text that `token`, or its end without one, adds to a stream."""
    if request.detokenizer is None:
        return ""
    text = request.detokenizer.push(token) if token is not None else ""
    return text + (request.detokenizer.flush() if is_last else "")


def _stream_token(request: Request, token: int | None, text: str) -> StreamToken:
    """The item of a stream for `token`, the last of `request`, or for its end without one."""
    output = request.output
    likeliest = request.top_logprobs and token is not None
    return StreamToken(
        request_id=request.request_id,
        token_id=token,
        text=text,
        logprob=request.logprobs[-1] if token is not None and request.params.logprobs else None,
        top_logprobs=request.top_logprobs[len(request.logprobs) - 1] if likeliest else None,
        finish_reason=None if output is None else output.finish_reason,
        output=output,
    )
