"""One request: its tokens, how far they are computed, and what it holds of the caches."""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessorList

from .output import FinishReason, RequestOutput, StreamToken
from .page_groups import Held
from .prefix_cache import PrefixState
from .sampling_params import SamplingParams
from .text import Detokenizer, StopText

PENDING = -1
"""In a request's tokens: one that the device has chosen and the host has not read yet."""


class Status(Enum):
    """Where a request is. A preempted request waits again."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """A prompt to continue.

    `tokens` are all tokens known so far, prompt and output. The rows and states of the first
    `num_cached` of them are in the caches; a step computes some of the others, and when it has
    computed the last one, the next token is chosen from its logits. So prefill, decoding and
    recomputation after preemption are one thing: `tokens` that are not cached yet. `held` are its
    pages of each group, while it runs.
    """

    def __init__(
        self, request_id: str, arrival: int, prompt: Sequence[int], params: SamplingParams
    ) -> None:
        self.request_id = request_id
        self.arrival = arrival
        self.params = params
        self.num_prompt = len(prompt)
        self.tokens = list(prompt)
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []
        self.prompt_scores: PromptScores | None = None
        self.num_cached = 0
        self.held: list[Held] = []
        self.slot = 0
        self.num_preemptions = 0
        self.prefix = PrefixState()
        self.created = time.perf_counter()
        self.started: float | None = None
        self.is_held = False
        self._status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.output: RequestOutput | None = None
        self.sink: Callable[[StreamToken], None] | None = None
        self.detokenizer: Detokenizer | StopText | None = None
        self.stop_text: StopText | None = None
        self.processors: LogitsProcessorList | None = None
        self.generator: torch.Generator | None = None

    @property
    def status(self) -> Status:
        """Where it is; `started` is when it first left the queue (seconds of `perf_counter`)."""
        return self._status

    @status.setter
    def status(self, value: Status) -> None:
        if self.started is None and value is Status.RUNNING:
            self.started = time.perf_counter()
        self._status = value

    @property
    def num_remaining(self) -> int:
        """Known tokens that are not in the caches yet."""
        return len(self.tokens) - self.num_cached

    @property
    def num_read(self) -> int:
        """Tokens up to the first that is not read yet; only at the end there may be some."""
        count = len(self.tokens)
        while self.tokens[count - 1] == PENDING:
            count -= 1
        return count

    @property
    def reuses_prefix(self) -> bool:
        """Whether it needs nothing but the tokens behind its prompt, so that others' rows do for it."""
        return self.prompt_scores is None

    @property
    def num_output(self) -> int:
        """Tokens made so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def most_cached(self) -> int:
        """Tokens that it can come to have in the caches: its last one is never computed."""
        return self.num_prompt + self.params.max_new_tokens - 1

    @property
    def is_full(self) -> bool:
        """Whether its last token is made, though perhaps not read yet."""
        return self.num_output >= self.params.max_new_tokens

    def next_end(self, budget: int, chunk_size: int) -> int:
        """Where a chunk of at most `budget` tokens ends; `num_cached` if none fits.

        A chunk that leaves a rest ends at a multiple of `chunk_size` from the request's start.
        """
        if self.num_remaining <= budget:
            return len(self.tokens)
        end = (self.num_cached + budget) // chunk_size * chunk_size
        return max(end, self.num_cached)

    def quantum(self, chunk_size: int) -> int:
        """The smallest budget with which this request gets on."""
        return min(self.num_remaining, chunk_size - self.num_cached % chunk_size)

    def largest_quantum(self, chunk_size: int) -> int:
        """No `quantum` of this request is ever larger."""
        return chunk_size

    def finish_reason_at(self, position: int) -> FinishReason | None:
        """Why the request ends with its token at `position`; None if it goes on."""
        token, params = self.tokens[position], self.params
        stops = self.stop_text is not None and self.stop_text.take(token)
        if stops or token in params.eos_token_id:
            return "stop"
        if position + 1 - self.num_prompt >= params.max_new_tokens:
            return "length"
        is_late = (
            params.max_time is not None and time.perf_counter() - self.created > params.max_time
        )
        return "length" if is_late else None


class ScoreRequest(Request):
    """Known tokens whose logits are all wanted: nothing is sampled.

    `cuts` are the ends of its chunks, increasing, the last one the number of tokens. A chunk is
    never split. `logits` is float32 [len(tokens), vocab] on the model's device.
    """

    def __init__(
        self,
        request_id: str,
        arrival: int,
        tokens: Sequence[int],
        cuts: Sequence[int],
        logits: torch.Tensor,
    ) -> None:
        super().__init__(request_id, arrival, tokens, SamplingParams(max_new_tokens=1))
        self.cuts = cuts
        self.logits = logits

    @property
    def reuses_prefix(self) -> bool:
        """It wants the logits of all its tokens, as this engine computes them now."""
        return False

    def next_end(self, budget: int, chunk_size: int) -> int:
        """The next cut if it fits."""
        end = self._next_cut()
        return end if end - self.num_cached <= budget else self.num_cached

    def quantum(self, chunk_size: int) -> int:
        """Tokens up to the next cut."""
        return self._next_cut() - self.num_cached

    def largest_quantum(self, chunk_size: int) -> int:
        """The longest chunk."""
        return max(end - start for start, end in itertools.pairwise([0, *self.cuts]))

    def _next_cut(self) -> int:
        return self.cuts[bisect.bisect_right(self.cuts, self.num_cached)]


def extras(request: Request) -> dict[str, Any]:
    """The fields of a request's output that only those have who asked for them."""
    fields: dict[str, Any] = {}
    if request.params.top_logprobs:
        fields["top_logprobs"] = request.top_logprobs[: len(request.logprobs)]
    if request.prompt_scores is not None:
        fields["prompt_logprobs"] = request.prompt_scores.logprobs
        if request.params.top_logprobs:
            fields["prompt_top_logprobs"] = request.prompt_scores.top
    return fields


