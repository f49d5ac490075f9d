"""Tensors made from nothing. Filled with one number they are uniform; counted by index they know the row's own place."""

from __future__ import annotations

from torch import fx

from .analysis import Facts, rule
from .value import FIXED, Axis, Value, fitted, has_tokens, make, tokens_multiple


@rule(
    "full", "zeros", "ones", "empty", "new_full", "new_zeros", "new_ones", "new_empty", "full_like", "zeros_like",
    "ones_like", "empty_like", "new_empty_strided", "empty_strided", "scalar_tensor", "empty_permuted",
)  # fmt: skip
def uniform(facts: Facts) -> Value:
    """The tensor operand of `*_like` and `new_*` gives a shape or a dtype, never a value."""
    name = facts.node.target._opname  # type: ignore[union-attr]
    position = {"full": 1, "new_full": 2, "full_like": 1, "scalar_tensor": 0}.get(name)
    if position is not None:
        fill = facts.argument(position, "fill_value")
        if isinstance(fill, fx.Node):
            if fill.meta.get("shape") is None:
                return Value((), True, "the number of tokens is used as a value")
            return facts.value(fill)
    return FIXED


@rule("arange", "range", "linspace")
def arange(facts: Facts) -> Value:
    (size,) = facts.out_shape
    arguments = [*facts.node.args, *facts.node.kwargs.values()]
    counted = any(isinstance(argument, fx.Node) for argument in arguments)
    if not has_tokens(size):
        return Value((), True, "the number of tokens is used as a value") if counted else FIXED
    return make({0: fitted(Axis(), size)}, True, "the row's own index (arange)")


@rule("eye")
def eye(facts: Facts) -> Value:
    axes = {d: fitted(Axis(), size) for d, size in enumerate(facts.out_shape) if has_tokens(size)}
    return make(axes, bool(axes), "the row's own index (eye)")


@rule("one_hot")
def one_hot(facts: Facts) -> Value:
    value = facts.value(facts.operands[0])
    if tokens_multiple(facts.out_shape[-1]) is not None:
        return value.mix("one_hot over tokens")
    return value


@rule("sym_size", "sym_numel", "sym_stride", "_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range_for_size", "sym_constrain_range")
def size(facts: Facts) -> Value:
    """Sizes are fixed as long as they are only used as sizes; the other rules see to that."""
    return FIXED
