"""What comes out of an engine: tokens as they are made, and the whole of a request at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""stop: an end-of-sequence token or a stop string; length: `max_new_tokens` or `max_time`; error: see
`RequestOutput.error`."""


@dataclass(frozen=True)
class RequestOutput:
    """Everything a request produced.

    `token_ids` includes the end-of-sequence token, or those of the stop string, if one was made.
    `logprobs[i]` is the natural log-probability of `token_ids[i]` under the distribution that it was
    taken from, after processors and warpers (as the `scores` of transformers); None if the request
    said `logprobs=False`. `text` is `token_ids` decoded without special tokens, up to a stop string,
    None without tokenizer. `top_logprobs[i]` are the likeliest tokens there, best first, with
    their log-probabilities, as many as asked for and possible. `prompt_logprobs` are the model's
    own, of each token of the prompt after those before it (of the first, None), and
    `prompt_top_logprobs` the likeliest there; None unless asked for.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: FinishReason
    text: str | None = None
    error: str | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[list[tuple[int, float]]] | None = None


@dataclass(frozen=True, slots=True)
class StreamToken:
    """One new token of one request.

    `text` is what the token adds to the text: a character whose bytes are spread over several
    tokens comes with the last of them ("" without tokenizer). The last item of a request has a
    `finish_reason` and the whole `output`; its `token_id` is None if the request ended without
    making a token (cancelled, or failed).
    """

    request_id: str
    token_id: int | None
    text: str = ""
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None
