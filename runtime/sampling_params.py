"""How one request's tokens are chosen and when it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .errors import RequestError

_COUNTS = (
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "top_logprobs",
)
_FLAGS = ("do_sample", "logprobs", "prompt_logprobs", "remove_invalid_values")


class WarpParams(NamedTuple):
    """What shapes the distribution of a sampled token, whatever came before it.

    Meanings and order of application are those of transformers. Rows with equal values are warped
    together.
    """

    temperature: float = 1.0
    top_h: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0


_PLAIN = WarpParams()


@dataclass(frozen=True)
class SamplingParams:
    """Checked settings of one request; names and meanings are GenerationConfig's.

    Regraft's own are: `seed`, of the request's own random numbers; `logprobs`, whether its output
    carries log-probabilities; `top_logprobs`, of how many of the likeliest tokens at each place too;
    `prompt_logprobs`, whether of the prompt's tokens too; `logits_processor`, processors of the
    caller's, as `generate` takes them; `json_schema` and `regex`, one of which the text then is of;
    `cache_salt`, with which alone it shares a prefix cache (a tenant's name, say).
    Lists are tuples. A wrong value is a RequestError.
    """

    max_new_tokens: int
    eos_token_id: tuple[int, ...] = ()
    do_sample: bool = False
    warp: WarpParams = _PLAIN
    seed: int | None = None
    logprobs: bool = True
    min_length: int = 0
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    encoder_repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    sequence_bias: Any = None
    bad_words_ids: Any = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] | None = None
    remove_invalid_values: bool = False
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: tuple[int, ...] | None = None
    begin_suppress_tokens: tuple[int, ...] | None = None
    num_return_sequences: int = 1
    stop_strings: tuple[str, ...] = ()
    max_time: float | None = None
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    logits_processor: tuple[Any, ...] = ()
    json_schema: Any = None
    regex: str | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if not _is_int(self.max_new_tokens) or self.max_new_tokens < 1:
            raise RequestError(
                f"max_new_tokens={self.max_new_tokens!r}: ask for a whole number of 1 or more"
            )
        for name in _COUNTS:
            _check(name, getattr(self, name), "a whole number of 0 or more", _is_natural)
        for name in ("repetition_penalty", "encoder_repetition_penalty"):
            _check(name, getattr(self, name), "a number above 0", _is_scale)
        for name in _FLAGS:
            _check(name, getattr(self, name), "True or False", _is_bool)
        for name in ("eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
            tokens = getattr(self, name) or ()
            _check(name, tokens, "a token id or a list of them", _are_tokens)
        words = self.bad_words_ids
        _check("bad_words_ids", words, "a list of lists of token ids, none empty", _are_not_empty)
        self._check_ends()
        self._check_additions()
        if self.cache_salt is not None:
            _check("cache_salt", self.cache_salt, "a text, or None", _is_text)
        if self.seed is not None:
            _check("seed", self.seed, "a whole number from 0 to 2**63 - 1", _is_seed)
        if self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens={self.min_new_tokens} is more than "
                f"max_new_tokens={self.max_new_tokens}: lower the first or raise the second"
            )
        if self.do_sample:
            _check_warp(self.warp)

    def _check_ends(self) -> None:
        stops = self.stop_strings
        _check("stop_strings", stops, "a text or a list of texts, none empty", _are_texts)
        if self.max_time is not None:
            _check("max_time", self.max_time, "seconds above 0", _is_scale)
        number = self.num_return_sequences
        if not _is_int(number) or number < 1:
            raise RequestError(f"num_return_sequences={number!r}: give a whole number of 1 or more")

    def _check_additions(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise RequestError(f"top_logprobs={self.top_logprobs} needs logprobs=True")
        for processor in self.logits_processor:
            if not callable(processor):
                raise RequestError(
                    f"logits_processor holds {processor!r}, which cannot be called: give "
                    "LogitsProcessor objects"
                )
        if self.json_schema is not None and self.regex is not None:
            raise RequestError("json_schema and regex both say what the text is: give one of them")
        if self.json_schema is not None:
            wanted = "a JSON schema as a dict, or its text"
            _check("json_schema", self.json_schema, wanted, _is_schema)
        if self.regex is not None:
            _check("regex", self.regex, "a regular expression as text", _is_text)


def derived_seed(seed: int, index: int) -> int:
    """The seed of the `index`-th of several requests that come of one seed."""
    return int(np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0] >> 1)


def _check_warp(warp: WarpParams) -> None:
    share = "a number from 0 to 1"
    _check(
        "temperature", warp.temperature, "a number above 0 (for greedy: do_sample=False)", _is_scale
    )
    _check("top_k", warp.top_k, "a whole number of 0 (off) or more", _is_natural)
    for name in ("top_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
        _check(name, getattr(warp, name), share, _is_share)
    for name in ("min_p", "top_h"):
        if getattr(warp, name) is not None:
            _check(name, getattr(warp, name), share, _is_share)


def _check(name: str, value: Any, wanted: str, is_right: Any) -> None:
    if not is_right(value):
        raise RequestError(f"{name}={value!r}: give {wanted}")


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_natural(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_seed(value: Any) -> bool:
    return _is_int(value) and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _is_scale(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _are_not_empty(value: Any) -> bool:
    """Whether nothing in it is an empty list. Transformers checks the rest, and would ban nothing."""
    lists = value if isinstance(value, (list, tuple)) else ()
    return not any(isinstance(item, list) and not item for item in lists)


def _are_tokens(value: Any) -> bool:
    return all(_is_natural(token) for token in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _are_texts(value: Any) -> bool:
    return all(_is_text(text) for text in value)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict) or _is_text(value)
