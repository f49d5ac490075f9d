from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn.functional import conv1d, pad, silu
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

from regraft.kernels.causal_conv import causal_conv, causal_window, cpu
from regraft.kernels.causal_conv.naive import causal_conv_naive, causal_window_naive
from tests.kernels.recurrent import (
    Case,
    RecurrentChecks,
    Rows,
    check_equals_leaf,
    check_equals_naive,
    check_every_split,
    check_gradients,
    check_operator,
    metadata,
    pack,
)

CHANNELS = 5


def lengths_around(window: int) -> tuple[int, ...]:
    """K-2, K-1, K and K+1 in whatever the window is, and something longer."""
    return *(n for n in range(window - 1, window + 3) if n > 0), 70


def conv_case(
    width: int = 4,
    *,
    bias: bool = False,
    activation: str | None = "silu",
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
) -> Case:
    weight = torch.randn(CHANNELS, width).to(weight_dtype or dtype)
    shift = torch.randn(CHANNELS).to(weight.dtype) if bias else None

    def call(op: Callable[..., torch.Tensor], rows: Rows, *sequences: torch.Tensor) -> torch.Tensor:
        return op(rows[0], weight, shift, activation, 1, *sequences)

    return Case(
        op=lambda *arguments: call(causal_conv, *arguments),
        naive=lambda *arguments: call(causal_conv_naive, *arguments),
        leaf=lambda rows: causal_conv1d_fn(rows[0].mT[None], weight, shift, activation)[0].mT,
        make_rows=lambda n: (torch.randn(n, CHANNELS).to(dtype),),
        state_shape=(CHANNELS, width - 1),
        lengths=lengths_around(width - 1),
        state_dtype=dtype,
    )


def dilated_case(width: int, dilation: int) -> Case:
    """As qwen4_exp does it: padded by hand, an ordinary dilated convolution, silu."""
    weight = torch.randn(CHANNELS, width)
    kept = (width - 1) * dilation

    def leaf(rows: Rows) -> torch.Tensor:
        x = pad(rows[0].mT[None], (kept, 0))
        return silu(conv1d(x, weight[:, None], groups=CHANNELS, dilation=dilation))[0].mT

    def call(op: Callable[..., torch.Tensor], rows: Rows, *sequences: torch.Tensor) -> torch.Tensor:
        return op(rows[0], weight, None, "silu", dilation, *sequences)

    return Case(
        op=lambda *arguments: call(causal_conv, *arguments),
        naive=lambda *arguments: call(causal_conv_naive, *arguments),
        leaf=leaf,
        make_rows=lambda n: (torch.randn(n, CHANNELS),),
        state_shape=(CHANNELS, kept),
        lengths=lengths_around(kept),
    )


def window_case(width: int, dilation: int) -> Case:
    kept = (width - 1) * dilation
    return Case(
        op=lambda rows, *sequences: causal_window(*rows, width, dilation, *sequences),
        naive=lambda rows, *sequences: causal_window_naive(*rows, width, dilation, *sequences),
        leaf=lambda rows: (
            pad(rows[0].mT, (kept, 0)).unfold(1, kept + 1, 1).mT.mT[..., ::dilation].transpose(0, 1)
        ),
        make_rows=lambda n: (torch.randn(n, CHANNELS),),
        state_shape=(CHANNELS, kept),
        lengths=lengths_around(kept),
    )


CASES = {
    "silu": conv_case,
    "bias": partial(conv_case, bias=True),
    "short": partial(conv_case, 3, activation=None),
    "width-2": partial(conv_case, 2),
    "width-7": partial(conv_case, 7, bias=True, activation=None),
    "bfloat16": partial(conv_case, bias=True, dtype=torch.bfloat16),
    "float32-input-bfloat16-weight": partial(conv_case, weight_dtype=torch.bfloat16),
    "bfloat16-input-float32-weight": partial(
        conv_case, dtype=torch.bfloat16, weight_dtype=torch.float32
    ),
    "dilated": partial(dilated_case, 4, 3),
    "window": partial(window_case, 4, 1),
    "dilated-window": partial(window_case, 3, 2),
}


class TestCausalConv(RecurrentChecks):
    module = cpu

    @pytest.fixture(params=CASES.values(), ids=CASES.keys())
    def case(self, request: pytest.FixtureRequest) -> Case:
        return request.param()


def test_one_tap_needs_no_history() -> None:
    case = conv_case(1)
    packed = pack(case, [2, 1], [0, 3])
    assert packed.state.numel() == 0
    expected = case.leaf(packed.rows)
    torch.testing.assert_close(packed.run(case.op), expected)


def mutate_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tap reads one token too late."""

    def late(num_rows, width, dilation, cu_seqlens):
        taps = tap_rows(num_rows, width, dilation, cu_seqlens)
        return torch.cat([taps[1:], taps[-1:]])

    tap_rows = cpu.tap_rows
    monkeypatch.setattr(cpu, "tap_rows", late)


def mutate_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window handed on ends one token too early, as if the last input had not come."""

    def early(inputs, history, cu_seqlens):
        shifted = last_inputs(inputs, history, cu_seqlens)
        return torch.cat([history[..., -1:], shifted[..., :-1]], dim=-1)

    last_inputs = cpu.last_inputs
    monkeypatch.setattr(cpu, "last_inputs", early)


@pytest.mark.parametrize(
    ("mutate", "check"),
    [
        (mutate_window, check_equals_naive),
        (mutate_window, check_equals_leaf),
        (mutate_history, check_equals_naive),
        (mutate_history, check_every_split),
    ],
)
def test_mutants_turn_the_comparison_red(
    mutate: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[Case], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(CASES["silu"]())


def test_gradients_equal_those_of_the_recurrence() -> None:
    check_gradients(CASES["silu"](), reference)


def reference(
    rows: Rows, initial_state: torch.Tensor, offsets: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.linspace(-1, 1, CHANNELS * 4).view(CHANNELS, 4)
    cu_seqlens = torch.tensor(offsets)
    return cpu.causal_conv_reference(*rows, weight, None, "silu", 1, initial_state, cu_seqlens)


def test_schemas_and_fakes_agree_with_the_operators() -> None:
    packed = pack(CASES["bfloat16"](), [3, 1], [2, 0])
    (x,) = packed.rows
    weight, bias = torch.randn(CHANNELS, 4), torch.randn(CHANNELS)
    rest = (packed.state, *metadata(packed))
    check_operator(causal_conv, x, weight, bias, "silu", 1, *rest)
    check_operator(causal_window, x, 4, 1, *rest)


def test_what_does_not_fit_is_refused() -> None:
    packed = pack(CASES["silu"](), [2], [0])
    (x,) = packed.rows
    weight = torch.randn(CHANNELS, 4)
    rest = (packed.state, *metadata(packed))
    with pytest.raises(ValueError, match="unknown activation 'tanh'"):
        causal_conv(x, weight, None, "tanh", 1, *rest)
    with pytest.raises(ValueError, match="expected weight"):
        causal_conv(x, torch.randn(4, 4), None, None, 1, *rest)
    with pytest.raises(ValueError, match=r"state \[slots, 5, 6\]"):
        causal_conv(x, weight, None, None, 2, *rest)
    with pytest.raises(ValueError, match=r"expected a torch\.float32 state"):
        causal_window(x, 4, 1, packed.state.bfloat16(), *metadata(packed))
