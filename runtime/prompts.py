"""Prompts as they come in, checked: lists of token ids or, with a tokenizer, texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .errors import RequestError


def as_list(prompts: Any, what: str = "prompts") -> list[Any]:
    """The prompts of one call; a single prompt where a list of them belongs is a RequestError."""
    if isinstance(prompts, (str, bytes, dict)) or not isinstance(prompts, Sequence):
        raise RequestError(
            f"{what} is a {type(prompts).__name__}: give a list, one item per prompt "
            f"(a single one as [{what[:-1]}])"
        )
    if any(isinstance(prompt, (int, np.integer)) for prompt in prompts):
        raise RequestError(
            f"{what} holds a token id where a whole prompt belongs: give a list of lists of token "
            f"ids (a single prompt as [{what[:-1]}])"
        )
    return list(prompts)


def to_token_ids(prompt: Any, tokenizer: Any, vocab_size: int) -> list[int]:
    """The token ids of one prompt; RequestError if it is empty or not made of the vocabulary."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(
                f"the prompt {_short(prompt)} is text, and the engine has no tokenizer: give token "
                "ids, or the engine a tokenizer"
            )
        prompt = tokenizer(prompt)["input_ids"]
    not_ids = f"the prompt {_short(prompt)} is no flat list of whole numbers: give its token ids"
    try:
        ids = prompt.cpu().numpy() if isinstance(prompt, torch.Tensor) else np.asarray(prompt)
    except ValueError as error:  # lists of unequal lengths
        raise RequestError(not_ids) from error
    if ids.size == 0:
        raise RequestError("the prompt is empty: give at least one token")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError(not_ids)
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if wrong.size:
        raise RequestError(
            f"token {ids[wrong[0]]} at index {wrong[0]} of the prompt is outside the vocabulary of "
            f"{vocab_size} (0 to {vocab_size - 1})"
        )
    return ids.tolist()


def check_length(num_prompt: int, num_new: int, max_positions: int | None, max_cached: int) -> None:
    """RequestError if a request of this length fits neither the model nor the cache.

    Its last new token is chosen, and never computed: it takes neither a position nor a place in the cache.
    """
    total = num_prompt + max(num_new - 1, 0)
    asked = f"a prompt of {num_prompt} tokens" + (f" and {num_new} new ones" if num_new else "")
    last = " (the last of them takes none)" if num_new else ""
    if max_positions is not None and total > max_positions:
        raise RequestError(
            f"{asked} are more than the {max_positions} positions of the model{last}: shorten the "
            "prompt or lower max_new_tokens"
        )
    if total > max_cached:
        raise RequestError(
            f"{asked} are more than the {max_cached} tokens of the cache{last}: shorten the prompt, "
            "lower max_new_tokens, or give the engine more cache_tokens"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
