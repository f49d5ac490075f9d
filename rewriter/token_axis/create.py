"""Tensors made from nothing. Filled with one number they are uniform; counted by index they know their own place."""

from __future__ import annotations

from torch import fx

from .analysis import A_VALUE, Facts, holds_size, rule
from .value import FIXED, Axis, Value, fitted, has_tokens, make

FILL = {"full": 1, "new_full": 2, "full_like": 1, "scalar_tensor": 0}
"""Where the number is that fills the tensor."""


@rule(
    "full", "zeros", "ones", "empty", "new_full", "new_zeros", "new_ones", "new_empty", "full_like", "zeros_like",
    "ones_like", "empty_like", "new_empty_strided", "empty_strided", "scalar_tensor", "empty_permuted",
    sizes=True,
)  # fmt: skip
def uniform(facts: Facts) -> Value:
    """The tensor operand of `*_like` and `new_*` gives a shape or a dtype, never a value."""
    if facts.name not in FILL:
        return FIXED
    fill = facts.argument(FILL[facts.name], "s" if facts.name == "scalar_tensor" else "fill_value")
    if not isinstance(fill, fx.Node):
        return FIXED
    return Value((), True, A_VALUE) if holds_size(fill, facts.values) else facts.value(fill)


@rule("arange", "range", "linspace", sizes=True)
def arange(facts: Facts) -> Value:
    (size,) = facts.out_shape
    if has_tokens(size):
        return make({0: fitted(Axis(), size)}, True, "the row's own index (arange)")
    return Value((), True, A_VALUE) if facts.operands else FIXED


@rule("eye", sizes=True)
def eye(facts: Facts) -> Value:
    axes = {d: fitted(Axis(), size) for d, size in enumerate(facts.out_shape) if has_tokens(size)}
    return make(axes, bool(axes), "the row's own index (eye)")


@rule("one_hot", sizes=True)
def one_hot(facts: Facts) -> Value:
    value, classes = facts.value(facts.tensor(0, "self")), facts.out_shape[-1]
    if not has_tokens(classes):
        return value
    axes = {**dict(value.axes), len(facts.out_shape) - 1: fitted(Axis(), classes)}
    return make(axes, True, value.why or "one_hot over tokens")


@rule(
    "sym_size", "sym_numel", "sym_stride", "_assert_tensor_metadata", "_assert_async", "_assert_scalar",
    "sym_constrain_range_for_size", "sym_constrain_range", sizes=True,
)  # fmt: skip
def size(facts: Facts) -> Value:
    """Sizes are fixed as long as they are only used as sizes; see analysis.SIZED."""
    return FIXED
