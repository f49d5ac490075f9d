from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

from regraft.passes.causal_conv import PASS
from regraft.passes.leaf_rows import own_state
from regraft.rewriter.declare import StateSpec
from tests.passes.recurrent import MixerLM, check_declined, check_grafted, check_mutant_is_caught

CHANNELS = 6


def conv_state(kept: int, name: str = ":conv") -> StateSpec:
    return StateSpec(name, (CHANNELS, kept), torch.float32)


class ConvLM(MixerLM):
    """One convolution over channels-first rows, called by the function that the hub's kernels
    replace.
    """

    def __init__(
        self, width: int = 4, *, bias: bool = False, activation: str | None = None
    ) -> None:
        super().__init__(CHANNELS)
        self.activation = activation
        self.conv = nn.Conv1d(
            CHANNELS, CHANNELS, width, groups=CHANNELS, padding=width - 1, bias=bias
        )

    def convolve(self, x: Tensor) -> Tensor:
        weight = self.conv.weight.squeeze(1)
        return causal_conv1d_fn(x, weight, self.conv.bias, activation=self.activation)

    def mix(self, x: Tensor) -> Tensor:
        return self.convolve(x.mT).mT


class PlainConvLM(ConvLM):
    """Padded on both sides, the first T places kept."""

    def convolve(self, x: Tensor) -> Tensor:
        return functional.silu(self.conv(x)[:, :, : x.shape[2]])


class PaddedConvLM(ConvLM):
    """Dilated, padded by hand on the left."""

    dilation = 3

    def convolve(self, x: Tensor) -> Tensor:
        kept = (self.conv.kernel_size[0] - 1) * self.dilation
        x = functional.pad(x, (kept, 0))[..., -(kept + x.shape[2]) :]
        return functional.conv1d(
            x, self.conv.weight, self.conv.bias, dilation=self.dilation, groups=CHANNELS
        )


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        (ConvLM(), 3),
        (ConvLM(2, activation="silu"), 1),
        (ConvLM(3, bias=True, activation="swish"), 2),
        (PlainConvLM(3), 2),
        (PlainConvLM(7, bias=True), 6),
    ],
)
def test_grafts_the_convolution_with_its_last_inputs_as_state(model: ConvLM, kept: int) -> None:
    check_grafted(model, PASS, [conv_state(kept)])


@pytest.mark.parametrize(("model", "kept"), [(PaddedConvLM(4), 9), (PaddedConvLM(2, bias=True), 3)])
def test_grafts_a_convolution_of_a_row_padded_by_hand(model: ConvLM, kept: int) -> None:
    check_grafted(model, PASS, [conv_state(kept)], at="conv1d")


class TwiceLM(ConvLM):
    """One module, called twice on different rows."""

    def mix(self, x: Tensor) -> Tensor:
        return self.convolve(self.convolve(x.mT).tanh()).mT


def test_two_calls_of_one_module_keep_states_of_their_own() -> None:
    check_grafted(TwiceLM(), PASS, [conv_state(3), conv_state(3, ":conv.2")])


class OtherConvLM(ConvLM):
    """A convolution with these arguments over a row padded by hand, T places from `start` on kept."""

    def __init__(
        self,
        width: int = 4,
        *,
        start: int = 0,
        pad: tuple[int, int] = (0, 0),
        value: float = 0.0,
        **arguments: Any,
    ) -> None:
        super().__init__()
        self.start, self.pad, self.value = start, pad, value
        self.arguments = {"groups": CHANNELS, **arguments}
        self.weight = nn.Parameter(
            torch.randn(CHANNELS, CHANNELS // self.arguments["groups"], width)
        )

    def convolve(self, x: Tensor) -> Tensor:
        row = functional.pad(x, self.pad, value=self.value)
        out = functional.conv1d(row, self.weight, **self.arguments)
        return out[:, :, self.start : self.start + x.shape[2]]


class DynamicConvLM(ConvLM):
    def convolve(self, x: Tensor) -> Tensor:
        weight = self.conv.weight.squeeze(1) * x.mean((0, 2))[:, None]
        return causal_conv1d_fn(x, weight, None)


class TurnedConvLM(ConvLM):
    def convolve(self, x: Tensor) -> Tensor:
        return super().convolve(x.flip(2).flip(2))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (ConvLM(activation="relu"), "activation 'relu' is not known"),
        (OtherConvLM(groups=1, padding=3), "mixes channels"),
        (OtherConvLM(groups=2, padding=3), "mixes channels"),
        (OtherConvLM(3, padding=1), "padded by 1 on the left, causal would be 2"),
        (OtherConvLM(pad=(4, 3)), "padded by 4 on the left, causal would be 3"),
        (OtherConvLM(padding=3, start=2), "not the first T places"),
        (OtherConvLM(pad=(3, 0), padding=3), "padded by None on the left"),
        (OtherConvLM(pad=(3, 3), value=1.0), "padded with other than zeros"),
        (OtherConvLM(padding=3, dilation=2), "padded by 3 on the left, causal would be 6"),
        (DynamicConvLM(), "weight depends on tokens"),
        (TurnedConvLM(), "hidden_states is not one row per token"),
    ],
)
def test_declines(model: ConvLM, reason: str) -> None:
    check_declined(model, PASS, reason)


def test_mutant_one_state_for_both_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(grafting, name, shape, dtype):
        return grafting.state_pool(name, shape, dtype)

    expected = [conv_state(3), conv_state(3)]
    where = "regraft.passes.causal_conv.own_state"
    check_mutant_is_caught(TwiceLM(), PASS, expected, monkeypatch, where, shared)


def test_mutant_window_of_a_wider_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator itself refuses a state that does not fit its weights."""
    wider = partial(_wider, own_state)
    monkeypatch.setattr("regraft.passes.causal_conv.own_state", wider)
    with pytest.raises(ValueError, match=r"state \[slots, 6, 3\]"):
        check_grafted(ConvLM(), PASS, [conv_state(4)])


def _wider(own, grafting, name, shape, dtype):
    return own(grafting, name, (shape[0], shape[1] + 1), dtype)
