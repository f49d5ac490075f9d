"""Runs a rewritten model: owns the pools it declares and calls it with a packed row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import torch

from regraft.rewriter.declare import Reach, RowSpec, StateSpec

from .batch import Batch, build_batch, pad
from .compiled import SMALLEST, CompiledProgram, GraphModel
from .cuda_graphs import CaptureError, StepGraphs, operator_that_waits
from .pages import BlockTables
from .pools import pool_shapes
from .request import PENDING, Span
from .staging import Arrays, upload

if TYPE_CHECKING:
    from .capacity import Capacity
    from .config import EngineConfig


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

    def check_structure(self) -> None:
        """Raises if the model is made of other modules than the rewritten one."""
        ...

    def forward(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits, float [S, vocab], of the rows that `logits_rows` names.

        `inputs` are the tensors of `runtime/batch.py` and one pool per declared row and state, by
        its name. The pools are updated in place.
        """
        ...


class Runner:
    """A model with its pools: rows [pages, rows of a page, *shape], states [num_slots + num_checkpoints, *shape].

    `config` says whether its graph is compiled and whether decode steps are CUDA graphs; without one, neither.
    `notes` gets a line on each part of the model that is left out of them.
    """

    def __init__(
        self,
        model: RewrittenModel,
        capacity: Capacity,
        config: EngineConfig | None = None,
        notes: list[str] | None = None,
    ) -> None:
        self.model = model
        self.pools = _make_pools(model, capacity)
        self.last_tokens = torch.zeros(capacity.num_slots, dtype=torch.int64, device=model.device)
        """By slot, the token that was chosen last: what a PENDING token stands for."""
        self._notes = notes if notes is not None else []
        self._compiled: CompiledProgram | None = None
        self._graphs: StepGraphs | None = None
        self._needs_graphs = config is not None and config.cuda_graphs is True
        if config is not None and config.compiles_on(model.device):
            graph_model = cast(GraphModel, model)
            self._compiled = CompiledProgram(
                graph_model, self.pools, self._notes, steady=config.batch_invariant
            )
            if config.records_on(model.device):
                self._graphs = self._make_graphs(capacity, config)

    def build(
        self, spans: Sequence[Span], tables: Mapping[Reach, BlockTables], page_size: int
    ) -> Batch:
        """The packed row of these spans, as long as the model needs it."""
        least = max(self.model.min_tokens, SMALLEST if self._compiled is not None else 1)
        tokens = sum(span.num_tokens for span in spans)
        if self._graphs is not None and self._graphs.takes(len(spans), tokens):
            least = 1  # the graph's bucket fills it up
        return build_batch(spans, tables, page_size, least)

    # Not inference mode: a tensor that a model creates and keeps during its first step must stay
    # usable in a training step that comes later.
    @torch.no_grad()
    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [batch.num_logits, vocab], valid until the next run; updates the pools."""
        return self._logits(batch)[: batch.num_logits]

    def _logits(self, batch: Batch) -> torch.Tensor:
        if self._graphs is not None and batch.is_decode:
            try:
                return self._graphs.run(batch)
            except CaptureError as error:
                if self._needs_graphs:
                    raise
                self._notes.append(f"decode steps run without CUDA graphs: {error}")
                self._graphs = None
        if self._graphs is not None and self._graphs.takes_prompts(batch):
            try:
                return self._graphs.run(batch)
            except CaptureError as error:
                self._notes.append(f"steps with prompts run without CUDA graphs: {error}")
                self._graphs.leave_prompts()
        if self._compiled is None:
            return self.model.forward({**self._upload(batch.arrays), **self.pools})
        logits = self._compiled({**self._upload(pad(batch.arrays, SMALLEST)), **self.pools})
        return logits.reshape(-1, logits.shape[-1])

    def _upload(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """The arrays on the model's device, with tokens instead of PENDING."""
        ids = arrays["input_ids"][0]
        rows = np.flatnonzero(ids == PENDING)
        if not rows.size:
            return upload(arrays, self.model.device)
        sequence = np.searchsorted(arrays["cu_seqlens"], rows, side="right") - 1
        pending = {"rows": rows, "slots": arrays["state_slots"][sequence]}
        inputs = upload({**arrays, **pending}, self.model.device)
        inputs["input_ids"][0, inputs.pop("rows")] = self.last_tokens[inputs.pop("slots")]
        return inputs

    def keep_tokens(self, tokens: torch.Tensor, slots: Sequence[int]) -> None:
        """Notes the tokens [n] that were just chosen for the requests in these slots."""
        places = upload({"": np.array(slots, dtype=np.int64)}, self.model.device)[""]
        self.last_tokens[places] = tokens

    @torch.no_grad()
    def copy_states(self, sources: Mapping[int, int]) -> None:
        """Copies the states in slots: into each key those of its value."""
        if not sources:
            return
        arrays = {
            "to": np.array(list(sources), dtype=np.int64),
            "from": np.array(list(sources.values()), dtype=np.int64),
        }
        slots = upload(arrays, self.model.device)
        for state in self.model.states:
            pool = self.pools[state.name]
            pool[slots["to"]] = pool[slots["from"]]

    def weights_changed(self) -> None:
        """To be called when the model's `weights_version` has changed."""
        if self._compiled is not None and self._compiled.refresh() and self._graphs is not None:
            self._graphs.forget()

    def release(self) -> None:
        """Frees the pools, and what was made for them."""
        self._graphs = self._compiled = None
        self.pools.clear()

    def _make_graphs(self, capacity: Capacity, config: EngineConfig) -> StepGraphs | None:
        assert self._compiled is not None
        if not self._compiled.is_recordable:
            return None
        longest = [capacity.max_tokens(config.max_batch_tokens), self.model.max_positions]
        tokens = min((length for length in longest if length is not None), default=None)
        size = capacity.page_size
        # Where nothing limits a request, tables grow as they have to.
        pages = None if tokens is None and size else -(-(tokens or 1) // max(size, 1))
        return StepGraphs(
            self._compiled,
            self.pools,
            self.last_tokens,
            min(config.max_requests, capacity.num_slots - 1),
            pages,
            reaches=tuple(capacity.pages),
            max_tokens=config.max_batch_tokens,
            explain=partial(operator_that_waits, self._compiled.program),
        )


def _make_pools(model: RewrittenModel, capacity: Capacity) -> dict[str, torch.Tensor]:
    """The caches by name; ValueError if a GPU has no room for them."""
    num_slots = capacity.num_slots + capacity.num_checkpoints
    shapes = pool_shapes(model, capacity.pages, capacity.page_size, num_slots)
    try:
        return {name: _zeros(*wanted, model.device) for name, wanted in shapes.items()}
    except torch.OutOfMemoryError as error:
        wanted = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
        raise ValueError(
            f"the caches take {wanted} bytes, which {model.device} has not: lower cache_tokens, memory_fraction or "
            f"max_requests ({error})"
        ) from error


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that cost no memory on the CPU until they are written, unlike torch.zeros."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
