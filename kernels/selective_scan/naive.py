"""Mamba-1's scan written as the recurrence that it is: the oracle."""

from __future__ import annotations

import torch

from regraft.kernels.recurrent.naive import scan_tokens


def selective_scan_naive(
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
    A, dt, B = A.float(), dt.float(), B.float()

    def step(t: int, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = (A * dt[t, :, None]).exp() * h + dt[t, :, None] * B[t] * x[t, :, None].float()
        row = h.to(x.dtype) @ C[t].to(x.dtype)
        if D is not None:
            row = row + x[t] * D
        if z is not None:
            row = row * torch.nn.functional.silu(z[t])
        return row, h

    dtype = x.dtype
    for other in (D, z):
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)
    return scan_tokens(step, out, state, cu_seqlens, context_lens, state_slots)
