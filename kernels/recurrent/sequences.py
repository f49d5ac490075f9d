"""A packed row as two batches: the sequences with one new token, and chunks of the longer ones.

    row of N tokens -> one batched step over all one-token sequences
                    -> chunks [M, C, ...], zero-padded, scanned so that step t holds the t-th chunk
                       of every sequence that has one

Functional and differentiable in the inputs and the initial states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

Steps = tuple[tuple[int, int], ...]
"""Per scan step: (first chunk, number of chunks). Chunk i of a step belongs to the i-th state of
the batch.
"""

Inputs = tuple[torch.Tensor, ...]
StepForm = Callable[[Inputs, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
ScanForm = Callable[[Inputs, torch.Tensor, Steps], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class ChunkTable:
    """Where the tokens of some sequences lie when cut into chunks, each sequence from its own first
    token.

    rows [M, C] int64 and valid [M, C] bool: the packed row of every chunk place; steps: see
    `Steps`; order [A] int64: the sequences, longest first, in the order of the scanned states.
    """

    rows: torch.Tensor
    valid: torch.Tensor
    steps: Steps
    order: torch.Tensor

    def pack(self, row: torch.Tensor) -> torch.Tensor:
        """[N, ...] -> [M, C, ...]; places without a token hold zero."""
        chunks = row.index_select(0, self.rows.flatten()).unflatten(0, self.rows.shape)
        hole = ~self.valid.view(*self.valid.shape, *[1] * (row.dim() - 1))
        return chunks.masked_fill(hole, 0.0) if self.has_holes else chunks

    def unpack(self, chunks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[M, C, ...] -> the rows that hold a token, [n] int64, and their values, [n, ...]."""
        if not self.has_holes:
            return self.rows.flatten(), chunks.flatten(0, 1)
        places = self.valid.flatten().nonzero().squeeze(1)
        return self.rows.flatten()[places], chunks.flatten(0, 1).index_select(0, places)

    @property
    def has_holes(self) -> bool:
        """True if some sequence's length is no multiple of the chunk."""
        return not bool(self.valid.all())


def chunk_table(
    offsets: Sequence[int], sequences: Sequence[int], chunk_size: int, device: torch.device
) -> ChunkTable:
    """Cut `sequences` (indices into `offsets`) into chunks."""
    order = sorted(sequences, key=lambda r: offsets[r] - offsets[r + 1])
    starts: list[int] = []
    stops: list[int] = []
    steps: list[tuple[int, int]] = []
    alive = [(offsets[r], offsets[r + 1]) for r in order]
    while alive:
        steps.append((len(starts), len(alive)))
        starts += [start for start, _ in alive]
        stops += [stop for _, stop in alive]
        alive = [(start + chunk_size, stop) for start, stop in alive if start + chunk_size < stop]
    rows = torch.tensor(starts).unsqueeze(1) + torch.arange(chunk_size)
    valid = rows < torch.tensor(stops).unsqueeze(1)
    rows = rows.where(valid, 0)
    return ChunkTable(
        rows.to(device), valid.to(device), tuple(steps), torch.tensor(order, device=device)
    )


def run_sequences(
    step: StepForm,
    scan: ScanForm,
    inputs: Inputs,
    initial_state: torch.Tensor,
    offsets: Sequence[int],
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a recurrence over every sequence of a packed row, from `initial_state` [R, ...].

    `step(rows [A, ...], state [A, ...])` advances A sequences by one token; `scan(chunks [M, C,
    ...], state, steps)` advances them by their chunks. Returns the output rows [N, ...] (zero in
    rows of no sequence) and the final states.
    """
    num_rows, device = inputs[0].shape[0], inputs[0].device
    if list(offsets) == list(range(num_rows + 1)):  # a decode step: nothing to gather
        return step(inputs, initial_state)
    lengths = [stop - start for start, stop in pairwise(offsets)]
    single = [r for r, length in enumerate(lengths) if length == 1]
    longer = [r for r, length in enumerate(lengths) if length > 1]
    done: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    if single or not longer:
        chosen = torch.tensor(single, dtype=torch.int64, device=device)
        rows = torch.tensor([offsets[r] for r in single], dtype=torch.int64, device=device)
        out, state = step(tuple(x.index_select(0, rows) for x in inputs), initial_state[chosen])
        done.append((rows, out, chosen, state))
    if longer:
        size = min(chunk_size, max(lengths))  # short sequences: no padding beyond the longest
        table = chunk_table(offsets, longer, size, device)
        chunks = tuple(table.pack(x) for x in inputs)
        out, state = scan(chunks, initial_state.index_select(0, table.order), table.steps)
        done.append((*table.unpack(out), table.order, state))
    rows, out, chosen, state = (torch.cat(parts) for parts in zip(*done))
    return (
        out.new_zeros(num_rows, *out.shape[1:]).index_copy(0, rows, out),
        initial_state.index_copy(0, chosen, state),
    )


def own_rows(row: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
    """`row` [N, ...] with zeros where no sequence has a token (what was there may be NaN)."""
    if offsets[-1] == row.shape[0]:
        return row
    kept = row[: offsets[-1]]
    return torch.cat([kept, row.new_zeros(row.shape[0] - offsets[-1], *row.shape[1:])])
