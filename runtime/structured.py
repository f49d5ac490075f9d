"""Text of a JSON schema or a regular expression: what a request's next token may be.

Needs the optional package llguidance (extra `structured`).
"""

from __future__ import annotations

import importlib
import json
import threading
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers.generation.logits_process import LogitsProcessor

from .errors import RequestError
from .sampling_params import SamplingParams

_tokenizers: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
_making = threading.Lock()

_LEXER_FUEL = 50_000
"""Work that a grammar may cost at its start, and at each token (expressions made; about a tenth of a second)."""


class GrammarProcessor(LogitsProcessor):
    """Leaves one request the tokens with which its text still is of the grammar.

    When the text is complete that is the end-of-sequence token alone. Keeps its place: it follows
    the history that it is called with, which only grows.
    """

    def __init__(self, matcher: Any, num_prompt: int) -> None:
        self._matcher = matcher
        self._num_read = num_prompt

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores [1, vocab] with those of impossible tokens at -inf."""
        for token in input_ids[0, self._num_read :].tolist():
            # The token that ended the text is none of the grammar's.
            if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
                raise ValueError(f"token {token} leaves the grammar: {self._matcher.get_error()}")
        self._num_read = input_ids.shape[1]
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())
        allowed = np.unpackbits(bits, bitorder="little")[: scores.shape[-1]].astype(bool)
        mask = torch.zeros(scores.shape[-1], dtype=torch.bool)
        mask[: len(allowed)] = torch.from_numpy(allowed)
        return scores.masked_fill(~mask.to(scores.device), -torch.inf)  # type: ignore[return-value]


def with_end(params: SamplingParams, tokenizer: Any) -> SamplingParams:
    """A structured text that nothing else ends is ended by the tokenizer's end-of-sequence token."""
    is_structured = params.json_schema is not None or params.regex is not None
    end = getattr(tokenizer, "eos_token_id", None)
    if not is_structured or params.eos_token_id or end is None:
        return params
    return replace(params, eos_token_id=(end,))


def grammar_processor(
    params: SamplingParams, num_prompt: int, tokenizer: Any, vocab_size: int
) -> GrammarProcessor | None:
    """For what `json_schema` or `regex` say, None where neither is given; RequestError for a wrong one."""
    if params.json_schema is None and params.regex is None:
        return None
    field = "regex" if params.json_schema is None else "json_schema"
    if tokenizer is None:
        raise RequestError(f"{field} is about text: give the engine a tokenizer")
    guidance = _import(field)
    try:
        grammar = _grammar(guidance, params)
    except ValueError as error:
        raise RequestError(f"{field}={getattr(params, field)!r}: {error}") from error
    known = _known_tokenizer(guidance, tokenizer, vocab_size, params.eos_token_id)
    limits = guidance.LLParserLimits(
        initial_lexer_fuel=_LEXER_FUEL, step_lexer_fuel=_LEXER_FUEL, verbose_errors=False
    )
    matcher = guidance.LLMatcher(known, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first is the dearest: here, where nobody else waits for it
    if matcher.is_error():
        raise RequestError(f"{field}={getattr(params, field)!r}: {matcher.get_error()}")
    return GrammarProcessor(matcher, num_prompt)


def _import(field: str) -> Any:
    try:
        importlib.import_module("llguidance.hf")
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise RequestError(
            f"{field} needs the package llguidance: pip install 'regraft[structured]'"
        ) from error


def _grammar(guidance: Any, params: SamplingParams) -> str:
    if params.regex is not None:
        return guidance.LLMatcher.grammar_from_regex(params.regex)
    schema = params.json_schema
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return guidance.LLMatcher.grammar_from_json_schema(text)


def _known_tokenizer(guidance: Any, tokenizer: Any, vocab_size: int, eos: tuple[int, ...]) -> Any:
    """Made once per tokenizer: it takes about a second for a large vocabulary."""
    if not eos:
        raise RequestError("a structured text needs an eos_token_id to end with: give one")
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise RequestError(
            f"structured text needs a fast tokenizer, and {type(tokenizer).__name__} is none"
        )
    with _making:
        made = _tokenizers.setdefault(tokenizer, {})
        key = (max(vocab_size, len(tokenizer)), eos)
        if key not in made:
            made[key] = guidance.hf.from_tokenizer(tokenizer, n_vocab=key[0], eos_token=list(eos))
        return made[key]
