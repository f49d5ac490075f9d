"""The causal convolution in torch: taps are rows of the packed row, shifted, however it is divided.

Only the first W = (K - 1) dilation tokens of a sequence reach back past its own first new token:
those are gathered, from the row and the sequence's history, which lie one after the other,
[W zeros, N tokens, R W old inputs]. A decode step is all such tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from regraft.kernels.recurrent.sequences import own_rows
from regraft.kernels.recurrent.states import initial_states, store_states


def causal_conv_cpu(
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
    history = initial_states(conv_state, state_slots, context_lens)
    out, final = causal_conv_reference(x, weight, bias, activation, dilation, history, cu_seqlens)
    store_states(conv_state, state_slots, final, cu_seqlens)
    return out


def causal_window_cpu(
    x: torch.Tensor,
    width: int,
    dilation: int,
    conv_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    state_slots: torch.Tensor,
) -> torch.Tensor:
    """See `causal_window`."""
    history = initial_states(conv_state, state_slots, context_lens)
    inputs = with_history(x, history)
    taps = tap_rows(x.shape[0], width, dilation, cu_seqlens)
    store_states(conv_state, state_slots, last_inputs(inputs, history, cu_seqlens), cu_seqlens)
    windows = inputs.index_select(0, taps.flatten()).unflatten(0, taps.shape).movedim(0, -1)
    return own_rows(windows, cu_seqlens.tolist()).contiguous()


def causal_conv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    dilation: int,
    history: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from the last inputs [R, C, W], functional and differentiable: the output and the
    new last inputs.
    """
    num_rows, width = x.shape[0], weight.shape[1]
    inputs = with_history(x, history)
    taps = tap_rows(num_rows, width, dilation, cu_seqlens)
    # Within a sequence taps are a fixed distance apart.
    straight = torch.arange(width) * dilation
    early = (taps != straight[:, None] + torch.arange(num_rows)).any(0).nonzero().squeeze(1)
    if len(early) == num_rows:
        out = weighted_sum((inputs.index_select(0, rows) for rows in taps), weight, bias)
    else:
        shifted = (inputs[first : first + num_rows] for first in straight.tolist())
        gathered = (inputs.index_select(0, rows[early]) for rows in taps)
        out = weighted_sum(shifted, weight, bias)
        out.index_copy_(0, early, weighted_sum(gathered, weight, bias))
    out = out.to(weight.dtype)
    if activation == "silu":
        out = torch.nn.functional.silu(out)
    out = own_rows(out.to(x.dtype), cu_seqlens.tolist())
    return out, last_inputs(inputs, history, cu_seqlens)


def weighted_sum(
    taps: Iterable[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`bias` plus each tap's rows [n, C] times its weight: the rows as weight's dtype, the sum
    float32.
    """
    out = torch.zeros(()) if bias is None else bias.float()
    for rows, factor in zip(taps, weight.float().unbind(1)):
        out = torch.addcmul(out, rows.to(weight.dtype).float(), factor)
    return out


def with_history(x: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
    """W zeros, the packed row [N, C], every sequence's history [R, C, W] as rows: [W + N + R W, C]."""
    before = x.new_zeros(history.shape[2], x.shape[1])
    return torch.cat([before, x, history.transpose(1, 2).flatten(0, 1)])


def tap_rows(num_rows: int, width: int, dilation: int, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Where each tap of each token lies in `with_history`, [K, N] int64; of nobody's token,
    anywhere.
    """
    row, cu_seqlens = torch.arange(num_rows), cu_seqlens.long()
    kept = (width - 1) * dilation
    owner = torch.searchsorted(cu_seqlens[1:], row, right=True).clamp(max=len(cu_seqlens) - 2)
    back = dilation * torch.arange(width - 1, -1, -1).unsqueeze(1)
    position = row - cu_seqlens[owner] - back
    in_history = kept + num_rows + (owner + 1) * kept + position
    return torch.where(position >= 0, kept + row - back, in_history)


def last_inputs(
    inputs: torch.Tensor, history: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """The last W inputs of each sequence, [R, C, W], from `with_history`."""
    count, _, kept = history.shape
    cu_seqlens = cu_seqlens.long()
    position = cu_seqlens.diff().unsqueeze(1) - kept + torch.arange(kept)
    # A sequence's history ends where the next one's begins.
    ends = inputs.shape[0] - kept * torch.arange(count - 1, -1, -1).unsqueeze(1)
    rows = torch.where(position >= 0, kept + cu_seqlens[:-1, None] + position, ends + position)
    return inputs.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)
