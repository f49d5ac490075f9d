"""Linear attention with a constant decay written as the recurrence that it is: the oracle."""

from __future__ import annotations

import torch

from regraft.kernels.recurrent.naive import scan_tokens


def decayed_linear_naive(
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
    out = torch.zeros(v.shape, dtype=q.dtype, device=q.device)
    q, k, v = (x.float() for x in (q, k, v))
    factor = decay.float().exp()[:, None, None]

    def step(t: int, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = factor * s + torch.einsum("hk,hv->hkv", k[t], v[t])
        return torch.einsum("hk,hkv->hv", q[t], s), s

    return scan_tokens(step, out, state, cu_seqlens, context_lens, state_slots)
