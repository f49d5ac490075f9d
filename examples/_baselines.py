"""transformers' own ways to answer many prompts, timed: what Regraft is compared with, in the same process.

Every function takes the same prompts and output lengths, decodes greedily and returns a `Run`. A request stops at
the model's end token or at its own length; tokens that a method computes beyond that are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from regraft.runtime.bench.peers import TokenIds, cut, generate_batch, pad_left


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
        outputs.append(cut(out[0, len(prompt) :].tolist(), length, model))
    return outputs


def padded(model: PreTrainedModel, prompts: TokenIds, lengths: list[int]) -> TokenIds:
    """One `generate` for all prompts, padded on the left, run to the longest output."""
    ids, mask = pad_left(prompts)
    out = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max(lengths),
        do_sample=False,
    )
    rows = out[:, ids.shape[1] :].tolist()
    return [cut(row, length, model) for row, length in zip(rows, lengths, strict=True)]


BASELINES: dict[str, Callable[[PreTrainedModel, TokenIds, list[int]], TokenIds]] = {
    "transformers generate, one by one": one_by_one,
    "transformers generate, padded": padded,
    "transformers generate_batch": generate_batch,
}
