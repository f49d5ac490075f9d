"""From transformers' GenerationConfig, or its fields as keywords, to one SamplingParams a prompt.

Precedence is that of `generate`: keywords, then the config given, then the model's own config,
then transformers' defaults. Every field is one of four: served; irrelevant to an engine (how
transformers would run a request, not what comes out); unsupported, refused unless it asks for
nothing; or unknown, refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from transformers import GenerationConfig

from .errors import RequestError
from .sampling_params import SamplingParams, WarpParams

_OWN = (
    *("seed", "logprobs", "top_logprobs", "prompt_logprobs"),
    *("logits_processor", "json_schema", "regex", "cache_salt"),
)
_LENGTHS = ("max_new_tokens", "max_length")
_PARAMS = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name != "warp")
_SERVED = frozenset((*_PARAMS, *WarpParams._fields, *_LENGTHS))

_IRRELEVANT = frozenset(
    (
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory"),
        *("compile_config", "disable_compile", "prefill_chunk_size", "continuous_batching_config"),
        *("pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version"),
        # Of beam search and of drafting, both themselves refused below.
        *("early_stopping", "length_penalty", "is_assistant", "max_matching_ngram_size"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_lookbehind"),
        *("assistant_confidence_threshold", "assistant_ensemble_weight", "target_lookbehind"),
        # The engine's log-probabilities are normalised, and no other scores come out.
        *("renormalize_logits", "return_dict_in_generate"),
    )
)

_DEFAULTS: dict[str, Any] = {"max_length": None, "top_k": 50, "max_new_tokens": None}
"""Transformers' own defaults, where they are not those of SamplingParams and WarpParams."""

_DEFAULT_NEW_TOKENS = 20

_ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "guidance_scale": (1,),
    "diversity_penalty": (0,),
    "penalty_alpha": (0,),
}
"""Values of unsupported fields that change nothing; None and False do so for every field."""

_LIST_DEPTH = {
    "eos_token_id": 1,
    "stop_strings": 1,
    "logits_processor": 1,
    "suppress_tokens": 1,
    "begin_suppress_tokens": 1,
    "forced_eos_token_id": 1,
    "exponential_decay_length_penalty": 1,
    "bad_words_ids": 2,
    "sequence_bias": 3,
}
"""Fields that are lists by nature, and how deep: one level more is one value per prompt."""


def resolve(
    model_config: GenerationConfig | None,
    generation_config: GenerationConfig | None,
    fields: Mapping[str, Any],
    prompt_lengths: Sequence[int],
    max_positions: int | None,
) -> list[SamplingParams]:
    """One SamplingParams per prompt; `fields` are keywords. A wrong field is a RequestError.

    A config with a temperature but without sampling decodes greedily, as in `generate`: often it is
    a model's own with one field changed. A keyword without any effect is an error.
    """
    given = {**_config_fields(generation_config), **fields}
    _check_names(given)
    _check_padding(fields)
    own = {k: v for k, v in _config_fields(model_config).items() if k in _known_names()}
    columns = {
        name: _per_prompt(name, value, len(prompt_lengths))
        for name, value in {**_DEFAULTS, **own, **given}.items()
        if name not in _IRRELEVANT
    }
    resolved = []
    for index, length in enumerate(prompt_lengths):
        values = {name: column[index] for name, column in columns.items()}
        _check_supported(values)
        resolved.append(_params(values, given, length, max_positions))
    _check_effect(fields, resolved)
    return resolved


def _config_fields(config: GenerationConfig | None) -> dict[str, Any]:
    """The fields of a config that are set."""
    if config is None:
        return {}
    if not isinstance(config, GenerationConfig):
        raise RequestError(
            f"generation_config={config!r} is a {type(config).__name__}: give a transformers "
            "GenerationConfig, or its fields as keywords"
        )
    return {k: v for k, v in vars(config).items() if v is not None and not k.startswith("_")}


@cache
def _known_names() -> frozenset[str]:
    return frozenset(k for k in vars(GenerationConfig()) if not k.startswith("_")) | set(_OWN)


