"""The invariant operators without caches and with gradients: for a forward pass that is trained.

Forward, bits are those of the operators that an engine runs. Backward is the plain operator's, whose sums may go in
another order: a gradient is not promised to be the same in any batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regraft.kernels.experts import autograd as _experts_autograd  # noqa: F401 (its gradient)
from regraft.kernels.varlen import recurrent as _recurrent  # noqa: F401 (registers the operators)
from regraft.kernels.varlen.differentiable import define

from . import attention, pointwise, products, reductions, schema, tokens


def _attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *options: Any) -> Tensor:
    """Every token is a page of its own."""
    lengths = cu_seqlens.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    place = torch.arange(longest, dtype=torch.int32, device=q.device)
    table = torch.where(place < lengths[:, None], cu_seqlens[:-1, None] + place, 0).int()
    k_cache, v_cache = (torch.empty_like(x.unsqueeze(1)) for x in (k, v))
    fresh = torch.zeros_like(lengths)
    rows = torch.arange(len(q), device=q.device)
    return schema.on_device(q, attention.paged_attention)(
        q, k, v, k_cache, v_cache, cu_seqlens, fresh, table, rows, *options
    )


def _recurrence(
    run: Callable[..., Tensor],
    names: Sequence[str],
    state_of: Callable[..., Sequence[int]],
    *values: Any,
) -> Tensor:
    """An operator with states, from zero: `names` are those of the values, `state_of` gives a state's shape."""
    given = dict(zip(names, values))
    count = len(given["cu_seqlens"]) - 1
    dtype = given["x"].dtype if run is tokens.causal_conv else torch.float32
    device = given["cu_seqlens"].device
    pool = torch.zeros(count, *state_of(given), dtype=dtype, device=device)
    pool_name = "conv_state" if run is tokens.causal_conv else "state"
    given |= {
        pool_name: pool,
        "context_lens": torch.zeros(count, dtype=torch.int32, device=device),
        "state_slots": torch.arange(count, device=device),
    }
    in_order = [given[name] for name in inspect.signature(run).parameters]
    return schema.on_device(pool, run)(*in_order)


def _delta_state(given: dict[str, Any]) -> Sequence[int]:
    return given["v"].shape[1], given["q"].shape[2], given["v"].shape[2]


_STATES: dict[str, Callable[[dict[str, Any]], Sequence[int]]] = {
    "gated_delta_rule": _delta_state,
    "kda": _delta_state,
    "decayed_linear": _delta_state,
    "ssd": lambda given: (*given["x"].shape[1:], given["B"].shape[2]),
    "selective_scan": lambda given: given["A"].shape,
    "causal_conv": lambda given: (
        given["x"].shape[1],
        (given["weight"].shape[1] - 1) * given["dilation"],
    ),
}


def _define_sequences() -> dict[str, torch._ops.OpOverload]:
    made = {}
    for name in ("attention", *_STATES):
        plain = getattr(torch.ops.regraft, f"varlen_{name}").default
        run: Callable[..., Tensor] = _attention
        if name in _STATES:
            names = [argument.name for argument in plain._schema.arguments]
            run = partial(_recurrence, schema.GRAFTED[name], names, _STATES[name])
        signature = "(" + str(plain._schema).partition("(")[2]
        define(f"varlen_invariant_{name}", signature, _plainly(run), plain, plain)
        made[f"varlen_{name}"] = getattr(torch.ops.regraft, f"varlen_invariant_{name}").default
    return made


def _plainly(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`run` as a function that takes what it is given, for a schema that says more."""

    def function(*args: Any) -> Tensor:
        return run(*args)

    return function


def _where_it_lies(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`run` on the device of its first argument."""

    def function(*args: Any) -> Tensor:
        return schema.on_device(args[0], run)(*args)

    return function


SEQUENCES = _define_sequences()
"""Name of an operator over whole sequences -> its invariant form."""


def _sum(x: Tensor, dims: Sequence[int], keepdim: bool, mean: bool) -> Tensor:
    total = torch.mean if mean else torch.sum
    return total(x, list(dims), keepdim=keepdim)


def _softmax(x: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
    return (x.log_softmax if log else x.softmax)(dim, dtype=dtype)


def _norm(
    x: Tensor, num_dims: int, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> Tensor:
    shape = x.shape[-num_dims:]
    if centered:
        return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)
    return torch.nn.functional.rms_norm(x, shape, weight, eps)


def _matmul(a: Tensor, b: Tensor, fixed: str) -> Tensor:
    return torch.matmul(a, b)


_ROWS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "linear": (products.linear, torch.nn.functional.linear),
    "matmul": (products.matmul, _matmul),
    "sum": (reductions.sum_over, _sum),
    "softmax": (reductions.softmax, _softmax),
    "norm": (reductions.norm, _norm),
    "pointwise": (pointwise.pointwise, pointwise.pointwise),
    "expert_linear": (products.expert_linear, torch.ops.regraft.expert_linear.default),
}
"""What is computed, and what is differentiated."""


def _define_rows() -> dict[str, torch._ops.OpOverload]:
    made = {}
    for name, (run, plain) in _ROWS.items():
        operator = getattr(torch.ops.regraft, f"invariant_{name}").default
        signature = "(" + str(operator._schema).partition("(")[2]
        define(f"trained_invariant_{name}", signature, _where_it_lies(run), operator, plain)
        made[f"invariant_{name}"] = getattr(torch.ops.regraft, f"trained_invariant_{name}").default
    return made


ROWS = _define_rows()
"""Name of an invariant operator on rows -> the same with a gradient."""


@torch.library.custom_op("regraft::trained_invariant_order", mutates_args=())
def order(x: Tensor, count: int, dim: int, descending: bool) -> Tensor:
    """Where the first `count` of `dim` in order are, int64: of equal ones, the earlier."""
    return reductions.ordered(x, count, dim, descending)[1]


@order.register_fake
def _(x: Tensor, count: int, dim: int, descending: bool) -> Tensor:
    return torch.empty_like(x.narrow(dim, 0, count), dtype=torch.int64)
