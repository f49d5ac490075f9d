"""Results as transformers' own continuous batching gives them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from .output import RequestOutput, StreamToken
from .request import Request


class Stopwatch:
    """Notes when each token of some requests was made (seconds of `time.perf_counter`)."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.start = time.perf_counter()
        self.tokens: dict[str, list[float]] = {request.request_id: [] for request in requests}
        self.ends: dict[str, float] = {}
        for request in requests:
            assert request.sink is not None, "nobody takes the tokens yet"
            request.sink = self._beside(request.sink)

    def _beside(self, sink: Callable[[StreamToken], None]) -> Callable[[StreamToken], None]:
        def note(token: StreamToken) -> None:
            now = time.perf_counter()
            if token.token_id is not None:
                self.tokens[token.request_id].append(now)
            if token.output is not None:
                self.ends[token.request_id] = now
            sink(token)

        return note


def as_generation_output(
    output: RequestOutput, watch: Stopwatch, *, record_timestamps: bool
) -> GenerationOutput:
    """The same result in transformers' type. Its lifespan starts when the call did."""
    name = output.request_id
    return GenerationOutput(
        request_id=name,
        prompt_ids=output.prompt_token_ids,
        generated_tokens=output.token_ids,
        logprobs=output.logprobs or [],
        error=output.error,
        status=RequestStatus.FINISHED if output.error is None else RequestStatus.FAILED,
        created_time=watch.start,
        lifespan=(watch.start, watch.ends[name]),
        timestamps=watch.tokens[name] if record_timestamps else None,
    )
