"""The operators' signatures, checks and shapes."""

from __future__ import annotations

import torch

from .cpu import causal_conv_cpu, causal_window_cpu

ACTIVATIONS = ("silu",)


@torch.library.custom_op("regraft::causal_conv", mutates_args=("conv_state",))
def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    dilation: int,
    conv_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    state_slots: torch.Tensor,
) -> torch.Tensor:
    """Causal depthwise convolution over the sequences of a packed row; advances each sequence's
    window in place.

    out[t, c] = act(bias[c] + sum over j of weight[c, j] x[t - (K - 1 - j) dilation, c]), inputs
    before a sequence's first token being zero. Taken in weight's dtype (summed in float32),
    returned in x's.

    Shapes: x [N, C], weight [C, K], bias [C], conv_state [slots, C, (K - 1) dilation] of x's dtype,
    oldest input first; cu_seqlens [R+1] int32, context_lens [R] int32, state_slots [R] int64.
    `activation`: None or "silu".

    A sequence whose `context_lens` is 0 starts from zero whatever its slot holds; one without new
    tokens keeps its state. Returns [N, C], zero in rows of no sequence. Raises ValueError if shapes
    do not fit or the activation is unknown.
    """
    check_shapes(x, weight.shape[1], dilation, conv_state)
    check_weights(x, weight, bias, activation)
    arguments = (
        x, weight, bias, activation, dilation, conv_state, cu_seqlens, context_lens, state_slots,
    )  # fmt: skip
    if x.is_cuda:
        # Triton is not on every machine, and need not be where there is no GPU.
        from .triton import causal_conv_triton

        return causal_conv_triton(*arguments)
    return causal_conv_cpu(*arguments)


@causal_conv.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    dilation: int,
    conv_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    state_slots: torch.Tensor,
) -> torch.Tensor:
    check_shapes(x, weight.shape[1], dilation, conv_state)
    check_weights(x, weight, bias, activation)
    return x.new_empty(x.shape)


@torch.library.custom_op("regraft::causal_window", mutates_args=("conv_state",))
def causal_window(
    x: torch.Tensor,
    width: int,
    dilation: int,
    conv_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    state_slots: torch.Tensor,
) -> torch.Tensor:
    """The inputs that a causal convolution of `width` taps reads at each token, oldest first; state
    as there.

    out[t, c, j] = x[t - (width - 1 - j) dilation, c], zero before a sequence's first token. Serves
    convolutions whose taps differ by token. Shapes: x [N, C], conv_state [slots, C, (width - 1)
    dilation] of x's dtype. Returns [N, C, width], zero in rows of no sequence. Raises ValueError if
    shapes do not fit.
    """
    check_shapes(x, width, dilation, conv_state)
    arguments = (x, width, dilation, conv_state, cu_seqlens, context_lens, state_slots)
    if x.is_cuda:
        # Triton is not on every machine, and need not be where there is no GPU.
        from .triton import causal_window_triton

        return causal_window_triton(*arguments)
    return causal_window_cpu(*arguments)


@causal_window.register_fake
def _(
    x: torch.Tensor,
    width: int,
    dilation: int,
    conv_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    state_slots: torch.Tensor,
) -> torch.Tensor:
    check_shapes(x, width, dilation, conv_state)
    return x.new_empty(*x.shape, width)


def check_shapes(x: torch.Tensor, width: int, dilation: int, conv_state: torch.Tensor) -> None:
    """Raise ValueError unless the window state fits the input."""
    expected = (x.shape[1], (width - 1) * dilation)
    if conv_state.shape[1:] != expected or conv_state.dtype != x.dtype:
        raise ValueError(
            f"expected a {x.dtype} state [slots, {expected[0]}, {expected[1]}], "
            f"got {conv_state.dtype} {[*conv_state.shape]}"
        )


def check_weights(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> None:
    """Raise ValueError unless weights fit the input and the activation is known."""
    channels = x.shape[1]
    if weight.shape[0] != channels or (bias is not None and bias.shape != (channels,)):
        shapes = [*weight.shape], None if bias is None else [*bias.shape]
        raise ValueError(f"expected weight [{channels}, K] and bias [{channels}], got {shapes}")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}: expected one of {ACTIVATIONS}")
