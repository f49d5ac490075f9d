"""Mamba-1's scan in torch: one batched update for one-token sequences, chunks for longer ones.

Decays differ by channel and state, so there is no matrix form. Two passes over chunks, each walking
the places of all chunks side by side: the first finds what every chunk adds to a zero state, the
second, started from the carried states, the outputs. A row of T tokens costs about 2 C + T / C
steps instead of T, and holds C states, not T.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from regraft.kernels.recurrent.sequences import Inputs, Steps, own_rows, run_sequences
from regraft.kernels.recurrent.states import initial_states, store_states

CHUNK = 32


def selective_scan_cpu(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    state_slots: torch.Tensor,
) -> torch.Tensor:
    """See `selective_scan`."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    initial = initial_states(state, state_slots, context_lens)
    offsets = cu_seqlens.tolist()
    out, final = selective_scan_reference(x, dt, A, B, C, initial, offsets)
    store_states(state, state_slots, final, cu_seqlens)
    if D is not None:
        out = out + own_rows(x * D, offsets)
    if z is not None:
        out = out * own_rows(torch.nn.functional.silu(z), offsets)
    return out


def selective_scan_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    initial_state: torch.Tensor,
    offsets: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bare scan from states [R, C, S] and finished `dt`, functional: the output in x's dtype,
    the final states.
    """
    dt = dt.float()
    inputs = (dt * x.float(), dt, B.float(), C)
    step, scan = partial(_step, A.float(), x.dtype), partial(_scan, A.float(), x.dtype)
    return run_sequences(step, scan, inputs, initial_state, offsets, CHUNK)


def _step(
    A: torch.Tensor, dtype: torch.dtype, inputs: Inputs, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    u, dt, B, C = inputs
    state = advance(A, u, dt, B, state)
    return (state.to(dtype) @ C.to(dtype).unsqueeze(-1)).squeeze(-1), state


def advance(
    A: torch.Tensor, u: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """One token: u = dt x and dt [M, C], B [M, S], state [M, C, S]."""
    return (A * dt.unsqueeze(-1)).exp() * state + u.unsqueeze(-1) * B.unsqueeze(-2)


def _scan(
    A: torch.Tensor, dtype: torch.dtype, inputs: Inputs, state: torch.Tensor, steps: Steps
) -> tuple[torch.Tensor, torch.Tensor]:
    places = list(zip(*(x.unbind(1) for x in inputs)))
    entries, state = _carry(A, places, inputs[1], state, steps)
    outputs = []
    for place in places:
        row, entries = _step(A, dtype, place, entries)
        outputs.append(row)
    if len(steps) == 1:
        state = entries
    return torch.stack(outputs, dim=1), state


def _carry(
    A: torch.Tensor, places: list[Inputs], dt: torch.Tensor, state: torch.Tensor, steps: Steps
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state that every chunk starts from [M, C, S], and the state after each sequence's last
    chunk.
    """
    if len(steps) == 1:
        return state, state
    added = torch.zeros(dt.shape[0], *A.shape, device=dt.device)
    for u, dt_t, B, _ in places:
        added = advance(A, u, dt_t, B, added)
    decay = (A * dt.sum(1).unsqueeze(-1)).exp()
    entries = []
    for first, count in steps:
        at, current = slice(first, first + count), state[:count]
        entries.append(current)
        current = decay[at] * current + added[at]
        state = torch.cat([current, state[count:]]) if count < state.shape[0] else current
    return torch.cat(entries), state
