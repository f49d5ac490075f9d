from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from regraft.passes.leaf_rows import as_rows
from regraft.passes.selective_scan import PASS
from regraft.rewriter.declare import StateSpec
from tests.passes.recurrent import MixerLM, check_declined, check_grafted, check_mutant_is_caught

CHANNELS, S = 6, 4


def states(count: int = 1, channels: int = CHANNELS) -> list[StateSpec]:
    names = [":state", *(f":state.{i}" for i in range(2, count + 1))]
    return [StateSpec(name, (channels, S), torch.float32) for name in names]


class ScanLM(MixerLM):
    """`heads` independent scans over equal shares of the channels."""

    def __init__(self, heads: int = 1, *, gate: bool = True) -> None:
        super().__init__(heads * CHANNELS)
        self.heads, self.gate = heads, gate
        channels = heads * CHANNELS
        self.dt, self.z = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.B, self.C = (nn.Linear(channels, heads * S) for _ in range(2))
        self.A_log = nn.Parameter(torch.zeros(heads, CHANNELS, S))
        self.D, self.bias = (nn.Parameter(torch.ones(heads, CHANNELS)) for _ in range(2))
        self.out = nn.Linear(channels, channels)

    def arguments(self, x: Tensor, head: int) -> tuple[Tensor, ...]:
        """hidden_states, dt, A, B, C of one head, in the function's layout."""
        rows = (y.mT.chunk(self.heads, 1)[head] for y in (x, self.dt(x), self.B(x), self.C(x)))
        y, dt, B, C = rows
        return y, dt, -self.A_log[head].exp(), B, C

    def scan(self, x: Tensor, head: int) -> Tensor:
        return mamba_selective_scan(
            *self.arguments(x, head),
            D=self.D[head],
            z=self.z(x).mT.chunk(self.heads, 1)[head] if self.gate else None,
            delta_bias=self.bias[head],
            delta_softplus=True,
        )

    def mix(self, x: Tensor) -> Tensor:
        heads = [self.scan(x, head) for head in range(self.heads)]
        return self.out(torch.cat(heads, 1).mT)


@pytest.mark.parametrize("gate", [True, False])
def test_grafts_the_scan_with_a_state_per_request(gate: bool) -> None:
    check_grafted(ScanLM(gate=gate), PASS, states())


def test_heads_of_one_module_keep_states_of_their_own() -> None:
    check_grafted(ScanLM(heads=3), PASS, states(3))


class StatesPerToken(ScanLM):
    """A matrix A that is a mean over tokens: its shape is that of a weight."""

    def scan(self, x: Tensor, head: int) -> Tensor:
        y, dt, A, B, C = self.arguments(x, head)
        return mamba_selective_scan(y, dt, A * y.mean((0, 2))[:, None], B, C)


class BothWays(ScanLM):
    """The row read from its end: not one row per token in order."""

    def scan(self, x: Tensor, head: int) -> Tensor:
        y, dt, A, B, C = self.arguments(x, head)
        return mamba_selective_scan(y.flip(2).flip(2), dt, A, B, C)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (StatesPerToken(), "A depends on tokens"),
        (BothWays(), "hidden_states is not one row per token"),
    ],
)
def test_declines(model: ScanLM, reason: str) -> None:
    check_declined(model, PASS, reason)


def test_mutant_b_and_c_the_wrong_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(call, name, layout, grafting):
        return as_rows(call, {"B": "C", "C": "B"}.get(name, name), layout, grafting)

    where = "regraft.passes.selective_scan.as_rows"
    check_mutant_is_caught(ScanLM(), PASS, states(), monkeypatch, where, swapped)
