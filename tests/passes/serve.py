"""A minimal engine for tests: runs a rewritten graph over packed pieces of sequences, pages and states full of NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from regraft.rewriter.pipeline import Rewriting

PAGE_SIZE = 4


@dataclass
class Pages:
    """Pools and page tables for sequences of known lengths."""

    lengths: Sequence[int]
    pools: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = [-(-length // PAGE_SIZE) for length in self.lengths]
        self.tables, start = [], 1
        for count in counts:
            self.tables.append(list(range(start, start + count)))
            start += count
        self.num_pages = start

    def allocate(self, rewriting: Rewriting) -> None:
        for served in rewriting.served:
            for spec in served.rows:
                shape = spec.pool_shape(self.num_pages, PAGE_SIZE)
                self.pools[spec.name] = torch.full(shape, float("nan"), dtype=spec.dtype)
            for state in served.states:
                shape = (len(self.lengths) + 1, *state.shape)
                self.pools[state.name] = torch.full(shape, float("nan"), dtype=state.dtype)

    def metadata(self, pieces: Sequence[tuple[int, int, int]]) -> dict[str, Tensor]:
        """For pieces (sequence, start, end) of one step."""
        widest = max(len(self.tables[r]) for r, _, _ in pieces)
        table = [self.tables[r] + [0] * (widest - len(self.tables[r])) for r, _, _ in pieces]
        slots = [
            self.tables[r][p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE
            for r, start, end in pieces
            for p in range(start, end)
        ]
        sizes = torch.tensor([0] + [end - start for _, start, end in pieces])
        return {
            "cu_seqlens": sizes.cumsum(0).to(torch.int32),
            "context_lens": torch.tensor([start for _, start, _ in pieces], dtype=torch.int32),
            "block_table": torch.tensor(table, dtype=torch.int32),
            "slot_mapping": torch.tensor(slots, dtype=torch.int64),
            "state_slots": torch.tensor([1 + r for r, _, _ in pieces], dtype=torch.int64),
        }


@torch.no_grad()
def serve(
    rewriting: Rewriting,
    sequences: Sequence[Tensor],
    steps: Sequence[Sequence[tuple[int, int, int]]],
) -> list[Tensor]:
    """Logits [length, vocab] of each sequence of token ids, computed in `steps` of pieces (sequence, start, end)."""
    pages = Pages([len(ids) for ids in sequences])
    pages.allocate(rewriting)
    module = fx.Interpreter(rewriting.captured.module)
    placeholders = [n for n in rewriting.graph.nodes if n.op == "placeholder"]
    names = {node: name for name, node in rewriting.inputs.items()}
    results: list[list[Tensor]] = [[] for _ in sequences]
    for pieces in steps:
        tensors = {
            "input_ids": torch.cat([sequences[r][start:end] for r, start, end in pieces])[None],
            "position_ids": torch.cat([torch.arange(s, e) for _, s, e in pieces])[None],
            **pages.metadata(pieces),
            **pages.pools,
        }
        (logits,) = module.run(*(tensors[_of_any_reach(names[node])] for node in placeholders))
        parts = logits[0].split([end - start for _, start, end in pieces])
        for (r, *_), part in zip(pieces, parts, strict=True):
            results[r].append(part)
    return [torch.cat(parts) for parts in results]


def one_by_one(length: int) -> list[list[tuple[int, int, int]]]:
    """Steps of a single sequence, a token at a time."""
    return [[(0, at, at + 1)] for at in range(length)]


def _of_any_reach(name: str) -> str:
    """Metadata is the same for rows of any reach: no page is given up here."""
    return name.partition(" of ")[0]
