from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from regraft.passes.causal_window import PASS
from regraft.rewriter.declare import StateSpec
from tests.passes.recurrent import MixerLM, check_declined_at, check_grafted, check_mutant_is_caught

CHANNELS, WIDTH = 6, 4
STATE = StateSpec(":conv", (CHANNELS, WIDTH - 1), torch.float32)


class DynamicConvLM(MixerLM):
    """A convolution whose taps are projected from the token, over windows of a padded row."""

    def __init__(
        self, pad: tuple[int, int] = (WIDTH - 1, 0), value: float = 0.0, step: int = 1
    ) -> None:
        super().__init__(CHANNELS)
        self.pad, self.value, self.step = pad, value, step
        self.taps = nn.Linear(CHANNELS, WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        padded = functional.pad(x.mT, self.pad, value=self.value)
        windows = padded.unfold(-1, WIDTH, self.step).flip(-1).transpose(1, 2)
        return (windows * self.taps(x)[:, :, None]).sum(-1)


def test_grafts_the_windows_with_the_last_inputs_as_state() -> None:
    check_grafted(DynamicConvLM(), PASS, [STATE], at="unfold")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (DynamicConvLM((1, 2)), "windows of 4 are padded by 1 and 2"),
        (DynamicConvLM((3, 0), value=1.0), "not padded with zeros"),
    ],
)
def test_declines(model: DynamicConvLM, reason: str) -> None:
    check_declined_at(model, PASS, "unfold", reason)


def test_mutant_every_sequence_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(pool, slots, _):
        return torch.zeros_like(pool[slots])

    where = "regraft.kernels.causal_conv.cpu.initial_states"
    check_mutant_is_caught(DynamicConvLM(), PASS, [STATE], monkeypatch, where, zeros, at="unfold")
