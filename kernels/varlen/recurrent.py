"""Recurrent mixers over whole sequences: every state starts from zero and is dropped at the end.

Each is the functional core of its stateful twin, which is plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regraft.kernels.causal_conv.cpu import causal_conv_reference, tap_rows, with_history
from regraft.kernels.decayed_linear.cpu import decayed_linear_reference
from regraft.kernels.delta_rule.cpu import gated_delta_rule_reference
from regraft.kernels.kda.cpu import kda_reference
from regraft.kernels.recurrent.sequences import own_rows
from regraft.kernels.selective_scan.cpu import selective_scan_reference
from regraft.kernels.ssd.cpu import discretised_dt, ssd_reference

from .differentiable import define


def _zeros(cu_seqlens: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A zero state for every sequence."""
    return torch.zeros(len(cu_seqlens) - 1, *shape, dtype=dtype, device=cu_seqlens.device)


def _causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    dilation: int,
    cu_seqlens: Tensor,
) -> Tensor:
    history = _zeros(cu_seqlens, x.shape[1], (weight.shape[1] - 1) * dilation, dtype=x.dtype)
    return causal_conv_reference(x, weight, bias, activation, dilation, history, cu_seqlens)[0]


def _causal_window(x: Tensor, width: int, dilation: int, cu_seqlens: Tensor) -> Tensor:
    history = _zeros(cu_seqlens, x.shape[1], (width - 1) * dilation, dtype=x.dtype)
    taps = tap_rows(x.shape[0], width, dilation, cu_seqlens)
    inputs = with_history(x, history)
    windows = inputs.index_select(0, taps.flatten()).unflatten(0, taps.shape).movedim(0, -1)
    return own_rows(windows, cu_seqlens.tolist()).contiguous()


def _gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> Tensor:
    state = _zeros(cu_seqlens, v.shape[1], q.shape[2], v.shape[2])
    bounds = cu_seqlens.tolist()
    return gated_delta_rule_reference(q, k, v, g, beta, state, bounds, scale, qk_l2norm)[0]


def _kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> Tensor:
    state = _zeros(cu_seqlens, *q.shape[1:], v.shape[2])
    return kda_reference(q, k, v, g, beta, state, cu_seqlens.tolist(), scale, qk_l2norm)[0]


def _ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    cu_seqlens: Tensor,
) -> Tensor:
    dt = discretised_dt(dt, dt_bias, dt_softplus, dt_min, dt_max)
    state = _zeros(cu_seqlens, *x.shape[1:], B.shape[2])
    return ssd_reference(x, dt, A, B, C, D, state, cu_seqlens.tolist())[0]


def _selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    cu_seqlens: Tensor,
) -> Tensor:
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    bounds = cu_seqlens.tolist()
    out = selective_scan_reference(x, dt, A, B, C, _zeros(cu_seqlens, *A.shape), bounds)[0]
    if D is not None:
        out = out + own_rows(x * D, bounds)
    if z is not None:
        out = out * own_rows(torch.nn.functional.silu(z), bounds)
    return out


def _decayed_linear(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, cu_seqlens: Tensor) -> Tensor:
    state = _zeros(cu_seqlens, *q.shape[1:], v.shape[2])
    return decayed_linear_reference(q, k, v, decay, state, cu_seqlens.tolist())[0]


def _promoted(x: Tensor, *others: Tensor | None) -> torch.dtype:
    dtype = x.dtype
    for other in others:
        if other is not None:
            dtype = torch.promote_types(dtype, other.dtype)
    return dtype


varlen_causal_conv = define(
    "varlen_causal_conv",
    "(Tensor x, Tensor weight, Tensor? bias, str? activation, int dilation, Tensor cu_seqlens) -> Tensor",
    _causal_conv,
    lambda x, *_: x.new_empty(x.shape),
)
varlen_causal_window = define(
    "varlen_causal_window",
    "(Tensor x, int width, int dilation, Tensor cu_seqlens) -> Tensor",
    _causal_window,
    lambda x, width, *_: x.new_empty(*x.shape, width),
)
varlen_gated_delta_rule = define(
    "varlen_gated_delta_rule",
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, float scale, "
    "bool qk_l2norm) -> Tensor",
    _gated_delta_rule,
    lambda q, k, v, *_: q.new_empty(v.shape),
)
varlen_kda = define(
    "varlen_kda",
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, float scale, "
    "bool qk_l2norm) -> Tensor",
    _kda,
    lambda q, k, v, *_: q.new_empty(v.shape),
)
varlen_ssd = define(
    "varlen_ssd",
    "(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? dt_bias, "
    "bool dt_softplus, float dt_min, float dt_max, Tensor cu_seqlens) -> Tensor",
    _ssd,
    lambda x, *_: x.new_empty(x.shape, dtype=torch.float32),
)
varlen_selective_scan = define(
    "varlen_selective_scan",
    "(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "bool dt_softplus, Tensor cu_seqlens) -> Tensor",
    _selective_scan,
    lambda x, dt, A, B, C, D, z, *_: x.new_empty(x.shape, dtype=_promoted(x, D, z)),
)
varlen_decayed_linear = define(
    "varlen_decayed_linear",
    "(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor cu_seqlens) -> Tensor",
    _decayed_linear,
    lambda q, k, v, *_: q.new_empty(v.shape),
)
