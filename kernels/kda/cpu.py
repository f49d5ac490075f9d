"""Kimi delta attention in torch: one batched update for one-token sequences, chunks for longer
ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from regraft.kernels.recurrent.delta import DeltaChunks, scan_delta, step_delta
from regraft.kernels.recurrent.sequences import Inputs, Steps, run_sequences
from regraft.kernels.recurrent.states import initial_states, store_states

# Scores within a chunk cost C x K products a token, as decays differ by channel: a short chunk.
CHUNK = 16


def kda_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    state_slots: torch.Tensor,
    scale: float,
    qk_l2norm: bool,
) -> torch.Tensor:
    """See `kda`."""
    initial = initial_states(state, state_slots, context_lens)
    out, final = kda_reference(q, k, v, g, beta, initial, cu_seqlens.tolist(), scale, qk_l2norm)
    store_states(state, state_slots, final, cu_seqlens)
    return out


def kda_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    offsets: Sequence[int],
    scale: float,
    qk_l2norm: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from states [R, H, K, V], functional and differentiable: the output and the final
    states.
    """
    dtype = q.dtype
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    if qk_l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    inputs = (q * scale, k, v, g, beta)
    out, final = run_sequences(_step, _scan, inputs, initial_state, offsets, CHUNK)
    return out.to(dtype), final


def _step(inputs: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, g, beta = inputs
    return step_delta(q, k, v, beta, g.exp(), state)


def _scan(inputs: Inputs, state: torch.Tensor, steps: Steps) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, g, beta = (x.transpose(1, 2).contiguous() for x in inputs)  # [M, H, C, ...]
    query_scores, key_scores, key_out = decayed_scores(q, k, g.exp())
    from_start = g.cumsum(2).exp()
    chunks = DeltaChunks(
        key_scores=key_scores,
        query_scores=query_scores,
        key_in=k * from_start,
        query_in=q * from_start,
        key_out=key_out,
        value=v,
        beta=beta.unsqueeze(-1),
        decay=from_start[:, :, -1].unsqueeze(-1),
    )
    out, state = scan_delta(chunks, state, steps)
    return out.transpose(1, 2), state


def decayed_scores(
    q: torch.Tensor, k: torch.Tensor, decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q_i . k_j and k_i . k_j, with k_j decayed from place j to place i; and k decayed to the end.

    Shapes [M, H, C, K], `decay` the factor of each place; scores [M, H, C, C], 0 for j > i. Walks
    the C places, decaying the keys so far by one place each: products of factors lose nothing where
    the exponential of a difference of long sums would.
    """
    size = q.shape[2]
    pairs = torch.stack([q, k], dim=-1)  # [M, H, C, K, 2]
    decayed = k[:, :, :0]
    rows = []
    for i in range(size):
        decayed = torch.cat([decayed * decay[:, :, i : i + 1], k[:, :, i : i + 1]], dim=2)
        rows.append(torch.nn.functional.pad(decayed @ pairs[:, :, i], (0, 0, 0, size - 1 - i)))
    query_scores, key_scores = torch.stack(rows, dim=2).unbind(-1)
    return query_scores, key_scores, decayed
