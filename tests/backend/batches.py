"""The calls that the backend serves, as batches of the same texts, and what the model itself says of each text."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from regraft.rewriter.backend_report import GraphReport, backend_reports, clear_backend_reports
from tests.families.models import FAMILIES

LENGTHS = (21, 6, 1, 13)
FORMS = ("plain", "padded right", "padded left", "packed")

# Absolute, on logits whose spread is about 1: what float32 leaves of a forward in another order.
LOGITS = 1e-4


def slow_but(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Parameters for pytest: all of `names`, marked slow but for the quick ones."""
    return [pytest.param(n, marks=[] if n in quick else pytest.mark.slow) for n in names]


@dataclass(frozen=True)
class Batch:
    """One call: its keyword arguments, and how to read each text's rows off what it returns [B, T, ...]."""

    texts: list[Tensor]
    inputs: dict[str, Tensor]
    rows: list[tuple[int, slice]]

    def split(self, values: Tensor) -> list[Tensor]:
        return [values[row, tokens] for row, tokens in self.rows]


def texts(name: str, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    family = FAMILIES[name]
    return [family.prompt(min(n, family.max_length), seed=n) for n in lengths]


def batch(form: str, sequences: list[Tensor]) -> Batch:
    """The texts in one of `FORMS`; a plain batch has the first of them several times over, shifted."""
    if form == "packed":
        bounds = [0, *torch.tensor([len(s) for s in sequences]).cumsum(0).tolist()]
        positions = torch.cat([torch.arange(len(s)) for s in sequences])
        rows = [(0, slice(start, end)) for start, end in pairwise(bounds)]
        inputs = {"input_ids": torch.cat(sequences)[None], "position_ids": positions[None]}
        return Batch(sequences, inputs, rows)
    if form == "plain":
        same = [sequences[0].roll(shift) for shift in range(3)]
        rows = [(row, slice(None)) for row in range(3)]
        return Batch(same, {"input_ids": torch.stack(same)}, rows)
    longest = max(map(len, sequences))
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    rows = []
    for row, sequence in enumerate(sequences):
        start = longest - len(sequence) if form == "padded left" else 0
        tokens = slice(start, start + len(sequence))
        ids[row, tokens], mask[row, tokens] = sequence, 1
        rows.append((row, tokens))
    return Batch(sequences, {"input_ids": ids, "attention_mask": mask}, rows)


def compiled(model: torch.nn.Module, **options: Any) -> Callable[..., Any]:
    """The model under the backend; what is rewritten runs without a compiler, which would take minutes."""
    options.setdefault("backend", "eager")
    return torch.compile(model, backend="regraft", options=options)


@contextmanager
def fresh_dynamo() -> Iterator[list[GraphReport]]:
    """Dynamo and the reports as in a new process; gives the reports of the graphs compiled within."""
    torch._dynamo.reset()
    clear_backend_reports()
    reports: list[GraphReport] = []
    with warnings.catch_warnings():
        # Some of transformers' models ask for torch's version within their forward, through a cached function.
        warnings.filterwarnings(
            "ignore", message=r"Dynamo detected a call to a `functools\.lru_cache`"
        )
        yield reports
    reports.extend(backend_reports())
    torch._dynamo.reset()


@torch.no_grad()
def alone(model: PreTrainedModel, sequences: list[Tensor]) -> list[Tensor]:
    """Logits of each text by the model's own forward, without a cache and without neighbours."""
    return [model(input_ids=s[None], use_cache=False).logits[0] for s in sequences]


def worst(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Largest absolute difference; infinite for a NaN."""
    errors = [float((a - e).abs().max()) for a, e in zip(actual, expected, strict=True)]
    return max(error if error == error else float("inf") for error in errors)
