"""Makes requests out of what a caller gives, after every check that needs no step to be run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from . import sampler
from .config import EngineConfig
from .errors import RequestError
from .generation_config import resolve
from .prompts import check_length, to_token_ids
from .request import Request, ScoreRequest
from .runner import RewrittenModel
from .schedules import Schedule, chunk_ends
from .text import Detokenizer


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
        self._generation_config = generation_config
        self._arrivals = itertools.count()

    def make(
        self,
        prompts: Sequence[Any],
        generation_config: GenerationConfig | None,
        fields: Mapping[str, Any],
        request_id: str | None = None,
    ) -> list[Request]:
        """One request per prompt, all of them checked; `request_id` is for a single one."""
        if request_id is not None and not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r} is no str: give a str, or none")
        model = self._model
        tokens = [to_token_ids(prompt, self._tokenizer, model.vocab_size) for prompt in prompts]
        lengths = [len(ids) for ids in tokens]
        all_params = resolve(
            self._generation_config, generation_config, fields, lengths, model.max_positions
        )
        requests = []
        for ids, params in zip(tokens, all_params):
            self._check_length(len(ids), params.max_new_tokens)
            arrival = next(self._arrivals)
            name = f"regraft-request-{arrival}" if request_id is None else request_id
            request = Request(name, arrival, ids, params)
            seed = (self._config.seed, arrival)
            sampler.prepare(request, model.vocab_size, model.device, seed)
            requests.append(request)
        return requests

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
