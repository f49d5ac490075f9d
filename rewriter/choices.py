"""Choices that rounding decides: experts and keys whose scores lie too near to each other for one right answer.

Two exact implementations round differently, so they may choose differently where a top-k's last score and the next are
nearer than rounding, and everything after that choice is then another computation. So that this is told from a fault,
the model is run once more with what the rewritten graph chose: each choice must be among the best but for rounding, and
what comes out must agree as closely as anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

NEAR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}
"""How far a chosen score may lie below the k-th best, as a part of the largest: some rounding errors of the dtype
(bfloat16: 8 units in the last place of the largest score; measured on tiny models of three layers: up to 3.3e-2)."""

TOP_K = ("aten::topk", "regraft::invariant_topk")
"""Operators that give values and indices; the second one exists where batch invariance was asked for."""

HIDDEN = -1e30
"""Scores below are of what may not be chosen."""


@dataclass
class Ties:
    """How many of the choices were others than the model's own, and how far below the k-th best at most."""

    chosen: int = 0
    differing: int = 0
    widest: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.differing} of {self.chosen} choices of experts or keys fell otherwise, on scores at most "
            f"{self.widest:.1e} apart"
        )


class ChoicesUnknown(Exception):
    """The rewritten graph chooses otherwise than by the model's own top-ks, or where it cannot be watched."""


Pieces = list[Tensor]
"""Of one top-k of the graph, what it chose, piece by piece of a text: [n, ..., k]."""


@dataclass
class Chosen:
    """What the graph chose for one text: a list of pieces a top-k. `at`: how many tokens it has seen."""

    tokens: Sequence[int]
    at: int = 0
    choices: list[Pieces] = field(default_factory=list)

    def begins(self, ids: Sequence[int]) -> bool:
        return self.at == 0 and list(self.tokens[: len(ids)]) == list(ids)


@contextmanager
def watching(artifact: Any, texts: Sequence[Sequence[int]]) -> Iterator[list[Chosen]]:
    """While entered, what the artifact's graph chooses for these texts is noted, in the order of the graph.

    Each text is to be run once, in any pieces and any company.
    """
    noted, owners = [Chosen(text) for text in texts], dict[int, Chosen]()
    original = artifact.forward

    def forward(inputs: Mapping[str, Tensor]) -> Tensor:
        with _Watch() as watch:
            logits: Tensor = original(inputs)
        _share_out(watch.found, inputs, noted, owners)
        return logits

    artifact.forward = forward
    try:
        yield noted
    finally:
        artifact.forward = original


def _share_out(
    found: Sequence[Tensor], inputs: Mapping[str, Tensor], noted: list[Chosen],
    owners: dict[int, Chosen],
) -> None:  # fmt: skip
    """Each sequence's rows of what was chosen to its text."""
    ids = inputs["input_ids"][0].tolist()
    contexts, slots = inputs["context_lens"].tolist(), inputs["state_slots"].tolist()
    for (start, end), context, slot in zip(
        pairwise(inputs["cu_seqlens"].tolist()), contexts, slots
    ):
        if start == end:
            continue
        if context == 0:
            owners.pop(slot, None)
            begun = [text for text in noted if text.begins(ids[start:end])]
            if begun:
                owners[slot] = begun[0]
        text = owners.get(slot)
        if text is None:  # the runner's padding
            continue
        text.at += end - start
        if not text.choices:
            text.choices = [[] for _ in found]
        for pieces, chosen in zip(text.choices, found, strict=True):
            pieces.append(chosen[start:end])


