"""Recurrences token by token, and the convolution tap by tap: prefill and decode are one computation.

A step is elementwise but for `tree_sum`, and is taken for all sequences of a row that still have a token. A chunked
form is faster in a long prefill, but rounds otherwise than a decode step does. States are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from regraft.kernels.causal_conv.cpu import last_inputs, tap_rows, with_history
from regraft.kernels.recurrent.sequences import own_rows
from regraft.kernels.recurrent.states import initial_states, store_states

from .pointwise import pointwise
from .reductions import tree_sum

Inputs = tuple[Tensor, ...]
Step = Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]


def run_tokens(
    step: Step,
    inputs: Inputs,
    pool: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    state_slots: Tensor,
) -> Tensor:
    """`step(rows [A, ...], states [A, ...])` -> (output rows, states) for every token; states go back to their slots.

    Returns the output rows [N, ...], zero in rows of no sequence.
    """
    lengths = cu_seqlens.diff()
    order = lengths.argsort(descending=True, stable=True)
    starts, lengths = cu_seqlens[:-1][order].long(), lengths[order]
    state = initial_states(pool, state_slots, context_lens)[order]
    rows, outputs = [], []
    for token in range(int(lengths[0]) if len(lengths) else 0):
        alive = int((lengths > token).sum())
        at = starts[:alive] + token
        out, state[:alive] = step(tuple(x[at] for x in inputs), state[:alive])
        rows.append(at)
        outputs.append(out)
    store_states(pool, state_slots, state[order.argsort()], cu_seqlens)
    num_rows = inputs[0].shape[0]
    if not outputs:
        shape = step(tuple(x[:0] for x in inputs), pool[:0])[0].shape[1:]
        return inputs[0].new_zeros(num_rows, *shape)
    every = torch.cat(outputs)
    return every.new_zeros(num_rows, *every.shape[1:]).index_copy_(0, torch.cat(rows), every)


def _delta_step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, factor, beta = inputs  # [A, H, K], [A, H, K], [A, H, V], [A, H, K or 1], [A, H]
    state = state * factor.unsqueeze(-1)
    read = tree_sum(state * k.unsqueeze(-1), -2).squeeze(-2)
    correction = (v - read) * beta.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * correction.unsqueeze(-2)
    return tree_sum(state * q.unsqueeze(-1), -2).squeeze(-2), state


def _delta(
    q: Tensor, k: Tensor, v: Tensor, factor: Tensor, beta: Tensor, state: Tensor,
    cu_seqlens: Tensor, context_lens: Tensor, state_slots: Tensor, scale: float, qk_l2norm: bool,
) -> Tensor:  # fmt: skip
    dtype = q.dtype
    q, k, v, beta = (x.float() for x in (q, k, v, beta))
    if qk_l2norm:
        q, k = (x / (tree_sum(x * x, -1) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q * scale, k))
    inputs = (q, k, v, factor, beta)
    return run_tokens(_delta_step, inputs, state, cu_seqlens, context_lens, state_slots).to(dtype)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor,
    context_lens: Tensor, state_slots: Tensor, scale: float, qk_l2norm: bool,
) -> Tensor:  # fmt: skip
    """As `regraft.kernels.delta_rule.gated_delta_rule`."""
    factor = g.float().exp().unsqueeze(-1)
    return _delta(
        q, k, v, factor, beta, state, cu_seqlens, context_lens, state_slots, scale, qk_l2norm
    )


def kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor,
    context_lens: Tensor, state_slots: Tensor, scale: float, qk_l2norm: bool,
) -> Tensor:  # fmt: skip
    """As `regraft.kernels.kda.kda`."""
    factor = g.float().exp()
    return _delta(
        q, k, v, factor, beta, state, cu_seqlens, context_lens, state_slots, scale, qk_l2norm
    )


def _linear_step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, factor = inputs  # [A, H, K], [A, H, K], [A, H, V], [A, H]
    state = state * factor[..., None, None] + k.unsqueeze(-1) * v.unsqueeze(-2)
    return tree_sum(state * q.unsqueeze(-1), -2).squeeze(-2), state


def decayed_linear(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor, cu_seqlens: Tensor,
    context_lens: Tensor, state_slots: Tensor,
) -> Tensor:  # fmt: skip
    """As `regraft.kernels.decayed_linear.decayed_linear`."""
    factor = decay.float().exp().expand(q.shape[0], -1)
    inputs = (q.float(), k.float(), v.float(), factor)
    out = run_tokens(_linear_step, inputs, state, cu_seqlens, context_lens, state_slots)
    return out.to(q.dtype)


def _finished_dt(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Biased and passed through softplus in its own dtype, as the models do."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return pointwise(dt, "softplus") if softplus else dt


def _ssd_step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    B, C, x, factor = inputs  # [A, H, S], [A, H, S], [A, H, P], [A, H]
    state = state * factor[..., None, None] + x.unsqueeze(-1) * B.unsqueeze(-2)
    return tree_sum(state * C.unsqueeze(-2), -1).squeeze(-1), state


def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    dt_softplus: bool, dt_min: float, dt_max: float, state: Tensor, cu_seqlens: Tensor,
    context_lens: Tensor, state_slots: Tensor,
) -> Tensor:  # fmt: skip
    """As `regraft.kernels.ssd.ssd`."""
    dt = _finished_dt(dt, dt_bias, dt_softplus).clamp(dt_min, dt_max).float()
    x = x.float()
    B, C = (t.float().repeat_interleave(x.shape[1] // t.shape[1], dim=1) for t in (B, C))
    inputs = (B, C, x * dt.unsqueeze(-1), (A.float() * dt).exp())
    out = run_tokens(_ssd_step, inputs, state, cu_seqlens, context_lens, state_slots)
    if D is not None:
        skipped = x * (D if D.dim() == 2 else D[:, None])
        out = out + own_rows(skipped, cu_seqlens.tolist())
    return out


def _selective_step(
    A: Tensor, dtype: torch.dtype, inputs: Inputs, state: Tensor
) -> tuple[Tensor, Tensor]:
    u, dt, B, C = inputs  # [M, C], [M, C], [M, S], [M, S]
    state = (A * dt.unsqueeze(-1)).exp() * state + u.unsqueeze(-1) * B.unsqueeze(-2)
    read = state.to(dtype).float() * C.to(dtype).float().unsqueeze(-2)
    return tree_sum(read, -1).squeeze(-1).to(dtype), state


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, dt_softplus: bool, state: Tensor, cu_seqlens: Tensor,
    context_lens: Tensor, state_slots: Tensor,
) -> Tensor:  # fmt: skip
    """As `regraft.kernels.selective_scan.selective_scan`."""
    dt = _finished_dt(dt, dt_bias, dt_softplus).float()
    inputs = (dt * x.float(), dt, B.float(), C)
    step = partial(_selective_step, A.float(), x.dtype)
    out = run_tokens(step, inputs, state, cu_seqlens, context_lens, state_slots)
    if D is not None:
        out = out + own_rows(x * D, cu_seqlens.tolist())
    if z is not None:
        out = out * own_rows(pointwise(z, "silu"), cu_seqlens.tolist())
    return out


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, dilation: int,
    conv_state: Tensor, cu_seqlens: Tensor, context_lens: Tensor, state_slots: Tensor,
) -> Tensor:  # fmt: skip
    """As `regraft.kernels.causal_conv.causal_conv`: a product and a sum a tap, which nothing may fuse."""
    history = initial_states(conv_state, state_slots, context_lens)
    inputs = with_history(x, history)
    out = torch.zeros(x.shape, dtype=torch.float32)
    if bias is not None:
        out = out + bias.float()
    taps = tap_rows(x.shape[0], weight.shape[1], dilation, cu_seqlens)
    for rows, factor in zip(taps, weight.float().unbind(1)):
        product = inputs.index_select(0, rows).to(weight.dtype).float() * factor
        out = out + product
    out = out.to(weight.dtype)
    if activation == "silu":
        out = pointwise(out, "silu")
    store_states(conv_state, state_slots, last_inputs(inputs, history, cu_seqlens), cu_seqlens)
    return own_rows(out.to(x.dtype), cu_seqlens.tolist())
