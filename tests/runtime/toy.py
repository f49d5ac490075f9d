"""A rewritten model of a few lines, and the same model for one whole sequence, without any cache.

It has one row per token and one state per request, and its arithmetic is exact: whole numbers below 2**24 in float32.
So an engine that runs it must agree with `ToyModel.logits_of` to the last bit, and a NaN that anybody left in a page
or a slot, once read, cannot hide.

    x[t]      = (7 * token[t] + 3 * position[t] + weight) % 89      the row; + 500 where the request is long
    sum[t]    = x[0] + ... + x[t]                                   from the cached rows; with `reaches`, (i + 2) times
                                                                    those of x that the i-th reaches, as well
    state[t]  = (5 * state[t-1] + x[t]) % 97
    logits[t] = -((11 * v + sum[t] + state[t]) % 509)               for v in the vocabulary: all different
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from regraft.rewriter.declare import Reach, RowSpec, StateSpec, field_of
from regraft.rewriter.errors import RewriteError

VOCAB = 64


class ToyModel:
    """Implements the runtime's protocol of a rewritten model."""

    def __init__(
        self,
        *,
        has_rows: bool = True,
        has_states: bool = True,
        reaches: tuple[Reach, ...] = (),
        max_positions: int | None = 512,
        switch_lengths: tuple[int, ...] = (),
        min_tokens: int = 1,
        vocab_size: int = VOCAB,
    ) -> None:
        self.rows = (RowSpec("toy:x", (2,), torch.float32),) if has_rows else ()
        self.rows += tuple(
            RowSpec(f"toy:near{i}", (2,), torch.float32, reach) for i, reach in enumerate(reaches)
        )
        self.states = (StateSpec("toy:state", (1,), torch.float32),) if has_states else ()
        self.vocab_size = vocab_size  # at most 509
        self.max_positions = max_positions
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.switch_lengths = switch_lengths
        self.min_tokens = min_tokens
        self.weight = 0
        self.changed = ""
        self.fails_in = -1
        self.num_steps = 0
        self.steps: list[dict[str, list]] = []
        self.keeps_steps = False

    def weights_version(self) -> int:
        return self.weight

    def check_structure(self) -> None:
        if self.changed:
            raise RewriteError(self.changed)

    def forward(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        self.num_steps += 1
        self.fails_in -= 1
        if self.fails_in == 0:
            raise ArithmeticError("the toy broke")
        check_inputs(inputs, self.min_tokens)
        if self.keeps_steps:
            self.steps.append({k: v.tolist() for k, v in inputs.items() if "toy" not in k})
        extents = inputs["extents"].repeat_interleave(inputs["cu_seqlens"].diff())
        x = self._rows(inputs["input_ids"][0], inputs["position_ids"][0], extents)
        total = torch.zeros_like(x)
        for row in self.rows:
            pool = inputs[row.name].view(-1, 2)
            size = inputs[row.name].shape[1]
            pool[inputs[field_of("slot_mapping", row.reach)]] = torch.stack([x, -x], -1)
            for start, end, context, pages in _sequences(
                inputs, field_of("block_table", row.reach)
            ):
                places = torch.arange(row.reach.first(context), context + end - start)
                history = pool[pages[places // size] * size + places % size]
                history = torch.cat([torch.zeros(int(places[0]), 2), history])
                total[start:end] += _reached(row, (history[:, 0] - history[:, 1]) / 2)[context:]
        if self.states:
            pool = inputs["toy:state"]
            for start, end, context, slot in _sequences(inputs, "state_slots"):
                state = pool[slot, 0] if context else torch.zeros(())
                for t in range(start, end):
                    state = (5 * state + x[t]) % 97
                    total[t] += state
                pool[slot, 0] = state
        rows = inputs["logits_rows"]
        return -((11 * torch.arange(self.vocab_size) + total[rows][:, None]) % 509)

    def logits_of(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits after each token of one whole sequence, float32 [len, vocab]."""
        positions, extent = torch.arange(len(tokens)), torch.full((len(tokens),), len(tokens))
        x = self._rows(torch.tensor(tokens), positions, extent)
        total = torch.zeros_like(x)
        for row in self.rows:
            total += _reached(row, x)
        if self.states:
            state = torch.zeros(())
            for t in range(len(tokens)):
                state = (5 * state + x[t]) % 97
                total[t] += state
        return -((11 * torch.arange(self.vocab_size) + total[:, None]) % 509)

    def continue_greedily(
        self, prompt: Sequence[int], max_new_tokens: int, eos: Sequence[int] = ()
    ) -> list[int]:
        """What a greedy request for `prompt` must come to."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + max_new_tokens:
            tokens.append(int(self.logits_of(tokens)[-1].argmax()))
            if tokens[-1] in eos:
                break
        return tokens[len(prompt) :]

    def _rows(
        self, tokens: torch.Tensor, positions: torch.Tensor, extents: torch.Tensor
    ) -> torch.Tensor:
        bucket = sum((extents > length).long() for length in self.switch_lengths)
        return ((7 * tokens + 3 * positions + self.weight) % 89 + 500 * bucket).float()


def _reached(row: RowSpec, x: torch.Tensor) -> torch.Tensor:
    """What each token gets of a whole sequence's rows."""
    factor = 1 if row.name == "toy:x" else 2 + int(row.name.removeprefix("toy:near"))
    before = torch.cat([torch.zeros(1), x.cumsum(0)])
    first = torch.tensor([row.reach.first(t) for t in range(len(x))], dtype=torch.int64)
    return factor * (before[1:] - before[first])


def _sequences(inputs: Mapping[str, torch.Tensor], last: str):
    """Of those that have tokens in this step: start, end, context, and their row of `last`."""
    ends = inputs["cu_seqlens"].tolist()
    every = zip(ends, ends[1:], inputs["context_lens"].tolist(), inputs[last])
    return [one for one in every if one[0] < one[1]]


def check_inputs(inputs: Mapping[str, torch.Tensor], min_tokens: int) -> None:
    """What batch.py promises of every step."""
    num_tokens = inputs["input_ids"].shape[1]
    num_sequences = len(inputs["context_lens"])
    shapes = {
        "input_ids": ((1, num_tokens), torch.int64),
        "position_ids": ((1, num_tokens), torch.int64),
        "cu_seqlens": ((num_sequences + 1,), torch.int32),
        "context_lens": ((num_sequences,), torch.int32),
        **{
            name: ((num_tokens,), torch.int64) for name in inputs if name.startswith("slot_mapping")
        },
        "state_slots": ((num_sequences,), torch.int64),
        "extents": ((num_sequences,), torch.int64),
    }
    for name, (shape, dtype) in shapes.items():
        assert tuple(inputs[name].shape) == shape, name
        assert inputs[name].dtype == dtype, name
    tables = [name for name in inputs if name.startswith("block_table")]
    assert tables
    assert all(inputs[name].dtype == torch.int32 for name in tables)
    assert inputs["logits_rows"].dtype == torch.int64
    assert len(inputs["logits_rows"]) >= 1
    assert num_tokens >= min_tokens
    ends = inputs["cu_seqlens"].long()
    assert ends[0] == 0
    assert ends[-1] == num_tokens
    counts = ends.diff()
    assert (counts > 0).all()
    starts = inputs["context_lens"].long()
    expected = torch.cat([torch.arange(s, s + n) for s, n in zip(starts.tolist(), counts.tolist())])
    assert torch.equal(inputs["position_ids"][0], expected)
    assert (inputs["extents"] >= starts + counts).all()
    assert len(set(inputs["state_slots"].tolist())) == num_sequences
    sizes = [pool.shape[1] for name, pool in inputs.items() if name in ("toy:x", "toy:near0")]
    for name in (name for name in inputs if sizes and name.startswith("slot_mapping")):
        owned = inputs[name][inputs[name] >= sizes[0]]
        assert len(set(owned.tolist())) == len(owned), "two tokens write one row"
