"""Results as transformers' own continuous batching gives them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from .output import StreamToken
from .request import Request


class Stopwatch:
    """Notes when each token of some requests was made (seconds of `time.perf_counter`)."""

    def __init__(self, requests: Sequence[Request]) -> None:
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
    request: Request, watch: Stopwatch, *, record_timestamps: bool
) -> GenerationOutput:
    """An ended request in transformers' type; cancelled is failed there, which has no word for it."""
    output = request.output
    assert output is not None, f"{request.request_id} has not ended"
    error = "cancelled" if output.finish_reason == "cancelled" else output.error
    name = request.request_id
    started = watch.ends[name] if request.started is None else request.started
    return GenerationOutput(
        request_id=name,
        prompt_ids=output.prompt_token_ids,
        generated_tokens=output.token_ids,
        logprobs=output.logprobs or [],
        error=error,
        status=RequestStatus.FINISHED if error is None else RequestStatus.FAILED,
        created_time=request.created,
        lifespan=(started, watch.ends[name]),
        timestamps=list(watch.tokens[name]) if record_timestamps else None,
    )


def so_far(request: Request, watch: Stopwatch, *, record_timestamps: bool) -> GenerationOutput:
    """A request under way in transformers' type, with what it has made until now."""
    made = len(request.logprobs)
    start = request.num_prompt
    return GenerationOutput(
        request_id=request.request_id,
        prompt_ids=request.tokens[:start],
        generated_tokens=request.tokens[start : start + made],
        logprobs=request.logprobs[:] if request.params.logprobs else [],
        status=RequestStatus.DECODING,
        created_time=request.created,
        lifespan=(request.created if request.started is None else request.started, -1),
        timestamps=list(watch.tokens[request.request_id]) if record_timestamps else None,
    )


def batch_order(requests: Sequence[Request]) -> list[Request]:
    """Each prompt's requests in the order of transformers: the children, then the one they come of."""
    families: list[list[Request]] = []
    for request in requests:
        if "__child#" in request.request_id:
            families[-1].insert(-1, request)
        else:
            families.append([request])
    return [request for family in families for request in family]
