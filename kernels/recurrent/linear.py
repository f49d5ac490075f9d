"""Linear attention with a scalar decay per head and token, by chunks: S = a S + k v,  out = q S.

Serves SSD (q = C, k = B, v = x dt, log a = A dt) and the constant decays of lightning attention.
Query and key heads may be fewer than value heads (`G` groups of `H // G` heads).
"""

from __future__ import annotations

import torch

from .sequences import Steps


def scan_linear(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    state: torch.Tensor,
    steps: Steps,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunks q, k [M, C, G, K], v [M, C, H, V], log_decay [M, C, H], states [A, H, K, V], all
    float32.

    Returns outputs [M, C, H, V] and the states after the last chunk of each sequence.
    """
    groups, heads = q.shape[2], v.shape[2]
    grouped = (groups, heads // groups)
    q, k = (x.transpose(1, 2).unsqueeze(2) for x in (q, k))  # [M, G, 1, C, K]
    v = v.transpose(1, 2).unflatten(1, grouped)  # [M, G, H/G, C, V]
    total, pairs = chunk_decays(log_decay.transpose(1, 2))
    to_end = (total[..., -1:] - total).exp().float().unflatten(1, grouped).unsqueeze(-1)
    from_start = total.exp().float().unflatten(1, grouped).unsqueeze(-1)
    scores = (q @ k.transpose(-1, -2)) * pairs.unflatten(1, grouped)
    local = (k.transpose(-1, -2) @ (v * to_end)).flatten(1, 2)  # [M, H, K, V]
    decay = total[..., -1].exp().float()[..., None, None]
    starts = []
    for first, count in steps:
        at, current = slice(first, first + count), state[:count]
        starts.append(current)
        current = current * decay[at] + local[at]
        state = torch.cat([current, state[count:]]) if count < state.shape[0] else current
    carried = torch.cat(starts).unflatten(1, grouped)
    out = scores @ v + (q @ carried) * from_start
    return out.flatten(1, 2).transpose(1, 2), state


def chunk_decays(log_decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of log decays [..., C]: their running sums, float64, and exp(sum_i - sum_j), float32 [..., C,
    C], 0 for j > i.

    Summed in float64: two large sums may differ by little, and it is their difference that counts.
    """
    total = log_decay.double().cumsum(-1)
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device)
    pairs = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later.triu(1), -torch.inf)
    return total, pairs.float().exp()


def step_linear(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of A sequences: q, k [A, G, K], v [A, H, V], decay [A, H], state [A, H, K, V]."""
    grouped = (q.shape[1], v.shape[1] // q.shape[1])
    update = k[:, :, None, :, None] * v.unflatten(1, grouped).unsqueeze(-2)  # [A, G, H/G, K, V]
    state = state * decay[..., None, None] + update.flatten(1, 2)
    out = q[:, :, None, None] @ state.unflatten(1, grouped)
    return out.squeeze(-2).flatten(1, 2), state