def _check_names(given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in _known_names():
            raise RequestError(
                f"{name!r} is no field of GenerationConfig (value {given[name]!r}): leave it out, "
                f"or did you mean one of {', '.join(sorted(_SERVED))}?"
            )


def _check_padding(fields: Mapping[str, Any]) -> None:
    """Nothing is padded here, but a number that no token has is a mistake. Configs of models say -1 for none."""
    token = fields.get("pad_token_id")
    if token is not None and not (isinstance(token, (int, np.integer)) and token >= 0):
        raise RequestError(f"pad_token_id={token!r}: give a token id, or leave it out")


def _check_supported(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        asks_nothing = value is None or value is False or value in _ASKS_NOTHING.get(name, ())
        if name not in _SERVED and not asks_nothing:
            raise RequestError(
                f"{name}={value!r} is not supported: pass {name}="
                f"{_ASKS_NOTHING.get(name, (None,))[0]!r}, or leave it out"
            )


def _per_prompt(name: str, value: Any, count: int) -> Sequence[Any]:
    """The value of each of `count` prompts."""
    if not isinstance(value, list) or _depth(value) <= _LIST_DEPTH.get(name, 0):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} values for {count} prompts: give one for each")
    return value


def _depth(value: Any) -> int:
    """How deep lists are nested; a dict counts as deep as a sequence bias written as lists."""
    if isinstance(value, dict):
        return _LIST_DEPTH["sequence_bias"]
    if not isinstance(value, (list, tuple)):
        return 0
    return 1 + max((_depth(item) for item in value), default=0)


def _params(
    values: Mapping[str, Any], given: Mapping[str, Any], prompt_length: int, limit: int | None
) -> SamplingParams:
    """SamplingParams of one prompt from its resolved fields; None means a field's default."""
    set_values = {name: _plain(value) for name, value in values.items() if value is not None}
    params = {name: set_values[name] for name in _PARAMS if name in set_values}
    warp = {name: set_values[name] for name in WarpParams._fields if name in set_values}
    params["max_new_tokens"] = _max_new_tokens(set_values, given, prompt_length, limit)
    for name, depth in _LIST_DEPTH.items():
        if depth == 1 and name in params:
            value = params[name]
            params[name] = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    # Transformers' word for "none": the model's own is not to be used either.
    if -1 in params.get("eos_token_id", ()):
        params["eos_token_id"] = tuple(t for t in params["eos_token_id"] if t != -1)
    return SamplingParams(warp=WarpParams(**warp), **params)


def _max_new_tokens(
    values: Mapping[str, Any], given: Mapping[str, Any], prompt_length: int, limit: int | None
) -> int:
    if given.get("max_new_tokens") is not None and given.get("max_length") is not None:
        raise RequestError(
            f"max_new_tokens={given['max_new_tokens']!r} and max_length={given['max_length']!r} "
            "both say how long the output is: give one of them"
        )
    if given.get("max_length") is None and "max_new_tokens" in values:
        return values["max_new_tokens"]
    if "max_length" in values:
        max_length = values["max_length"]
        if not isinstance(max_length, int) or max_length <= prompt_length:
            raise RequestError(
                f"max_length={max_length!r} leaves no room after a prompt of {prompt_length} "
                "tokens: raise it, or give max_new_tokens"
            )
        return max_length - prompt_length
    room = _DEFAULT_NEW_TOKENS if limit is None else max(1, limit - prompt_length)
    return min(_DEFAULT_NEW_TOKENS, room)


def _check_effect(fields: Mapping[str, Any], resolved: Sequence[SamplingParams]) -> None:
    """Refuses keywords that shape a sampled distribution when nothing is sampled."""
    if any(params.do_sample for params in resolved):
        return
    for name, default in WarpParams._field_defaults.items():
        value = fields.get(name)
        if name in fields and value is not None and value != default and resolved:
            raise RequestError(
                f"{name}={value!r} has no effect on greedy decoding: pass do_sample=True, or "
                "leave it out"
            )


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's."""
    return value.item() if isinstance(value, np.generic) else value
