"""Operations along dimensions: sums, norms, softmax, sorts, running sums. Along the token axis they mix."""

from __future__ import annotations

import torch

from .analysis import Facts, Result, rule
from .layout import first_operand
from .value import PERM, Value, fitted, has_tokens, make

REDUCTIONS = """
    all amax amin any argmax argmin count_nonzero linalg_vector_norm logsumexp max mean median min norm nansum prod std
    sum var
""".split()


def _dims(facts: Facts, argument: object, ndim: int) -> list[int]:
    if argument is None or argument == []:
        return list(range(ndim))
    listed = argument if isinstance(argument, (list, tuple)) else [argument]
    return [dim + ndim if dim < 0 else dim for dim in listed]


@rule(*REDUCTIONS)
def reduction(facts: Facts) -> Result:
    from .elementwise import combine

    source = first_operand(facts)
    schema = facts.node.target._schema  # type: ignore[union-attr]
    names = [argument.name for argument in schema.arguments]
    if "other" in names:  # max(a, b): element by element
        return combine(facts, facts.operands)
    shape = facts.shape(source)
    argument = facts.argument(names.index("dim"), "dim") if "dim" in names else None
    dims = _dims(facts, argument, len(shape))
    keep = bool(facts.argument(names.index("keepdim"), "keepdim", False)) if "keepdim" in names else False
    value = reduced(facts.value(source), shape, dims, keep, f"{schema.name.split('::')[-1]} over tokens")
    return (value,) * len(schema.returns) if len(schema.returns) > 1 else value


def reduced(value: Value, shape: tuple, dims: list[int], keep: bool, why: str) -> Value:
    """Drop `dims`. A dimension of T elements is mixed, and a uniform one still counts the tokens."""
    mixes = any(has_tokens(shape[dim]) for dim in dims) or any(dim in dims for dim, _ in value.axes)
    axes = {}
    for dim, axis in value.axes:
        if dim not in dims:
            axes[dim if keep else dim - sum(d < dim for d in dims)] = axis
    result = make(axes, value.mixed, value.why)
    return result.mix(why) if mixes else result


ALONG = {
    "softmax": 1, "_softmax": 1, "log_softmax": 1, "_log_softmax": 1, "cumsum": 1, "cumprod": 1, "cummax": 1,
    "cummin": 1, "logcumsumexp": 1, "_safe_softmax": 1,
}  # fmt: skip


@rule(*ALONG)
def along(facts: Facts) -> Result:
    """The same shape, each element a function of its line along `dim`. Elements keep their place."""
    source = first_operand(facts)
    name = facts.node.target._opname  # type: ignore[union-attr]
    dim = facts.dim(facts.argument(ALONG[name], "dim"), source)
    value, shape = facts.value(source), facts.shape(source)
    if has_tokens(shape[dim]):
        axes = dict(value.axes)
        if "cum" in name and dim not in axes:
            axes[dim] = fitted_plain(shape[dim])
        value = make(axes, True, value.why or f"{name.strip('_')} over tokens")
    count = len(facts.node.target._schema.returns)  # type: ignore[union-attr]
    return (value,) * count if count > 1 else value


def fitted_plain(size: object):  # noqa: ANN201
    """An axis made from the index itself along a dimension of this size."""
    from .value import Axis

    return fitted(Axis(), size)  # type: ignore[arg-type]


@rule("sort", "argsort", "topk", "msort", "kthvalue", "flip", "roll", "unique_dim")
def reorder(facts: Facts) -> Result:
    """Elements change place along `dim`; along tokens nothing is known of the order afterwards."""
    source = first_operand(facts)
    target = facts.node.target
    names = [argument.name for argument in target._schema.arguments]  # type: ignore[union-attr]
    key = "dims" if "dims" in names else "dim"
    default = [] if key == "dims" else -1
    argument = facts.argument(names.index(key), key, default)
    dims = _dims(facts, argument, len(facts.shape(source)))
    value, shape = facts.value(source), facts.shape(source)
    touched = any(has_tokens(shape[dim]) for dim in dims)
    axes = dict(value.axes)
    for dim in dims:
        if has_tokens(shape[dim]):
            axes.pop(dim, None)
            out = facts.node.meta.get("shape")
            if target._opname not in ("topk", "kthvalue") or (out and has_tokens(out[dim])):  # type: ignore[union-attr]
                axes[dim] = PERM
    result = make(axes, value.mixed or touched, value.why or f"{target._opname} over tokens")  # type: ignore[union-attr]
    count = len(target._schema.returns)  # type: ignore[union-attr]
    return (result,) * count if count > 1 else result


@rule("diff")
def diff(facts: Facts) -> Value:
    source = first_operand(facts)
    dim = facts.dim(facts.argument(2, "dim", -1), source)
    value = facts.value(source)
    axes = {d: fitted(axis, facts.out_shape[d]) for d, axis in value.axes}
    if has_tokens(facts.shape(source)[dim]):
        return make(axes, True, value.why or "difference of neighbouring tokens")
    return make(axes, value.mixed, value.why)


@rule("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def norm(facts: Facts) -> Result:
    source = first_operand(facts)
    normalised = facts.argument(1, "normalized_shape")
    assert isinstance(normalised, (list, tuple))
    value, shape = facts.value(source), facts.shape(source)
    over = range(len(shape) - len(normalised), len(shape))
    others = [operand for operand in facts.operands if operand is not source]
    if any(has_tokens(shape[dim]) for dim in over):
        value = value.mix("norm over tokens")
    if not all(facts.value(operand).is_fixed for operand in others):
        value = value.mix("norm weights that depend on tokens")
    count = len(facts.node.target._schema.returns)  # type: ignore[union-attr]
    return (value,) * count if count > 1 else value


@rule("glu")
def glu(facts: Facts) -> Value:
    source = first_operand(facts)
    dim = facts.dim(facts.argument(1, "dim", -1), source)
    value = facts.value(source)
    if has_tokens(facts.shape(source)[dim]):
        return make({dim: PERM}, True, "glu over tokens")
    return value


@rule("tril", "triu")
def triangle(facts: Facts) -> Value:
    """Elements are kept or dropped by their own row and column index."""
    source = first_operand(facts)
    value, shape = facts.value(source), facts.shape(source)
    axes = dict(value.axes)
    for dim in (len(shape) - 2, len(shape) - 1):
        if has_tokens(shape[dim]):
            axes.setdefault(dim, fitted_plain(shape[dim]))
    indexed = any(has_tokens(size) for size in shape[-2:])
    return make(axes, value.mixed or indexed, value.why or "the row's own index")


