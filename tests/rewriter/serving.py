"""Runs a rewritten toy as the runtime would: pages in no order, poisoned caches, padding, texts in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regraft.rewriter.pipeline import Rewriting
from tests.tolerance import assert_close

from .toys import VOCABULARY, Mix, alone, text

PAGE_SIZE = 4


def poison(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else VOCABULARY - 1


def pools_for(state: Rewriting, num_pages: int) -> dict[str, Tensor]:
    """Caches as declared, every element poisoned."""
    rows = {row.name: row for served in state.served for row in served.rows}
    return {
        name: torch.full((num_pages, PAGE_SIZE, *row.shape), poison(row.dtype), dtype=row.dtype)
        for name, row in rows.items()
    }


class Server:
    """Runs a rewritten graph over texts cut into pieces, as the runtime does: one packed row a step.

    Pages are dealt out in no order, the caches are poisoned, and each row ends with `padding` tokens of no request.
    """

    def __init__(self, state: Rewriting, texts: Sequence[Tensor], padding: int = 0) -> None:
        self.state, self.texts, self.padding = state, texts, padding
        pages = [-(-len(ids) // PAGE_SIZE) for ids in texts]
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)) + 1
        self.table = torch.zeros(len(texts), max(pages), dtype=torch.int32)
        for i, part in enumerate(order.split(pages)):
            self.table[i, : len(part)] = part
        self.pools = pools_for(state, sum(pages) + 1)
        self.done = [0] * len(texts)
        self.logits: list[list[Tensor]] = [[] for _ in texts]

    def run(self, *steps: Sequence[int]) -> list[Tensor]:
        """Each step says how many tokens it takes of each text (0: none). Returns logits [n, vocab] per text."""
        for step in steps:
            self.step(step)
        return [torch.cat(parts) for parts in self.logits]

    def step(self, counts: Sequence[int]) -> None:
        spans = [(i, self.done[i], self.done[i] + n) for i, n in enumerate(counts) if n]
        logits = self.forward(self.inputs(spans))
        place = 0
        for i, start, end in spans:
            self.logits[i].append(logits[place : place + end - start])
            place, self.done[i] = place + end - start, end

    @torch.no_grad()
    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Logits [N, vocab] of one packed row."""
        names = {node: name for name, node in self.state.inputs.items()}
        placeholders = [node for node in self.state.graph.nodes if node.op == "placeholder"]
        (logits,) = self.state.captured.module(
            *[inputs[of_any_reach(names[node])] for node in placeholders]
        )
        return logits[0]

    def inputs(self, spans: Sequence[tuple[int, int, int]]) -> dict[str, Tensor]:
        empty = [torch.zeros(self.padding, dtype=torch.long)]
        places = [torch.arange(start, end) for _, start, end in spans]
        slots = [self._slots(i, at) for (i, _, _), at in zip(spans, places)]
        rows = [i for i, _, _ in spans]
        return {
            "input_ids": torch.cat([self.texts[i][a:b] for i, a, b in spans] + empty)[None],
            "position_ids": torch.cat(places + empty)[None],
            "cu_seqlens": torch.tensor([0, *(b - a for _, a, b in spans)]).cumsum(0).int(),
            "context_lens": torch.tensor([a for _, a, _ in spans], dtype=torch.int32),
            "block_table": self.table[rows],
            "slot_mapping": torch.cat(slots + empty),
            **self.pools,
        }

    def _slots(self, i: int, at: Tensor) -> Tensor:
        return self.table[i, at // PAGE_SIZE].long() * PAGE_SIZE + at % PAGE_SIZE


def serves(state: Rewriting, mix: Mix) -> None:
    """Three texts at once equal each of them alone: as one step, in pieces beside neighbours, and token by token."""
    ids = text(37)
    texts = [ids, ids[3:8], ids[5:28]]
    expected = [alone(mix, one) for one in texts]
    schedules = {
        "prefill": [(37, 5, 23)],
        "pieces": [(1, 0, 9), (7, 2, 0), (0, 3, 1), (29, 0, 13)],
        "decode": [(n < 37, n < 5, n < 23) for n in range(37)],
    }
    for name, steps in schedules.items():
        served = Server(state, texts, padding=3).run(*[[int(n) for n in step] for step in steps])
        for got, wanted in zip(served, expected, strict=True):
            assert_close(got, wanted, name=name)


def rows_read(state: Rewriting, ids: Tensor) -> list[list[Tensor | None]]:
    """What each replayed region reads on one text: rows per input, for check_prefix."""
    replays = [served.replay for served in state.served if served.replay is not None]
    for replay in replays:
        replay.probe = []
    Server(state, [ids]).run([len(ids)])
    found = [replay.probe or [] for replay in replays]
    for replay in replays:
        replay.probe = None
    return found


def of_any_reach(name: str) -> str:
    """Metadata is the same for rows of any reach: no page is given up here."""
    return name.partition(" of ")[0]
