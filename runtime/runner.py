"""Runs a rewritten model: owns the pools it declares and calls it with a packed row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from regraft.rewriter.declare import RowSpec, StateSpec

if TYPE_CHECKING:
    from .batch import Batch
    from .capacity import Capacity


class RewrittenModel(Protocol):
    """What the runtime needs of a rewritten model; it knows nothing else of it."""

    rows: tuple[RowSpec, ...]
    states: tuple[StateSpec, ...]
    vocab_size: int
    max_positions: int | None
    """The longest request that the model takes (tokens); None if any."""
    dtype: torch.dtype
    device: torch.device
    switch_lengths: tuple[int, ...]
    """A request that grows longer than one of these must be recomputed from its start."""
    min_tokens: int
    """The shortest packed row that the model takes (tokens)."""

    def weights_version(self) -> int:
        """Changes when any weight was changed in place or replaced."""
        ...

    def forward(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits, float [S, vocab], of the rows that `logits_rows` names.

        `inputs` are the tensors of `runtime/batch.py` and one pool per declared row and state, by
        its name. The pools are updated in place.
        """
        ...


class Runner:
    """A model with its pools: rows [num_pages, page_size, *shape], states [num_slots, *shape]."""

    def __init__(self, model: RewrittenModel, capacity: Capacity) -> None:
        self.model = model
        self.pools: dict[str, torch.Tensor] = {}
        for row in model.rows:
            shape = (capacity.num_pages, capacity.page_size, *row.shape)
            self.pools[row.name] = _zeros(shape, row.dtype, model.device)
        for state in model.states:
            shape = (capacity.num_slots, *state.shape)
            self.pools[state.name] = _zeros(shape, state.dtype, model.device)

    # Not inference mode: a tensor that a model creates and keeps during its first step must stay
    # usable in a training step that comes later.
    @torch.no_grad()
    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [batch.num_logits, vocab]; updates the pools."""
        logits = self.model.forward({**batch.inputs, **self.pools})
        return logits[: batch.num_logits]

    def release(self) -> None:
        """Frees the pools."""
        self.pools.clear()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that cost no memory on the CPU until they are written, unlike torch.zeros."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
