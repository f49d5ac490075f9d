"""The gated delta rule written as the recurrence that it is: the oracle."""

from __future__ import annotations

import torch

from regraft.kernels.recurrent.naive import scan_tokens


def gated_delta_rule_naive(
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
    out = torch.zeros(q.shape[0], *v.shape[1:], dtype=q.dtype, device=q.device)
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    if qk_l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))

    def step(t: int, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = s * g[t].exp()[:, None, None]
        predicted = torch.einsum("hk,hkv->hv", k[t], s)
        s = s + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * (v[t] - predicted))
        return scale * torch.einsum("hk,hkv->hv", q[t], s), s

    return scan_tokens(step, out, state, cu_seqlens, context_lens, state_slots)
