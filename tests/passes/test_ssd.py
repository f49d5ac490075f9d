from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from regraft.passes.ssd import PASS
from regraft.rewriter.declare import StateSpec
from tests.passes.recurrent import MixerLM, check_declined, check_grafted, check_mutant_is_caught

HEADS, P, GROUPS, S = 4, 5, 2, 6
STATE = StateSpec(":state", (HEADS, P, S), torch.float32)
UNLIMITED = (0.0, float("inf"))


class SsdLM(MixerLM):
    def __init__(self, dt_limit: tuple[float, float] = UNLIMITED, *, skip: bool = True) -> None:
        super().__init__(8)
        self.dt_limit = dt_limit
        widths = (HEADS * P, HEADS, GROUPS * S, GROUPS * S)
        self.projections = nn.ModuleList(nn.Linear(8, width) for width in widths)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(HEADS)), nn.Parameter(torch.ones(HEADS))
        self.D = nn.Parameter(torch.ones(HEADS)) if skip else None
        self.out = nn.Linear(HEADS * P, 8)

    def arguments(self, x: Tensor) -> tuple[Tensor, ...]:
        y, dt, B, C = (project(x) for project in self.projections)
        B, C = (z.unflatten(-1, (GROUPS, S)) for z in (B, C))
        return y.unflatten(-1, (HEADS, P)), dt, -self.A_log.exp(), B, C

    def mix(self, x: Tensor) -> Tensor:
        out = mamba2_chunk_scan(
            *self.arguments(x),
            chunk_size=32,
            D=self.D,
            z=None,
            dt_bias=self.dt_bias,
            initial_states=None,
            dt_softplus=True,
            dt_limit=self.dt_limit,
        )
        return self.out(out.flatten(2))


@pytest.mark.parametrize("dt_limit", [UNLIMITED, (0.4, 0.9)])
@pytest.mark.parametrize("skip", [True, False])
def test_grafts_the_scan_with_a_state_per_request(
    dt_limit: tuple[float, float], skip: bool
) -> None:
    check_grafted(SsdLM(dt_limit, skip=skip), PASS, [STATE])


class FromAState(SsdLM):
    def mix(self, x: Tensor) -> Tensor:
        start = torch.ones(1, HEADS, P, S)
        return self.out(mamba2_chunk_scan(*self.arguments(x), 32, initial_states=start).flatten(2))


class DecayByToken(SsdLM):
    """A decay rate that is a mean over tokens: its shape is that of a weight."""

    def mix(self, x: Tensor) -> Tensor:
        y, dt, A, B, C = self.arguments(x)
        return self.out(mamba2_chunk_scan(y, dt, A * y.mean((0, 1, 3)), B, C, 32).flatten(2))


class SkipPerChannel(SsdLM):
    """As many channels as tokens could be: the function broadcasts D along dimensions it does not
    mean.
    """

    def mix(self, x: Tensor) -> Tensor:
        skip = self.D[:, None].expand(HEADS, 1)
        return self.out(mamba2_chunk_scan(*self.arguments(x), 32, D=skip).flatten(2))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (FromAState(), "starts from a given state"),
        (DecayByToken(), "A depends on tokens"),
        (SkipPerChannel(), "expected D as [H]"),
    ],
)
def test_declines(model: SsdLM, reason: str) -> None:
    check_declined(model, PASS, reason)


def test_mutant_without_the_limits() -> None:
    def unlimited(call):
        return replace(PASS.check(call), dt_limit=UNLIMITED)

    with pytest.raises(AssertionError):
        check_grafted(SsdLM((0.4, 0.9)), replace(PASS, check=unlimited), [STATE])


def test_mutant_every_sequence_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(pool, slots, _):
        return torch.zeros_like(pool[slots])

    where = "regraft.kernels.ssd.cpu.initial_states"
    check_mutant_is_caught(SsdLM(), PASS, [STATE], monkeypatch, where, zeros)