class PromptScores:
    """Log-probabilities of a prompt's tokens, each after those before it; of its first one, None.

    `top` are, at each place, the `count` likeliest tokens. Both have the prompt's length.
    """

    def __init__(self, prompt: Sequence[int], count: int) -> None:
        self._prompt = list(prompt)
        self._count = count
        self.logprobs: list[float | None] = [None] * len(prompt)
        self.top: list[list[tuple[int, float]]] = [[] for _ in prompt]

    def take(self, start: int, logits: torch.Tensor) -> None:
        """Reads the logits [n, vocab] after the tokens from index `start` on."""
        wanted = self._prompt[start + 1 : start + 1 + len(logits)]
        rows = logits[: len(wanted)].float().log_softmax(dim=-1)
        tokens = torch.tensor(wanted, dtype=torch.int64, device=rows.device)
        picked = rows.gather(-1, tokens[:, None])[:, 0].tolist()
        self.logprobs[start + 1 : start + 1 + len(wanted)] = picked
        if self._count:
            for i, row in enumerate(rows):
                self.top[start + 1 + i] = likeliest(row, self._count)


def likeliest(logprobs: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """Up to `count` tokens of one row [vocab] with their log-probabilities, best first; none of -inf."""
    values, ids = logprobs.topk(min(count, len(logprobs)))
    pairs = zip(ids.tolist(), values.tolist())
    return [(token, value) for token, value in pairs if value > -torch.inf]


@dataclass(slots=True)
class Span:
    """Tokens `start` to `end` of a request, computed in one step."""

    request: Request
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the span."""
        return self.end - self.start

    @property
    def num_logits(self) -> int:
        """Rows of logits that the request wants of this span, at its end."""
        request = self.request
        if isinstance(request, ScoreRequest):
            return self.num_tokens
        if request.prompt_scores is not None and self.start < request.num_prompt:
            return self.num_tokens
        return int(self.end == len(request.tokens))
