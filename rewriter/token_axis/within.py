"""Operations that combine elements along some dimensions, and keep apart what lies along the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .analysis import Facts, Result, rule
from .elementwise import combine
from .value import PERM, Value, fitted, has_tokens, make

FROM = {"group_norm": 1, "instance_norm": 2, "upsample_nearest1d": 2, "upsample_linear1d": 2}
"""Operator -> the first dimension of those that it combines."""

LAST = ("avg_pool1d", "max_pool1d", "adaptive_avg_pool1d", "_adaptive_avg_pool1d")
"""Operators along the last dimension."""


@rule(*FROM)
def from_a_dimension(facts: Facts) -> Result:
    """Norms of groups of channels, and the like."""
    return _along(facts, range(FROM[facts.name], len(facts.out_shape)))


@rule(*LAST)
def last(facts: Facts) -> Result:
    """Windows over the last dimension."""
    return _along(facts, [len(facts.out_shape) - 1])


@rule("_native_batch_norm_legit_no_training")
def batch_norm(facts: Facts) -> Result:
    """With running statistics a channel is scaled. In training, which has no rule, all else is averaged."""
    return _along(facts, [1])


@rule("linalg_cross", "_fft_r2c", "_fft_c2c", "_fft_c2r", "rot90", "diagonal", "diag_embed")
def named(facts: Facts) -> Result:
    """Dimensions that are arguments. A diagonal drops its two, the embedding of one makes two, behind all others."""
    arguments = {argument.name: argument.default_value for argument in facts.schema.arguments}
    places = list(arguments)
    dims: list[int] = []
    ndim = max(len(facts.shape(facts.tensor(0, places[0]))), len(facts.out_shape))
    for name in ("dim", "dims", "dim1", "dim2"):
        if name in arguments:
            given: Any = facts.argument(places.index(name), name, arguments[name])
            dims += [d % ndim for d in (given if isinstance(given, (list, tuple)) else [given])]
    if facts.name in ("diagonal", "diag_embed"):
        if sorted(dims) != [ndim - 2, ndim - 1]:
            return facts.unknown(f"{facts.name} of other dimensions than the last")
        dims = dims if facts.name == "diagonal" else [ndim - 2]
    return _along(facts, dims)


def _along(facts: Facts, dims: Sequence[int]) -> Result:
    """Elements of the first operand are combined along `dims`; other operands must be weights, or lie beside it."""
    first, *others = facts.tensors
    if facts.name != "linalg_cross" and not all(facts.value(o).is_fixed for o in others):
        return facts.unknown(f"operands of {facts.name} that depend on tokens")
    touched = [dim for dim in dims if _grows(facts, first, dim)]
    if facts.name == "linalg_cross" and not touched:
        return combine(facts, facts.tensors)
    value = facts.value(first)
    shapes = facts.out_shapes if facts.has_many else [facts.out_shape]
    results = tuple(_kept(value, touched, shape, facts.name) for shape in shapes)
    return results if facts.has_many else results[0]


def _grows(facts: Facts, first: Any, dim: int) -> bool:
    shape = facts.shape(first)
    return dim < len(shape) and has_tokens(shape[dim])


def _kept(value: Value, touched: Sequence[int], shape: Sequence[Any], name: str) -> Value:
    axes = {
        dim: PERM if dim in touched else fitted(axis, shape[dim])
        for dim, axis in value.axes
        if dim < len(shape)
    }
    return make(axes, value.mixed or bool(touched), value.why or f"{name} over tokens")
