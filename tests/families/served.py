"""What the tests of whole models share: one engine a family, and the model's own word on what is right.

The reference is always the plain model's forward without a cache, one text at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

import regraft
from regraft.rewriter.validate import reference_logits
from regraft.runtime.output import RequestOutput

LOGITS = 1e-4
"""Largest absolute difference to the no-cache forward (float32)."""
SIZES = {"page_size": 4, "cache_tokens": 1024, "max_requests": 8, "validate": "off"}


def wrap(model: PreTrainedModel, **settings: object) -> regraft.Engine:
    """A small engine; `settings` over SIZES."""
    return regraft.wrap(model, **{**SIZES, **settings})


def forward(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Logits `[len, vocab]` of the plain model."""
    (logits,) = reference_logits(model, [tokens])
    return logits


def continue_greedily(model: PreTrainedModel, tokens: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens by the plain model alone."""
    known = list(tokens)
    for _ in range(count):
        known.append(int(forward(model, known)[-1].argmax()))
    return known[len(tokens) :]


def worst(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest absolute difference; a NaN anywhere is infinite."""
    differences = [float((a - e).abs().max()) for a, e in zip(actual, expected, strict=True)]
    return max(d if d == d else float("inf") for d in differences)


def run_to_end(engine: regraft.Engine) -> dict[str, RequestOutput]:
    """Steps until nothing is left; the outputs of `add_request`'s requests by id."""
    outputs = {}
    while engine.has_unfinished:
        for event in engine.step():
            if event.output is not None:
                outputs[event.request_id] = event.output
    return outputs
