"""transformers' own ways to answer many prompts, and vLLM's, behind one signature: what Regraft is measured beside.

A way is made once (that may take a while), and then run with prompts and the number of new tokens, greedily, ends
ignored where the model has none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.utils import logging

TokenIds = list[list[int]]
Way = Callable[[TokenIds, int], object]

# Of transformers' continuous batching: the fastest of those tried on two cores.
PAGE_SIZE = 16
MAX_BATCH_TOKENS = 256


@dataclass(frozen=True)
class Load:
    """What is measured: requests, shortest and longest prompt, new tokens a request, most tokens of a step."""

    requests: int = 128
    prompt: tuple[int, int] = (128, 1024)
    new: int = 256
    tokens: int = 8192
    repeats: int = 2


def padded(model: Any, load: Load, **settings: Any) -> Way:
    """transformers' `generate`: one batch, padded on the left."""

    def run(prompts: TokenIds, new: int) -> object:
        ids, mask = pad_left(prompts)
        return model.generate(
            ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=new, min_new_tokens=new,
            do_sample=False, **settings,
        )  # fmt: skip

    return run


def pad_left(prompts: TokenIds) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, int64 [B, longest]; zero where a row is padded."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def static(model: Any, load: Load) -> Way:
    """The same with a static cache, for which transformers compiles the model."""
    return padded(model, load, cache_implementation="static")


def batch(model: Any, load: Load) -> Way:
    """transformers' continuous batching."""
    return lambda prompts, new: generate_batch(model, prompts, [new] * len(prompts))


def vllm(model: Any, load: Load) -> Way:
    """vLLM with weights of its own in this shape; it wants most of the card, so the model is moved away."""
    from vllm import LLM, SamplingParams

    folder = tempfile.mkdtemp()
    model.config.save_pretrained(folder)
    model.to("cpu")
    torch.cuda.empty_cache()
    engine = LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=load.requests)

    def run(prompts: TokenIds, new: int) -> object:
        settings = SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        return engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], settings, use_tqdm=False
        )

    return run


PEERS: dict[str, Callable[[Any, Load], Way]] = {
    "generate": padded,
    "static": static,
    "batch": batch,
    "vllm": vllm,
}


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
    return [cut(outputs[str(i)], length, model) for i, length in enumerate(lengths)]


def cut(tokens: list[int], length: int, model: PreTrainedModel) -> list[int]:
    """The tokens up to `length`, and up to and with the first end token."""
    ends = model.generation_config.eos_token_id
    stop = {ends} if isinstance(ends, int) else set(ends or ())
    tokens = tokens[:length]
    for index, token in enumerate(tokens):
        if token in stop:
            return tokens[: index + 1]
    return tokens
