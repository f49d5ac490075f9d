"""The delta rule by chunks, whatever decays its state: scalar per head (gated delta rule) or per
key channel (KDA).

Per token, with S the state [K, V] after decay:  S += k (beta (v - k S)),  out = q S. Within a chunk
the corrections `beta (v - k S)` solve a unit lower triangular system; between chunks S is carried
on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .sequences import Steps


@dataclass(frozen=True)
class DeltaChunks:
    """A batch of chunks, ready for the scan over states. All float32; M chunks of C tokens, H
    heads.

    key_scores, query_scores [M, H, C, C]: decayed k_i . k_j and q_i . k_j (only j < i, j <= i are
    read); key_in, query_in [M, H, C, K]: decayed from the chunk's start; key_out: decayed to the
    chunk's end; value [M, H, C, V]; beta [M, H, C, 1]; decay [M, H, K or 1, 1]: of the whole chunk.
    """

    key_scores: torch.Tensor
    query_scores: torch.Tensor
    key_in: torch.Tensor
    query_in: torch.Tensor
    key_out: torch.Tensor
    value: torch.Tensor
    beta: torch.Tensor
    decay: torch.Tensor


def scan_delta(
    chunks: DeltaChunks, state: torch.Tensor, steps: Steps
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [M, H, C, V] and the states [A, H, K, V] after the last chunk of each sequence."""
    system = chunks.key_scores * chunks.beta
    right = torch.cat([chunks.value, chunks.key_in], dim=-1) * chunks.beta
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, reads = solved.split([chunks.value.shape[-1], chunks.key_in.shape[-1]], dim=-1)
    scores = chunks.query_scores.tril()
    outputs = []
    for first, count in steps:
        at, current = slice(first, first + count), state[:count]
        correction = fresh[at] - reads[at] @ current
        outputs.append(chunks.query_in[at] @ current + scores[at] @ correction)
        current = current * chunks.decay[at] + chunks.key_out[at].transpose(-1, -2) @ correction
        state = torch.cat([current, state[count:]]) if count < state.shape[0] else current
    return torch.cat(outputs), state


def step_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of A sequences: q, k [A, H, K], v [A, H, V], beta [A, H], decay [A, H, K or 1],
    state [A, H, K, V].
    """
    state = state * decay.unsqueeze(-1)
    read_k, read_q = (torch.stack([k, q], dim=-2) @ state).unbind(-2)
    correction = (v - read_k) * beta.unsqueeze(-1)
    out = read_q + (q * k).sum(-1, keepdim=True) * correction
    return out, state + k.unsqueeze(-1) * correction.unsqueeze(-2)
