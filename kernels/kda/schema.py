"""The operator's signature, checks and shapes."""

from __future__ import annotations

import torch

from .cpu import kda_cpu


@torch.library.custom_op("regraft::kda", mutates_args=("state",))
def kda(
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
    """Kimi delta attention over the sequences of a packed row; advances each sequence's state in
    place.

    Per head and token, all in float32:  S = exp(g)[:, None] S;  S += k (beta (v - k S));  out =
    scale q S.

    Shapes: q, k [N, H, K], v [N, H, V], g [N, H, K] (log decay per key channel), beta [N, H], state
    [slots, H, K, V] float32; cu_seqlens [R+1] int32, context_lens [R] int32, state_slots [R] int64.
    With `qk_l2norm` q and k are first divided by sqrt(sum of squares + 1e-6).

    A sequence whose `context_lens` is 0 starts from zero whatever its slot holds; one without new
    tokens keeps its state. Returns [N, H, V] in q's dtype, zero in rows of no sequence. Raises
    ValueError if shapes do not fit.
    """
    check_shapes(q, k, v, g, beta, state)
    arguments = (q, k, v, g, beta, state, cu_seqlens, context_lens, state_slots, scale, qk_l2norm)
    if q.is_cuda:
        # Triton is not on every machine, and need not be where there is no GPU.
        from .triton import kda_triton

        return kda_triton(*arguments)
    return kda_cpu(*arguments)


@kda.register_fake
def _(
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
    check_shapes(q, k, v, g, beta, state)
    return q.new_empty(v.shape)


def check_shapes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """Raise ValueError unless heads and widths fit together."""
    heads, width = q.shape[1:]
    if k.shape[1:] != (heads, width) or v.shape[1] != heads:
        raise ValueError(f"q {[*q.shape]}, k {[*k.shape]} and v {[*v.shape]} do not fit")
    if g.shape[1:] != (heads, width) or beta.shape[1:] != (heads,):
        raise ValueError(
            f"expected g [N, {heads}, {width}] and beta [N, {heads}], "
            f"got {[*g.shape]} and {[*beta.shape]}"
        )
    if state.shape[1:] != (heads, width, v.shape[2]) or state.dtype != torch.float32:
        raise ValueError(
            f"expected a float32 state [slots, {heads}, {width}, {v.shape[2]}], "
            f"got {state.dtype} {[*state.shape]}"
        )
