"""Toy models that mix tokens in one known way, and a runner that serves any rewritten graph from poisoned caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regraft.rewriter.capture import capture
from regraft.rewriter.graph import CapturedGraph
from regraft.rewriter.pattern import Pass
from regraft.rewriter.pipeline import GraphPass, Rewriting, rewrite

VOCABULARY, HIDDEN = 40, 8
PAGE_SIZE = 4


class Toy(nn.Module):
    """embedding -> one mixing step in a module of its own (`mixer`) -> linear."""

    def __init__(self, mix: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * 0.5, requires_grad=False)

        self.table = weight(VOCABULARY, HIDDEN)
        self.mixer = Mixer(mix, weight)
        self.head = weight(VOCABULARY, HIDDEN)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False
    ) -> SimpleNamespace:
        hidden = F.embedding(input_ids, self.table)
        return SimpleNamespace(logits=F.linear(self.mixer(hidden, position_ids), self.head))


class Mixer(nn.Module):
    """`mix(self, hidden [1, T, H], position_ids [1, T])` with a few weights at hand."""

    def __init__(
        self, mix: Callable[[Any, Tensor, Tensor], Tensor], weight: Callable[..., nn.Parameter]
    ) -> None:
        super().__init__()
        self.mix = mix
        self.square, self.other, self.third = (weight(HIDDEN, HIDDEN) for _ in range(3))
        self.kernel = weight(HIDDEN, 1, 3)
        self.vector = weight(HIDDEN)
        self.places = weight(64, HIDDEN)

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        return self.mix(self, hidden, position_ids)


def attend(m: Any, x: Tensor, heads: int = 2, key_heads: int = 1, by_hand: bool = False) -> Tensor:
    """Causal attention, keys and values repeated for the query heads that share them."""
    width = HIDDEN // heads
    query = F.linear(x, m.square).view(1, -1, heads, width).transpose(1, 2)
    key = F.linear(x, m.other[: key_heads * width]).view(1, -1, key_heads, width).transpose(1, 2)
    value = F.linear(x, m.third[: key_heads * width]).view(1, -1, key_heads, width).transpose(1, 2)
    key, value = (t.repeat_interleave(heads // key_heads, 1) for t in (key, value))
    index = torch.arange(x.shape[1])
    mask = index[None, :] <= index[:, None]
    if by_hand:
        scores = (query @ key.transpose(-1, -2)).masked_fill(~mask, torch.finfo(x.dtype).min)
        scores = (scores - scores.amax(-1, keepdim=True)).exp()
        out = (scores / scores.sum(-1, keepdim=True)) @ value
    else:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return out.transpose(1, 2).reshape(1, -1, HIDDEN)


def captured(mix: Callable[[Any, Tensor, Tensor], Tensor]) -> CapturedGraph:
    return capture(Toy(mix))


def rewritten(
    mix: Callable[[Any, Tensor, Tensor], Tensor],
    passes: Sequence[Pass | GraphPass] = (),
    **options: str,
) -> Rewriting:
    return rewrite(captured(mix), passes, **options)


def reference(mix: Callable[[Any, Tensor, Tensor], Tensor], ids: Tensor) -> Tensor:
    """The toy alone on one text: ids [n] -> logits [n, vocab]."""
    with torch.no_grad():
        logits: Tensor = Toy(mix)(ids[None], torch.arange(len(ids))[None]).logits[0]
    return logits


def pools_for(state: Rewriting, num_pages: int) -> dict[str, Tensor]:
    """Caches as declared, every element poisoned."""
    specs = {row.name: row for served in state.served for row in served.rows}
    return {
        name: torch.full((num_pages, PAGE_SIZE, *row.shape), poison(row.dtype), dtype=row.dtype)
        for name, row in specs.items()
    }


def poison(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else 1


class Server:
    """Runs a rewritten graph over texts cut into pieces, as the runtime does: one packed row a step.

    Pages are dealt out in no order, the caches are poisoned, and each row ends with `padding` tokens of no request.
    """

    def __init__(self, state: Rewriting, texts: Sequence[Tensor], padding: int = 0) -> None:
        self.state, self.texts, self.padding = state, texts, padding
        pages = [-(-len(text) // PAGE_SIZE) for text in texts]
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)) + 1
        self.table = torch.zeros(len(texts), max(pages), dtype=torch.int32)
        for i, part in enumerate(order.split(pages)):
            self.table[i, : len(part)] = part
        self.pools = pools_for(state, sum(pages) + 1)
        self.done = [0] * len(texts)
        self.logits: list[list[Tensor]] = [[] for _ in texts]

    def run(self, cuts: Sequence[Sequence[int]]) -> list[Tensor]:
        """`cuts[i]`: how many tokens of text i each step takes (0: none). Returns logits [n, vocab] per text."""
        for step in zip(*cuts, strict=True):
            self.step(step)
        return [torch.cat(parts) for parts in self.logits]

    def step(self, counts: Sequence[int]) -> None:
        """Feed the next `counts[i]` tokens of each text."""
        spans = [(i, self.done[i], self.done[i] + n) for i, n in enumerate(counts) if n]
        inputs = self._inputs(spans)
        by_node = {node: name for name, node in self.state.inputs.items()}
        placeholders = [node for node in self.state.graph.nodes if node.op == "placeholder"]
        with torch.no_grad():
            (logits,) = self.state.captured.module(
                *[inputs[by_node[node]] for node in placeholders]
            )
        place = 0
        for i, start, end in spans:
            self.logits[i].append(logits[0, place : place + end - start])
            place, self.done[i] = place + end - start, end

    def _inputs(self, spans: Sequence[tuple[int, int, int]]) -> dict[str, Tensor]:
        empty = [torch.zeros(self.padding, dtype=torch.long)]
        places = [torch.arange(start, end) for _, start, end in spans]
        slots = [
            self.table[i, at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
            for (i, _, _), at in zip(spans, places)
        ]
        rows = [i for i, _, _ in spans]
        return {
            "input_ids": torch.cat([self.texts[i][a:b] for i, a, b in spans] + empty)[None],
            "position_ids": torch.cat(places + empty)[None],
            "cu_seqlens": torch.tensor([0, *(b - a for _, a, b in spans)]).cumsum(0).int(),
            "context_lens": torch.tensor([a for _, a, _ in spans], dtype=torch.int32),
            "block_table": self.table[rows],
            "slot_mapping": torch.cat([slot.long() for slot in slots] + empty),
            "state_slots": torch.tensor(rows) + 1,
            "extents": torch.tensor([len(self.texts[i]) for i in rows]),
            **self.pools,
        }


def rows_of(state: Rewriting, text: Tensor) -> list[list[Tensor | None]]:
    """What each replayed region reads on one text: rows per input, for check_prefix."""
    replays = [served.replay for served in state.served if served.replay is not None]
    for replay in replays:
        replay.probe = []
    Server(state, [text]).run([[len(text)]])
    found = [replay.probe or [] for replay in replays]
    for replay in replays:
        replay.probe = None
    return found
