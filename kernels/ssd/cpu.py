"""Mamba-2's scan in torch: one batched update for one-token sequences, chunks for longer ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from regraft.kernels.recurrent.linear import scan_linear
from regraft.kernels.recurrent.sequences import Inputs, Steps, own_rows, run_sequences
from regraft.kernels.recurrent.states import initial_states, store_states

CHUNK = 64


def ssd_cpu(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    state_slots: torch.Tensor,
) -> torch.Tensor:
    """See `ssd`."""
    dt = discretised_dt(dt, dt_bias, dt_softplus, dt_min, dt_max)
    initial = initial_states(state, state_slots, context_lens)
    out, final = ssd_reference(x, dt, A, B, C, D, initial, cu_seqlens.tolist())
    store_states(state, state_slots, final, cu_seqlens)
    return out


def discretised_dt(
    dt: torch.Tensor, dt_bias: torch.Tensor | None, dt_softplus: bool, dt_min: float, dt_max: float
) -> torch.Tensor:
    """The step sizes, float32 [N, H], made in dt's own dtype as the models do."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    return dt.clamp(dt_min, dt_max).float()


def ssd_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    initial_state: torch.Tensor,
    offsets: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from states [R, H, P, S] and finished `dt`, functional: the output and the final
    states.
    """
    x = x.float()
    inputs = (C.float(), B.float(), x * dt.unsqueeze(-1), A.float() * dt)
    out, final = run_sequences(_step, _scan, inputs, initial_state, offsets, CHUNK)
    if D is not None:
        out = out + own_rows(x * (D if D.dim() == 2 else D[:, None]), offsets)
    return out, final


def _step(inputs: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    C, B, x, log_decay = inputs
    grouped = (B.shape[1], x.shape[1] // B.shape[1])
    state = state * log_decay.exp()[..., None, None]
    state = state + (x.unflatten(1, grouped).unsqueeze(-1) * B[:, :, None, None]).flatten(1, 2)
    out = state.unflatten(1, grouped) @ C[:, :, None, :, None]
    return out.squeeze(-1).flatten(1, 2), state


def _scan(inputs: Inputs, state: torch.Tensor, steps: Steps) -> tuple[torch.Tensor, torch.Tensor]:
    # The shared form keeps its states key-major, [S, P].
    C, B, x, log_decay = inputs
    out, state = scan_linear(C, B, x, log_decay, state.transpose(-1, -2), steps)
    return out, state.transpose(-1, -2)
