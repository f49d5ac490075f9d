"""The operator's signature, checks and shapes."""

from __future__ import annotations

import torch

from .cpu import decayed_linear_cpu


@torch.library.custom_op("regraft::decayed_linear", mutates_args=("state",))
def decayed_linear(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    state_slots: torch.Tensor,
) -> torch.Tensor:
    """Linear attention with a constant decay over the sequences of a packed row; advances each
    state in place.

    Per head and token, all in float32:  S = exp(decay) S + k v;  out = q S.

    Shapes: q, k [N, H, D], v [N, H, V], decay [H] (log of the factor per step, negative), state
    [slots, H, D, V] float32; cu_seqlens [R+1] int32, context_lens [R] int32, state_slots [R] int64.

    A sequence whose `context_lens` is 0 starts from zero whatever its slot holds; one without new
    tokens keeps its state. Returns [N, H, V] in q's dtype, zero in rows of no sequence. Raises
    ValueError if shapes do not fit.
    """
    check_shapes(q, k, v, decay, state)
    arguments = (q, k, v, decay, state, cu_seqlens, context_lens, state_slots)
    if q.is_cuda:
        # Triton is not on every machine, and need not be where there is no GPU.
        from .triton import decayed_linear_triton

        return decayed_linear_triton(*arguments)
    return decayed_linear_cpu(*arguments)


@decayed_linear.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    state_slots: torch.Tensor,
) -> torch.Tensor:
    check_shapes(q, k, v, decay, state)
    return q.new_empty(v.shape)


def check_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> None:
    """Raise ValueError unless heads and widths fit together."""
    heads, width = q.shape[1:]
    if k.shape[1:] != (heads, width) or v.shape[1] != heads:
        raise ValueError(f"q {[*q.shape]}, k {[*k.shape]} and v {[*v.shape]} do not fit")
    if decay.shape != (heads,):
        raise ValueError(f"expected decay [{heads}], got {[*decay.shape]}")
    if state.shape[1:] != (heads, width, v.shape[2]) or state.dtype != torch.float32:
        raise ValueError(
            f"expected a float32 state [slots, {heads}, {width}, {v.shape[2]}], "
            f"got {state.dtype} {[*state.shape]}"
        )
