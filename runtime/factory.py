"""Makes requests out of what a caller gives, after every check that needs no step to be run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList

from . import sampler
from .config import EngineConfig
from .errors import RequestError
from .generation_config import resolve
from .processors import integers
from .prompts import check_length, to_token_ids
from .request import PromptScores, Request, ScoreRequest
from .runner import RewrittenModel
from .sampling_params import SamplingParams, derived_seed
from .schedules import Schedule, chunk_ends
from .structured import grammar_processor, with_end
from .text import Detokenizer, StopText


class RequestFactory:
    """Knows the limits that a request must keep: the model's, the cache's, the step's.

    `max_cached` is the longest request that the caches hold (tokens).
    """

    def __init__(
        self,
        model: RewrittenModel,
        config: EngineConfig,
        max_cached: int,
        tokenizer: Any,
        generation_config: GenerationConfig | None,
    ) -> None:
        self._model = model
        self._config = config
        self._max_cached = max_cached
        self._tokenizer = tokenizer
        self.generation_config = generation_config
        self._arrivals = itertools.count()

    def make(
        self,
        prompts: Sequence[Any],
        generation_config: GenerationConfig | None,
        fields: Mapping[str, Any],
        request_id: str | None = None,
    ) -> list[Request]:
        """Each prompt's requests, one after another, all of them checked.

        A prompt has `num_return_sequences` of them: the first is named `request_id`, which is for a
        single prompt, the others `request_id__child#i`, as transformers names them.
        """
        if request_id is not None and not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r} is no str: give a str, or none")
        model = self._model
        _check_end(fields.get("eos_token_id"), model.vocab_size)
        tokens = [to_token_ids(prompt, self._tokenizer, model.vocab_size) for prompt in prompts]
        lengths = [len(ids) for ids in tokens]
        all_params = resolve(
            self.generation_config, generation_config, fields, lengths, model.max_positions
        )
        requests: list[Request] = []
        for ids, params in zip(tokens, all_params):
            self._check_length(len(ids), params.max_new_tokens)
            params = with_end(params, self._tokenizer)
            requests += self._make_family(ids, params, request_id)
        return requests

    def _make_family(
        self, ids: list[int], params: SamplingParams, request_id: str | None
    ) -> Iterator[Request]:
        name = request_id
        for index in range(params.num_return_sequences):
            arrival = next(self._arrivals)
            name = f"regraft-request-{arrival}" if name is None else name
            own_name = f"{name}__child#{index - 1}" if index else name
            request = Request(own_name, arrival, ids, _child_params(params, index))
            self._prepare(request)
            yield request

    def _prepare(self, request: Request) -> None:
        """Gives a request all that its params ask for."""
        params, model = request.params, self._model
        seed = (self._config.seed, request.arrival)
        sampler.prepare(request, model.vocab_size, model.device, seed)
        grammar = grammar_processor(params, request.num_prompt, self._tokenizer, model.vocab_size)
        if grammar is not None:
            request.processors = LogitsProcessorList([*(request.processors or ()), grammar])
        if params.prompt_logprobs:
            request.prompt_scores = PromptScores(request.tokens, params.top_logprobs)
        if params.stop_strings:
            if self._tokenizer is None:
                raise RequestError(
                    f"stop_strings={list(params.stop_strings)!r} are texts, and the engine has no "
                    "tokenizer: give it one"
                )
            request.stop_text = StopText(self._tokenizer, params.stop_strings)

    def make_score(self, sequences: Sequence[Any], schedule: Schedule) -> list[ScoreRequest]:
        """One request per sequence whose logits are wanted, cut as `schedule` says."""
        model = self._model
        tokens = [to_token_ids(item, self._tokenizer, model.vocab_size) for item in sequences]
        lengths = [len(ids) for ids in tokens]
        for length in lengths:
            self._check_length(length, 0)
        requests = []
        for ids, cuts in zip(tokens, chunk_ends(schedule, lengths, self._config.max_batch_tokens)):
            arrival = next(self._arrivals)
            logits = torch.empty(len(ids), model.vocab_size, device=model.device)
            requests.append(ScoreRequest(f"regraft-score-{arrival}", arrival, ids, cuts, logits))
        return requests

    def detokenizer(self) -> Detokenizer | None:
        """For the text of a stream; None without a tokenizer."""
        return None if self._tokenizer is None else Detokenizer(self._tokenizer)

    def _check_length(self, num_prompt: int, num_new: int) -> None:
        check_length(num_prompt, num_new, self._model.max_positions, self._max_cached)


def _check_end(tokens: Any, vocab_size: int) -> None:
    """Of an `eos_token_id` that a caller gives. The config of a model may name tokens that this one never makes."""
    for token in integers(tokens):
        if token >= vocab_size:
            raise RequestError(
                f"eos_token_id names token {token}, outside the vocabulary of {vocab_size} (0 to "
                f"{vocab_size - 1}): no request would end with it"
            )


def _child_params(params: SamplingParams, index: int) -> SamplingParams:
    """Those of the `index`-th of several requests for one prompt: each has random numbers of its own."""
    if not index or params.seed is None:
        return params
    return replace(params, seed=derived_seed(params.seed, index))
