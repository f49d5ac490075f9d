"""Transformers' own logits processors, built for one request.

Two lists, in the order in which `generate` applies them. The first sees the request's whole
history, prompt and output, and is applied row by row. The second shapes the distribution of a
sampled token and knows nothing of the history, so that rows with equal settings share one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers.generation import logits_process as lp

from .errors import RequestError
from .sampling_params import SamplingParams, WarpParams


def build_processors(
    params: SamplingParams, prompt: Sequence[int], vocab_size: int, device: torch.device
) -> lp.LogitsProcessorList | None:
    """What changes this request's scores by its history; None if nothing does.

    A value that a processor does not take is a RequestError.
    """
    _check_vocabulary(params, vocab_size)
    # As in `generate`: a caller's processor comes last, or in place of the built-in one of its type.
    own = {type(processor): processor for processor in reversed(params.logits_processor)}
    try:
        processors = lp.LogitsProcessorList(
            own.get(type(built_in), built_in)
            for built_in in _history_processors(params, prompt, device)
        )
        processors.extend(p for p in params.logits_processor if p not in processors)
    except ValueError as error:
        raise RequestError(str(error)) from error
    return processors or None


def _history_processors(
    params: SamplingParams, prompt: Sequence[int], device: torch.device
) -> Iterator[lp.LogitsProcessor]:
    eos = torch.tensor(params.eos_token_id, device=device) if params.eos_token_id else None
    prompt_ids = torch.tensor([list(prompt)], device=device)
    start, where = len(prompt), str(device)
    if params.sequence_bias is not None:
        yield lp.SequenceBiasLogitsProcessor(params.sequence_bias)
    if params.encoder_repetition_penalty != 1.0:
        yield lp.EncoderRepetitionPenaltyLogitsProcessor(
            params.encoder_repetition_penalty, prompt_ids
        )
    if params.repetition_penalty != 1.0:
        yield lp.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))
    if params.no_repeat_ngram_size:
        yield lp.NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size)
    if params.encoder_no_repeat_ngram_size:
        yield lp.EncoderNoRepeatNGramLogitsProcessor(
            params.encoder_no_repeat_ngram_size, prompt_ids
        )
    if params.bad_words_ids is not None:
        yield lp.NoBadWordsLogitsProcessor(params.bad_words_ids, eos)
    if eos is not None and params.min_length > start:
        yield lp.MinLengthLogitsProcessor(params.min_length, eos, device=where)
    if eos is not None and params.min_new_tokens:
        yield lp.MinNewTokensLengthLogitsProcessor(start, params.min_new_tokens, eos, device=where)
    yield from _forcing_processors(params, start, eos, where)


def _forcing_processors(
    params: SamplingParams, start: int, eos: torch.Tensor | None, where: str
) -> Iterator[lp.LogitsProcessor]:
    if params.forced_bos_token_id is not None:
        yield lp.ForcedBOSTokenLogitsProcessor(params.forced_bos_token_id)
    if params.forced_eos_token_id is not None:
        yield lp.ForcedEOSTokenLogitsProcessor(
            start + params.max_new_tokens, list(params.forced_eos_token_id), device=where
        )
    if params.remove_invalid_values:
        yield lp.InfNanRemoveLogitsProcessor()
    if params.exponential_decay_length_penalty is not None:
        if eos is None:
            raise RequestError(
                f"exponential_decay_length_penalty={params.exponential_decay_length_penalty} "
                "needs an eos_token_id"
            )
        yield lp.ExponentialDecayLengthPenalty(params.exponential_decay_length_penalty, eos, start)
    if params.suppress_tokens is not None:
        yield lp.SuppressTokensLogitsProcessor(list(params.suppress_tokens), device=where)
    if params.begin_suppress_tokens is not None:
        begin = start if start > 1 or params.forced_bos_token_id is None else start + 1
        yield lp.SuppressTokensAtBeginLogitsProcessor(
            list(params.begin_suppress_tokens), begin, device=where
        )


@lru_cache(maxsize=256)
def build_warpers(warp: WarpParams, device: torch.device) -> lp.LogitsProcessorList:
    """What shapes the distribution of a sampled token, in order; empty if nothing does.

    A value that a warper does not take is a RequestError.
    """
    try:
        return lp.LogitsProcessorList(_warpers(warp, str(device)))
    except ValueError as error:
        raise RequestError(str(error)) from error


def divisor_of(warp: WarpParams) -> float:
    """What scores are divided by: the temperature, held where float32 scores divided by it stay finite and distinct.

    Below that only the best is left in any case, and above it all are equal.
    """
    return min(max(float(warp.temperature), 1e-20), 1e30)


def _warpers(warp: WarpParams, where: str) -> Iterator[lp.LogitsProcessor]:
    if warp.temperature != 1.0:
        yield lp.TemperatureLogitsWarper(divisor_of(warp))
    if warp.top_h is not None:
        yield lp.TopHLogitsWarper(warp.top_h)
    if warp.top_k:
        yield lp.TopKLogitsWarper(warp.top_k)
    if warp.top_p < 1.0:
        yield lp.TopPLogitsWarper(warp.top_p)
    if warp.min_p is not None:
        yield lp.MinPLogitsWarper(warp.min_p)
    if warp.typical_p < 1.0:
        yield lp.TypicalLogitsWarper(warp.typical_p)
    if 0.0 < warp.epsilon_cutoff < 1.0:
        yield lp.EpsilonLogitsWarper(warp.epsilon_cutoff)
    if 0.0 < warp.eta_cutoff < 1.0:
        yield lp.EtaLogitsWarper(warp.eta_cutoff, device=where)


def _check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Refuses token ids that no row of logits has: a processor would fail on them mid-run."""
    for name in (
        "sequence_bias",
        "bad_words_ids",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "suppress_tokens",
        "begin_suppress_tokens",
    ):
        for token in integers(getattr(params, name)):
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"{name} names token {token}, outside the vocabulary of {vocab_size} (0 to "
                    f"{vocab_size - 1})"
                )


def integers(value: Any) -> Iterator[int]:
    """Every integer of a nested value, the keys of a dict included."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value:
            yield from integers(item)
