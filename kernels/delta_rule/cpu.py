"""The gated delta rule in torch: one batched update for one-token sequences, chunks for longer
ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from regraft.kernels.recurrent.delta import DeltaChunks, scan_delta, step_delta
from regraft.kernels.recurrent.linear import chunk_decays
from regraft.kernels.recurrent.sequences import Inputs, Steps, run_sequences
from regraft.kernels.recurrent.states import initial_states, store_states

CHUNK = 32


def gated_delta_rule_cpu(
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
    """See `gated_delta_rule`."""
    initial = initial_states(state, state_slots, context_lens)
    out, final = gated_delta_rule_reference(
        q, k, v, g, beta, initial, cu_seqlens.tolist(), scale, qk_l2norm
    )
    store_states(state, state_slots, final, cu_seqlens)
    return out


def gated_delta_rule_reference(
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
    """The same from states [R, Hv, K, V], functional and differentiable: the output and the final
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
    q, k = (for_value_heads(x, v) for x in (q, k))
    return step_delta(q, k, v, beta, g.exp().unsqueeze(-1), state)


def _scan(inputs: Inputs, state: torch.Tensor, steps: Steps) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, g, beta = (x.transpose(1, 2).contiguous() for x in inputs)  # [M, H, C, ...]
    total, pairs = chunk_decays(g)
    from_start = total.exp().float().unsqueeze(-1)
    to_end = (total[..., -1:] - total).exp().float().unsqueeze(-1)
    key_scores, query_scores = (for_value_heads(x @ k.transpose(-1, -2), v) * pairs for x in (k, q))
    q, k = (for_value_heads(x, v) for x in (q, k))
    chunks = DeltaChunks(
        key_scores=key_scores,
        query_scores=query_scores,
        key_in=k * from_start,
        query_in=q * from_start,
        key_out=k * to_end,
        value=v,
        beta=beta.unsqueeze(-1),
        decay=total[..., -1].exp().float()[..., None, None],
    )
    out, state = scan_delta(chunks, state, steps)
    return out.transpose(1, 2), state


def for_value_heads(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Every key head of x [_, Hk, ...] once for each value head of v [_, Hv, ...] that it serves."""
    share = v.shape[1] // x.shape[1]
    return x if share == 1 else x.repeat_interleave(share, dim=1)
