"""transformers' own ways to answer many prompts, timed: what Regraft is compared with, in the same process.

Every function takes the same prompts and output lengths, decodes greedily and returns a `Run`. A request stops at
the model's end token or at its own length; tokens that a method computes beyond that are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.utils import logging

TokenIds = list[list[int]]

# Of transformers' continuous batching: the fastest of those tried on two cores.
PAGE_SIZE = 16
MAX_BATCH_TOKENS = 256


@dataclass(frozen=True)
class Run:
    """One method's outputs and how long all of them took, from the first prompt to the last token."""

    name: str
    seconds: float
    token_ids: TokenIds

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def timed(name: str, produce: Callable[[], TokenIds]) -> Run:
    """Run `produce` once and time it."""
    begin = time.perf_counter()
    token_ids = produce()
    return Run(name, time.perf_counter() - begin, token_ids)


def one_by_one(model: PreTrainedModel, prompts: TokenIds, lengths: list[int]) -> TokenIds:
    """`generate` for each prompt on its own, one after the other."""
    outputs = []
    for prompt, length in zip(prompts, lengths, strict=True):
        ids = torch.tensor([prompt], device=model.device)
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=length, do_sample=False)
        outputs.append(_cut(out[0, len(prompt) :].tolist(), length, model))
    return outputs


def padded(model: PreTrainedModel, prompts: TokenIds, lengths: list[int]) -> TokenIds:
    """One `generate` for all prompts, padded on the left, run to the longest output."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    out = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max(lengths),
        do_sample=False,
    )
    rows = out[:, width:].tolist()
    return [_cut(row, length, model) for row, length in zip(rows, lengths, strict=True)]


def generate_batch(model: PreTrainedModel, prompts: TokenIds, lengths: list[int]) -> TokenIds:
    """transformers' continuous batching.

    `generate_batch` itself knows one output length for all; the manager behind it takes one per request, which is
    the faster way for different lengths, and is what it is given here. Its cache is sized for these requests: by
    default it takes 90% of the memory and, without FlashAttention, a mask of its batch times that cache.
    """
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max(lengths),
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=model.generation_config.pad_token_id,
    )
    pages = [-(-(len(prompt) + n) // PAGE_SIZE) for prompt, n in zip(prompts, lengths, strict=True)]
    sizes = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=sum(pages) + 1,
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_requests_per_batch=len(prompts),
    )
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    outputs: dict[str, list[int]] = {}
    try:
        with model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=sizes, block=True, timeout=5
        ) as manager:
            for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
                manager.add_request(prompt, request_id=str(index), max_new_tokens=length)
            while len(outputs) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(f"generate_batch failed: {result.error}")
                    outputs[result.request_id] = result.generated_tokens
                elif result is None and not manager.is_running():
                    raise RuntimeError("transformers' continuous batching stopped by itself")
    finally:
        logging.set_verbosity(verbosity)
    return [_cut(outputs[str(i)], length, model) for i, length in enumerate(lengths)]


BASELINES: dict[str, Callable[[PreTrainedModel, TokenIds, list[int]], TokenIds]] = {
    "transformers generate, one by one": one_by_one,
    "transformers generate, padded": padded,
    "transformers generate_batch": generate_batch,
}


def _cut(tokens: list[int], length: int, model: PreTrainedModel) -> list[int]:
    """The tokens up to `length`, and up to and with the first end token."""
    ends = model.generation_config.eos_token_id
    stop = {ends} if isinstance(ends, int) else set(ends or ())
    tokens = tokens[:length]
    for index, token in enumerate(tokens):
        if token in stop:
            return tokens[: index + 1]
    return tokens
