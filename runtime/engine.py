"""The engine: prompts in, tokens out."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from .background import Background
from .batching_config import fields_of
from .capacity import plan_capacity
from .config import EngineConfig
from .drop_in import Stopwatch, as_generation_output, batch_order
from .errors import EngineBusyError, RequestError
from .factory import RequestFactory
from .loop import StepLoop
from .output import RequestOutput, StreamToken
from .prompts import as_list
from .request import Request
from .runner import RewrittenModel
from .schedules import Schedule
from .stats import EngineStats
from .stream import Collector, TokenStream
from .text import Detokenizer


class Engine:
    """Serves a rewritten model to many requests at once.

    Requests may be under way through any mix of `generate`, `stream`, `add_request` and `score`:
    whoever asks for tokens runs steps, and in a step all of them get on. Steps are for one thread
    at a time; `add_request` and `cancel` may be called from any. A bad request is a RequestError
    and touches nobody else.

    `generation_config` gives the defaults of every request; `report` and `validator` are what the
    attribute `report` shows and what `validate` calls.
    """

    def __init__(
        self,
        model: RewrittenModel,
        config: EngineConfig | None = None,
        *,
        tokenizer: Any = None,
        generation_config: GenerationConfig | None = None,
        report: Any = None,
        validator: Callable[..., Any] | None = None,
    ) -> None:
        self.model = model
        self.config = config or EngineConfig()
        self.tokenizer = tokenizer
        self.report = report
        self._validator = validator
        capacity = plan_capacity(self.config, model)
        longest = capacity.max_tokens(self.config.max_batch_tokens)
        self.max_cached = sys.maxsize if longest is None else longest
        """The longest request that the caches hold (tokens)."""
        notes = getattr(report, "notes", None)
        # Caches made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self._loop = StepLoop(model, self.config, capacity, tokenizer, notes)
        self._factory = RequestFactory(
            model, self.config, self.max_cached, tokenizer, generation_config
        )
        self._outbox: deque[StreamToken] = deque()
        self.background = Background(self._loop, model.device)
        """The thread that runs the steps while a manager or an AsyncEngine holds it; callers then wait."""

    def generate(
        self,
        prompts: Sequence[Any],
        generation_config: GenerationConfig | None = None,
        *,
        progress: bool = False,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Continues every prompt; the outputs in the order of the prompts.

        `prompts` are lists of token ids or, with a tokenizer, texts. `generation_config`, or its
        fields as keywords, say how, over the model's own generation config as in transformers'
        `generate`. A keyword given as a list has one value per prompt; `seed` makes the tokens of
        a sampled request its own, whatever else runs; with a prefix cache, a text as `cache_salt`
        keeps it apart from requests with another one or none. `progress` draws a bar. A bad prompt or
        field is a RequestError before anything runs.
        """
        if not isinstance(progress, bool):
            raise RequestError(f"progress={progress!r}: give True or False")
        requests = self.make_requests(prompts, generation_config, fields)
        collector = Collector(requests, progress=progress)
        self._collect(requests, collector)
        return [_output_of(request) for request in requests]

    def generate_batch(
        self,
        inputs: Sequence[Any],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: Any = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        **fields: Any,
    ) -> dict[str, GenerationOutput]:
        """Transformers' `model.generate_batch`: its arguments, its result type, this engine.

        Results are in the order of `inputs`, `num_return_sequences` of each. There is no manager to
        keep and nothing to warm up, so `persistent_manager` and `warmup` change nothing. Of a
        `continuous_batching_config`, `return_logprobs` and `seed` are heeded; one that sizes the
        engine otherwise than it is sized is a RequestError, as is a keyword that is no field.
        """
        self._loop.check_open()
        prompts = as_list(inputs, "inputs")
        fields = {**fields_of(continuous_batching_config, self.config, len(prompts)), **fields}
        requests = self._factory.make(prompts, generation_config, fields)
        collector = Collector(requests, progress=progress_bar)
        watch = Stopwatch(requests)
        self._collect(requests, collector)
        return {
            request.request_id: as_generation_output(
                request, watch, record_timestamps=record_timestamps
            )
            for request in batch_order(requests)
        }

    def stream(
        self,
        prompt: Any,
        generation_config: GenerationConfig | None = None,
        *,
        request_id: str | None = None,
        **fields: Any,
    ) -> TokenStream:
        """An iterator over the tokens of one prompt, made while it is read; else as `generate`."""
        request = self._make_one(prompt, generation_config, fields, request_id)
        stream = TokenStream(request, self.background.run_until, lambda one: self.abandon([one]))
        self.submit([request])
        return stream

    def add_request(
        self,
        prompt: Any,
        generation_config: GenerationConfig | None = None,
        *,
        request_id: str | None = None,
        **fields: Any,
    ) -> str:
        """Queues one prompt for `step` to run; its id, made up if not given.

        The id of a live request is a RequestError; else as `generate`.
        """
        request = self._make_one(prompt, generation_config, fields, request_id)
        request.sink = self._outbox.append
        self.submit([request])
        return request.request_id

    def step(self) -> list[StreamToken]:
        """Runs one step; what it, and steps of other calls since, made of `add_request`'s requests.

        If the model fails, its error is raised, the requests of that step end with finish_reason
        "error", and the others can go on. While a background thread runs the steps it is an
        EngineBusyError.
        """
        if self.background.is_alive:
            raise EngineBusyError(
                "a background thread runs this engine's steps: take results from its manager, or stop it"
            )
        self._loop.advance()
        return [self._outbox.popleft() for _ in range(len(self._outbox))]

    @property
    def has_unfinished(self) -> bool:
        """Whether another `step` has anything to run or to return."""
        return bool(self._loop.live or self._outbox)

    def cancel(self, request_id: str) -> None:
        """Ends a live request: what it made so far comes with finish_reason "cancelled".

        An id that no live request has is a RequestError.
        """
        self._loop.check_open()
        self._loop.cancel(request_id)
        self.background.wake()

    def score(self, sequences: Sequence[Any], schedule: Schedule = "prefill") -> list[torch.Tensor]:
        """Logits after each token of known sequences: float32 [len_i, vocab] on the model's device.

        The sequences run packed together, each cut as `schedule` says: "prefill" (whole), "decode"
        (token by token), an int (chunks of that many tokens), or one list of cut points per
        sequence.
        """
        self._loop.check_open()
        requests = self._factory.make_score(as_list(sequences, "sequences"), schedule)
        self._run(requests, lambda: all(request.output is not None for request in requests))
        for request in requests:
            _output_of(request)
        return [request.logits for request in requests]

    @property
    def stats(self) -> EngineStats:
        """What the engine has done and what it holds now, as numbers."""
        return self._loop.scheduler.stats

    def weights_changed(self) -> None:
        """To be called after weights were written to through `.data` (or from outside of torch).

        Every other change is seen without it: in-place operations, optimizers, replaced parameters, `load_state_dict`.
        From the next step on nothing is used that was cached of the old weights.
        """
        self._loop.has_other_weights = True

    def validate(self, size: str = "quick", *, seed: int = 0) -> Any:
        """Compares with the original model as it is now: a `regraft.Validation`.

        `size` is "quick" (4 texts) or "full" (11, the longest of 600 tokens); the texts are random, of `seed`.
        """
        if self._validator is None:
            raise RequestError("this engine was made without an original model to compare with")
        return self._validator(size, seed=seed)

    def close(self) -> None:
        """Ends the background, cancels what is live and frees the caches. Closing twice is nothing."""
        self.background.end()
        self._loop.close()
        self.background.wake()

    def __repr__(self) -> str:
        """What it serves, how, and for how much there is room."""
        pages = max((pool.num_pages for pool in self.stats.pools), default=0)
        served, report = "a model without a report", self.report
        if report is not None:
            grafted = sum(layer.served == "grafted" for layer in report.layers)
            served = f"{report.model}: {grafted} grafted, {len(report.layers) - grafted} replayed"
        tokens = pages * self.config.page_size
        room = f"cache of {tokens:,} tokens, max_requests={self.config.max_requests}"
        return f"<Engine {served}; {room}{'; closed' if self._loop.closed else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def generation_config(self) -> GenerationConfig | None:
        """The defaults of every request; may be set, for requests made from then on."""
        return self._factory.generation_config

    @generation_config.setter
    def generation_config(self, config: GenerationConfig | None) -> None:
        self._factory.generation_config = config

    def resized(self, config: EngineConfig) -> Engine:
        """A new engine over the same rewritten model. The caches of this one are its own until it is closed."""
        return Engine(
            self.model,
            config,
            tokenizer=self.tokenizer,
            generation_config=self.generation_config,
            report=self.report,
        )

    @property
    def num_waiting(self) -> int:
        """Requests that no step has begun yet."""
        return sum(request.started is None for request in self.live_requests())

    def live_requests(self) -> list[Request]:
        """Every request that has not ended."""
        return list(self._loop.live.values())

    def detokenizer(self) -> Detokenizer | None:
        """For the text of one stream; None without a tokenizer."""
        return self._factory.detokenizer()

    def make_requests(
        self,
        prompts: Sequence[Any],
        generation_config: GenerationConfig | None,
        fields: Mapping[str, Any],
        request_id: str | None = None,
    ) -> list[Request]:
        """Each prompt's requests, checked; for `submit`, once somebody takes what they make."""
        self._loop.check_open()
        return self._factory.make(as_list(prompts), generation_config, fields, request_id)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests for whoever runs the steps. An id that is a live request's is a RequestError."""
        self._loop.submit(requests)
        self.background.wake()

    def abandon(self, requests: Sequence[Request]) -> None:
        """Cancels those of the requests that are live."""
        self._loop.abandon(requests)
        self.background.wake()

    def _make_one(
        self,
        prompt: Any,
        generation_config: GenerationConfig | None,
        fields: dict[str, Any],
        request_id: str | None,
    ) -> Request:
        self._loop.check_open()
        request, *others = self._factory.make([prompt], generation_config, fields, request_id)
        if others:
            raise RequestError(
                f"num_return_sequences={len(others) + 1} makes several requests: ask for them one "
                "by one, or use generate"
            )
        request.detokenizer = request.stop_text or self.detokenizer()
        return request

    def _collect(self, requests: Sequence[Request], collector: Collector) -> None:
        with collector.bar:
            self._run(requests, lambda: collector.pending == 0)

    def _run(self, requests: Sequence[Request], done: Callable[[], bool]) -> None:
        """Runs steps until `done`; on an error none of the requests stays behind."""
        try:
            self.submit(requests)
            self.background.run_until(done)
        finally:
            self.abandon(requests)


def _output_of(request: Request) -> RequestOutput:
    assert request.output is not None, f"{request.request_id} has not ended"
    return request.output
