"""The operator's signature, checks and shapes."""

from __future__ import annotations

import torch

from .cpu import selective_scan_cpu


@torch.library.custom_op("regraft::selective_scan", mutates_args=("state",))
def selective_scan(
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
    """Mamba-1's scan over the sequences of a packed row; advances each sequence's state in place.

    Per channel and token:  h = exp(A dt) h + dt B x;  out = (h . C + D x) silu(z), with dt biased
    and passed through softplus first, in its own dtype. h is float32, and is rounded to x's dtype
    where C reads it.

    Shapes: x, dt, z [N, C], A [C, S] (negative), B, C [N, S], D, dt_bias [C], state [slots, C, S]
    float32; cu_seqlens [R+1] int32, context_lens [R] int32, state_slots [R] int64.

    A sequence whose `context_lens` is 0 starts from zero whatever its slot holds; one without new
    tokens keeps its state. Returns [N, C] in the dtype that x, D and z promote to, zero in rows of
    no sequence. Raises ValueError if shapes do not fit.
    """
    check_shapes(x, dt, A, B, C, D, z, state)
    arguments = (
        x, dt, A, B, C, D, z, dt_bias, dt_softplus, state, cu_seqlens, context_lens, state_slots,
    )  # fmt: skip
    if x.is_cuda:
        # Triton is not on every machine, and need not be where there is no GPU.
        from .triton import selective_scan_triton

        return selective_scan_triton(*arguments)
    return selective_scan_cpu(*arguments)


@selective_scan.register_fake
def _(
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
    check_shapes(x, dt, A, B, C, D, z, state)
    dtype = x.dtype
    for other in (D, z):
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    return x.new_empty(x.shape, dtype=dtype)


def check_shapes(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    state: torch.Tensor,
) -> None:
    """Raise ValueError unless channels and state sizes fit together."""
    channels, size = A.shape
    for name, tensor, width in (("x", x, channels), ("dt", dt, channels), ("z", z, channels)):
        if tensor is not None and tensor.shape[1:] != (width,):
            raise ValueError(f"expected {name} [N, {width}], got {[*tensor.shape]}")
    if B.shape[1:] != (size,) or C.shape[1:] != (size,):
        raise ValueError(f"expected B and C [N, {size}], got {[*B.shape]} and {[*C.shape]}")
    if D is not None and D.shape != (channels,):
        raise ValueError(f"expected D [{channels}], got {[*D.shape]}")
    if state.shape[1:] != (channels, size) or state.dtype != torch.float32:
        raise ValueError(
            f"expected a float32 state [slots, {channels}, {size}], "
            f"got {state.dtype} {[*state.shape]}"
        )
