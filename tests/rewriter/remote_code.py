"""Made-up models as somebody's remote code would have them: mixers that no list of names could know."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, HIDDEN = 23, 12


class Model(nn.Module):
    """embedding -> mixers with residuals -> linear. `mixer(hidden)` may return a tuple; its first is the output."""

    def __init__(self, mixer: Callable[[], nn.Module], layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Layer(mixer()) for _ in range(layers)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.eval()

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False) -> Any:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, position_ids=position_ids)
        return SimpleNamespace(logits=self.head(hidden))


class Layer(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mixer = mixer

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        mixed = self.mixer(self.norm(hidden), position_ids=position_ids, mode="scan", state=None)
        return hidden + (mixed[0] if isinstance(mixed, tuple) else mixed)


class TimeLoop(nn.Module):
    """A leaky sum over time, one token after the other in Python. Keeps its last state as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(HIDDEN) * 0.5 + 0.4)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.last: Tensor | None = None
        self.seen: list[int] = []

    def forward(
        self, hidden: Tensor, position_ids: Tensor, mode: str, state: Tensor | None
    ) -> tuple[Tensor, dict[str, Any], None]:
        assert mode == "scan" and state is None and position_ids.shape == hidden.shape[:2]
        state = torch.zeros_like(hidden[:, 0])
        states = []
        for step in range(hidden.shape[1]):
            state = self.decay * state + hidden[:, step]
            states.append(state)
        self.last = state
        self.seen.append(hidden.shape[1])
        self.steps += 1
        return self.out(torch.stack(states, dim=1)), {"state": state, "kind": "leaky"}, None


class DataDependent(nn.Module):
    """Branches on a value: only rows of positive mean are passed through."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        rows = [row if row.mean().item() > 0 else torch.zeros_like(row) for row in hidden[0]]
        return self.out(torch.stack(rows)[None])


class Blocks(nn.Module):
    """Pads to blocks of four and returns the padded length: a size that no line through T gives."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = PaddedSum()

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        return self.inner(hidden)[:, : hidden.shape[1]]


class PaddedSum(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        blocks = -(-hidden.shape[1] // 4)
        padded = nn.functional.pad(hidden, (0, 0, 0, blocks * 4 - hidden.shape[1]))
        total = torch.zeros_like(padded[:, :1])
        parts = []
        for block in range(blocks):
            piece = padded[:, block * 4 : block * 4 + 4].cumsum(1) + total
            total = piece[:, -1:]
            parts.append(piece)
        return torch.cat(parts, dim=1)


def row(length: int) -> tuple[Tensor, Tensor]:
    """Token ids and positions `[1, length]`."""
    ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))
    return ids, torch.arange(length)[None]
