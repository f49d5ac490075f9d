"""Mamba-2's scan written as the recurrence that it is: the oracle."""

from __future__ import annotations

import torch

from regraft.kernels.recurrent.naive import scan_tokens


def ssd_naive(
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
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    dt = dt.clamp(dt_min, dt_max).float()
    x, A, B, C = (t.float() for t in (x, A, B, C))
    B, C = (t.repeat_interleave(x.shape[1] // t.shape[1], dim=1) for t in (B, C))

    def step(t: int, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = h * (A * dt[t]).exp()[:, None, None]
        h = h + torch.einsum("hp,hs->hps", x[t] * dt[t, :, None], B[t])
        row = torch.einsum("hps,hs->hp", h, C[t])
        if D is not None:
            row = row + x[t] * (D if D.dim() == 2 else D[:, None])
        return row, h

    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return scan_tokens(step, out, state, cu_seqlens, context_lens, state_slots)
