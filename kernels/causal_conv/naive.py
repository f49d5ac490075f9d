"""The causal convolution written token by token over a sliding window: the oracle."""

from __future__ import annotations

import torch

from regraft.kernels.recurrent.naive import scan_tokens


def causal_conv_naive(
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
    """See `causal_conv`."""

    def step(t: int, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.cat([window, x[t, :, None]], dim=-1)
        row = (window[:, ::dilation].to(weight.dtype).float() * weight.float()).sum(-1)
        row = (row if bias is None else row + bias.float()).to(weight.dtype)
        row = torch.nn.functional.silu(row) if activation == "silu" else row
        return row.to(x.dtype), window[:, 1:]

    out = torch.zeros_like(x)
    return scan_tokens(step, out, conv_state, cu_seqlens, context_lens, state_slots)


def causal_window_naive(
    x: torch.Tensor,
    width: int,
    dilation: int,
    conv_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    state_slots: torch.Tensor,
) -> torch.Tensor:
    """See `causal_window`."""

    def step(t: int, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.cat([window, x[t, :, None]], dim=-1)
        return window[:, ::dilation], window[:, 1:]

    out = x.new_zeros(*x.shape, width)
    return scan_tokens(step, out, conv_state, cu_seqlens, context_lens, state_slots)
