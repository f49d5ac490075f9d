"""The operator's signature, checks and shapes."""

from __future__ import annotations

import torch

from .cpu import gated_delta_rule_cpu


@torch.library.custom_op("regraft::gated_delta_rule", mutates_args=("state",))
def gated_delta_rule(
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
    """Gated delta rule over the sequences of a packed row; advances each sequence's state in place.

    Per value head and token, all in float32:  S = exp(g) S;  S += k (beta (v - k S));  out = scale
    q S.

    Shapes: q, k [N, Hk, K], v [N, Hv, V], g [N, Hv] (log decay), beta [N, Hv], state [slots, Hv, K,
    V] float32; cu_seqlens [R+1] int32, context_lens [R] int32, state_slots [R] int64. Key head h
    serves the Hv // Hk consecutive value heads from h * (Hv // Hk). With `qk_l2norm` q and k are
    first divided by sqrt(sum of squares + 1e-6).

    A sequence whose `context_lens` is 0 starts from zero whatever its slot holds; one without new
    tokens keeps its state. Returns [N, Hv, V] in q's dtype, zero in rows of no sequence. Raises
    ValueError if shapes do not fit.
    """
    check_shapes(q, k, v, g, beta, state)
    arguments = (q, k, v, g, beta, state, cu_seqlens, context_lens, state_slots, scale, qk_l2norm)
    if q.is_cuda:
        # Triton is not on every machine, and need not be where there is no GPU.
        from .triton import gated_delta_rule_triton

        return gated_delta_rule_triton(*arguments)
    return gated_delta_rule_cpu(*arguments)


@gated_delta_rule.register_fake
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
    return q.new_empty(q.shape[0], *v.shape[1:])


def check_shapes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """Raise ValueError unless heads and widths fit together."""
    heads, width = v.shape[1:]
    if k.shape[1:] != q.shape[1:] or heads % q.shape[1]:
        raise ValueError(f"q {[*q.shape]}, k {[*k.shape]} and v {[*v.shape]} do not fit")
    if g.shape[1:] != (heads,) or beta.shape[1:] != (heads,):
        raise ValueError(f"expected g and beta [N, {heads}], got {[*g.shape]} and {[*beta.shape]}")
    if state.shape[1:] != (heads, q.shape[2], width) or state.dtype != torch.float32:
        raise ValueError(
            f"expected a float32 state [slots, {heads}, {q.shape[2]}, {width}], "
            f"got {state.dtype} {[*state.shape]}"
        )
