"""The operator's signature, checks and shapes."""

from __future__ import annotations

import torch

from .cpu import ssd_cpu


@torch.library.custom_op("regraft::ssd", mutates_args=("state",))
def ssd(
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
    """Mamba-2's scan over the sequences of a packed row; advances each sequence's state in place.

    Per head and token:  h = exp(A dt) h + (x dt) B^T;  out = h C + D x, with dt biased, passed
    through softplus and clamped to [dt_min, dt_max] first, in its own dtype; everything else is
    float32.

    Shapes: x [N, H, P], dt [N, H], A [H] (negative), B, C [N, G, S] (group g serves heads from g *
    (H // G)), D [H] or [H, P], dt_bias [H], state [slots, H, P, S] float32; cu_seqlens [R+1] int32,
    context_lens [R] int32, state_slots [R] int64.

    A sequence whose `context_lens` is 0 starts from zero whatever its slot holds; one without new
    tokens keeps its state. Returns [N, H, P] float32, zero in rows of no sequence. Raises
    ValueError if shapes do not fit.
    """
    check_shapes(x, dt, A, B, C, D, state)
    arguments = (
        x, dt, A, B, C, D, dt_bias, dt_softplus, dt_min, dt_max, state, cu_seqlens, context_lens, state_slots,
    )  # fmt: skip
    if x.is_cuda:
        # Triton is not on every machine, and need not be where there is no GPU.
        from .triton import ssd_triton

        return ssd_triton(*arguments)
    return ssd_cpu(*arguments)


@ssd.register_fake
def _(
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
    check_shapes(x, dt, A, B, C, D, state)
    return x.new_empty(x.shape, dtype=torch.float32)


def check_shapes(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    state: torch.Tensor,
) -> None:
    """Raise ValueError unless heads, groups and widths fit together."""
    heads, width = x.shape[1:]
    if dt.shape[1:] != (heads,) or A.shape != (heads,):
        raise ValueError(f"expected dt [N, {heads}], A [{heads}], got {[*dt.shape]}, {[*A.shape]}")
    if B.shape[1:] != C.shape[1:] or heads % B.shape[1]:
        raise ValueError(f"B {[*B.shape]} and C {[*C.shape]} do not fit {heads} heads")
    if D is not None and D.shape not in ((heads,), (heads, width)):
        raise ValueError(f"expected D [{heads}] or [{heads}, {width}], got {[*D.shape]}")
    if state.shape[1:] != (heads, width, B.shape[2]) or state.dtype != torch.float32:
        raise ValueError(
            f"expected a float32 state [slots, {heads}, {width}, {B.shape[2]}], "
            f"got {state.dtype} {[*state.shape]}"
        )