class _Watch(TorchDispatchMode):
    """Notes the indices of every top-k over one row per token."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.name() in TOP_K:
            indices = result[1]
            self.found.append(
                indices[0] if args[0].shape[0] == 1 and args[0].dim() > 2 else indices
            )
        elif function in (
            torch.ops.regraft.index_topk.default,
            torch.ops.regraft.index_entries.default,
        ):
            self.found.append(result)
        elif function is torch.ops.regraft.index_pool_topk.default:
            self.found.append(_first_tokens(result, args[3].shape[0], args[9]))
        elif function is torch.ops.regraft.index_block_topk.default:
            self.found.append(_first_tokens(result, *args[8:10]))
        return result


def _first_tokens(selected: Tensor, size: int, count: int) -> Tensor:
    """[T, count] numbers of the pools or blocks whose tokens were selected, -1 for none."""
    return selected[:, : count * size : size].div(size, rounding_mode="floor")


class Choosing(TorchFunctionMode):
    """While entered, each top-k of a forward pass over one text gives what was chosen for it elsewhere."""

    def __init__(self, text: Chosen, ties: Ties) -> None:
        super().__init__()
        chosen = (torch.cat(pieces) for pieces in text.choices)
        # of too short a text no block is whole, and a loop over queries chooses nothing
        self._left = (rows for rows in chosen if not rows.numel() or bool((rows >= 0).any()))
        self._queries: Iterator[Tensor] = iter(())
        self._length = len(text.tokens)
        self._ties = ties

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk):
            return result
        if args[0].dim() == 1:
            return self._of_one_query(args[0], result)
        self._no_query_left()
        return self._chosen(args[0], result, self._next())

    def finish(self) -> None:
        """Raises ChoicesUnknown if the pass has chosen less often than the graph."""
        self._no_query_left()
        if next(self._left, None) is not None:
            raise ChoicesUnknown("the graph chooses more often than the model")

    def _next(self) -> Tensor:
        rows = next(self._left, None)
        if rows is None:
            raise ChoicesUnknown("the model chooses more often than the graph")
        return rows

    def _no_query_left(self) -> None:
        if next(self._queries, None) is not None:
            raise ChoicesUnknown("the model chooses for fewer queries than the graph")

    def _of_one_query(self, scores: Tensor, own: Any) -> Any:
        """A loop over queries, in order: those for which nothing was chosen have nothing to choose from."""
        query = next(self._queries, None)
        if query is None:
            rows = self._next()
            self._queries = (row[row >= 0] for row in rows if bool((row >= 0).any()))
            query = next(self._queries, None)
        if query is None or query.shape != own.indices.shape:
            raise ChoicesUnknown(f"the model chooses {[*own.indices.shape]} for a query")
        indices = query.long()
        values = scores[indices]
        self._compare(scores, own, indices, values)
        return type(own)((values, indices))

    def _chosen(self, scores: Tensor, own: Any, given: Tensor) -> Any:
        """The given indices, and their scores; the model's own where less is to be had than asked for."""
        shape = own.indices.shape
        whole = given.numel() // max(1, given.shape[-1]) == own.indices.numel() // shape[-1]
        if not whole or given.shape[0] != self._length or given.shape[-1] < shape[-1]:
            raise ChoicesUnknown(f"the model chooses {[*shape]}, the graph {[*given.shape]}")
        indices = given.reshape(*shape[:-1], -1)[..., : shape[-1]].long()
        full = (indices >= 0).all(-1, keepdim=True)
        indices = torch.where(full, indices, own.indices)
        values = scores.gather(-1, indices)
        self._compare(scores, own, indices, values)
        return type(own)((values, indices))

    def _compare(self, scores: Tensor, own: Any, indices: Tensor, values: Tensor) -> None:
        differs = (indices.sort(-1).values != own.indices.sort(-1).values).any(-1)
        largest = scores.masked_fill(scores < HIDDEN, 0).abs().amax(-1)
        below = own.values.amin(-1).double() - values.amin(-1).double()
        apart = torch.where(differs, below / largest.double().clamp(min=1e-30), 0.0)
        self._ties.chosen += differs.numel()
        self._ties.differing += int(differs.sum())
        self._ties.widest = max(self._ties.widest, float(apart.max()))
