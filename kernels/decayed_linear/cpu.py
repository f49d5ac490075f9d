"""Linear attention with a constant decay in torch: a batched one-token update, chunks for longer
sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from regraft.kernels.recurrent.linear import scan_linear, step_linear
from regraft.kernels.recurrent.sequences import Inputs, Steps, run_sequences
from regraft.kernels.recurrent.states import initial_states, store_states

CHUNK = 64


def decayed_linear_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    state_slots: torch.Tensor,
) -> torch.Tensor:
    """See `decayed_linear`."""
    initial = initial_states(state, state_slots, context_lens)
    out, final = decayed_linear_reference(q, k, v, decay, initial, cu_seqlens.tolist())
    store_states(state, state_slots, final, cu_seqlens)
    return out


def decayed_linear_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    initial_state: torch.Tensor,
    offsets: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from states [R, H, D, V], functional and differentiable: the output and the final
    states.
    """
    # One decay a token: a place in a chunk that holds no token must not decay the state.
    per_token = decay.float().expand(q.shape[0], -1)
    inputs = (q.float(), k.float(), v.float(), per_token)
    out, final = run_sequences(_step, _scan, inputs, initial_state, offsets, CHUNK)
    return out.to(q.dtype), final


def _step(inputs: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, log_decay = inputs
    return step_linear(q, k, v, log_decay.exp(), state)


def _scan(inputs: Inputs, state: torch.Tensor, steps: Steps) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, log_decay = inputs
    return scan_linear(q, k, v, log_decay, state, steps)
