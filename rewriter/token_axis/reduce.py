"""Operations along dimensions: sums, norms, softmax, sorts, running sums. Along the token axis they mix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regraft.rewriter.graph import Size

from .analysis import Facts, Result, rule
from .elementwise import combine
from .value import PERM, Axis, Value, fitted, has_tokens, make, same_place, together

REDUCTIONS = """
    all amax amin any argmax argmin count_nonzero kthvalue linalg_vector_norm logsumexp max mean median min mode
    nanmedian nansum norm prod std std_mean sum var var_mean
""".split()


def _several(facts: Facts, value: Value) -> Result:
    """Values and indices, for instance: one value for each result."""
    count = len(facts.schema.returns)
    return (value,) * count if count > 1 else value


def _names(facts: Facts) -> list[str]:
    return [argument.name for argument in facts.schema.arguments]


def _dims(facts: Facts, name: str, ndim: int) -> list[int]:
    """The dimensions named by an argument of the schema; all of them if there is no such argument, or none is given."""
    names = _names(facts)
    if name not in names:
        return list(range(ndim))
    default = facts.schema.arguments[names.index(name)].default_value
    argument: Any = facts.argument(names.index(name), name, default)
    if argument is None or argument == []:
        return list(range(ndim))
    listed = argument if isinstance(argument, (list, tuple)) else [argument]
    return [dim + ndim if dim < 0 else dim for dim in listed]


@rule(*REDUCTIONS)
def reduction(facts: Facts) -> Result:
    source, names = facts.tensor(0, "self"), _names(facts)
    if "other" in names:  # max(a, b): element by element
        return combine(facts, facts.tensors)
    shape = facts.shape(source)
    keep = "keepdim" in names and bool(facts.argument(names.index("keepdim"), "keepdim", False))
    dims = _dims(facts, "dim", len(shape))
    return _several(
        facts, reduced(facts.value(source), shape, dims, keep, f"{facts.name} over tokens")
    )


def reduced(value: Value, shape: Sequence[Size], dims: list[int], keep: bool, why: str) -> Value:
    """Drop `dims`. A dimension of T elements is mixed, and a uniform one still counts the tokens."""
    mixes = any(has_tokens(shape[dim]) for dim in dims)
    axes = {
        (dim if keep else dim - sum(d < dim for d in dims)): axis
        for dim, axis in value.axes
        if dim not in dims
    }
    result = make(axes, value.mixed, value.why)
    return result.mix(why) if mixes else result


ALONG = {
    "softmax": 1, "_softmax": 1, "log_softmax": 1, "_log_softmax": 1, "cumsum": 1, "cumprod": 1, "cummax": 1,
    "cummin": 1, "logcumsumexp": 1, "_safe_softmax": 1,
}  # fmt: skip
"""Where the dimension is among the arguments."""


@rule(*ALONG)
def along(facts: Facts) -> Result:
    """The same shape, each element a function of its line along `dim`. Elements keep their place."""
    source = facts.tensor(0, "self")
    dim = facts.dim(facts.argument(ALONG[facts.name], "dim"), source)
    value, size = facts.value(source), facts.shape(source)[dim]
    if has_tokens(size):
        axes = dict(value.axes)
        if "cum" in facts.name:
            axes.setdefault(dim, fitted(Axis(), size))
        value = make(axes, True, value.why or f"{facts.name.strip('_')} over tokens")
    return _several(facts, value)


@rule("sort", "argsort", "topk", "msort", "flip", "roll")
def reorder(facts: Facts) -> Result:
    """Elements change place along `dim`; along tokens nothing is known of the order afterwards."""
    source = facts.tensor(0, "self")
    value, shape = facts.value(source), facts.shape(source)
    if facts.name == "msort":
        dims = [0]
    else:
        dims = _dims(facts, "dims" if facts.name in ("flip", "roll") else "dim", len(shape))
    touched = [dim for dim in dims if has_tokens(shape[dim])]
    axes = dict(value.axes)
    for dim in touched:
        axes.pop(dim, None)
        if facts.name != "topk" or has_tokens(_topk_size(facts, dim)):
            axes[dim] = PERM
    result = make(axes, value.mixed or bool(touched), value.why or f"{facts.name} over tokens")
    return _several(facts, result)


def _topk_size(facts: Facts, dim: int) -> Size:
    return next((shape[dim] for shape in facts.out_shapes if shape), 0)


@rule("diff")
def diff(facts: Facts) -> Value:
    """x[i + 1] - x[i], with what is put before and behind x."""
    dim = facts.dim(facts.argument(2, "dim", -1), facts.tensor(0, "self"))
    joined = together((facts.value(part), same_place) for part in facts.tensors)
    axes = {d: fitted(axis, facts.out_shape[d]) for d, axis in joined.axes}
    if has_tokens(facts.out_shape[dim]):
        return make(axes, True, joined.why or "difference of neighbouring tokens")
    return make(axes, joined.mixed, joined.why)


@rule("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def norm(facts: Facts) -> Result:
    source = facts.tensor(0, "input")
    normalised = facts.argument(1, "normalized_shape")
    assert isinstance(normalised, (list, tuple))
    value, shape = facts.value(source), facts.shape(source)
    if any(has_tokens(size) for size in shape[len(shape) - len(normalised) :]):
        value = value.mix("norm over tokens")
    if not all(facts.value(operand).is_fixed for operand in facts.tensors if operand is not source):
        value = value.mix("norm weights that depend on tokens")
    return _several(facts, value)


@rule("glu")
def glu(facts: Facts) -> Value:
    """One half of a dimension times the sigmoid of the other."""
    source = facts.tensor(0, "self")
    dim, value = facts.dim(facts.argument(1, "dim", -1), source), facts.value(source)
    if has_tokens(facts.shape(source)[dim]):
        return make({**dict(value.axes), dim: PERM}, True, value.why or "glu over tokens")
    return value


@rule("tril", "triu")
def triangle(facts: Facts) -> Value:
    """Elements are kept or dropped by their own row and column index."""
    source = facts.tensor(0, "self")
    value, shape = facts.value(source), facts.shape(source)
    indexed = [dim for dim in (len(shape) - 2, len(shape) - 1) if has_tokens(shape[dim])]
    axes = {dim: fitted(Axis(), shape[dim]) for dim in indexed} | dict(value.axes)
    return make(axes, value.mixed or bool(indexed), value.why or "the row's own index")
