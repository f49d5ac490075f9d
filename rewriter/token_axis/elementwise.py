"""Operations that treat every element alike: the result's rows are the operands' rows, broadcast together."""

from __future__ import annotations

from torch import fx

from .analysis import Facts, rule
from .value import Axis, Value, fitted, join, make

POINTWISE = """
    abs acos add atan2 bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp
    clamp_max clamp_min clip clone complex cos cosh detach alias contiguous div elu eq erf erfc erfinv exp exp2 expm1 fill floor
    floor_divide fmod frac ge gelu gt hardsigmoid hardswish hardtanh hypot isfinite isinf isnan imag ldexp le
    leaky_relu lerp log log10 log1p log2 log_sigmoid logaddexp logical_and logical_not logical_or logical_xor logit
    lt masked_fill maximum minimum mish mul nan_to_num ne neg polar positive pow real reciprocal relu relu6
    remainder round rsqrt rsub selu sgn sigmoid sign silu sin sinc sinh softplus softshrink sqrt square sub tan
    tanh to threshold true_divide trunc type_as where xlogy _to_copy _conj conj resolve_conj resolve_neg
    __and__ __or__ __xor__ __lshift__ __rshift__ _to_dense addcmul addcdiv angle asin atan float_power
    lift_fresh_copy lift_fresh hardshrink softsign conj_physical special_expit
""".split()


def combine(facts: Facts, operands: list[fx.Node]) -> Value:
    """Join the operands' axes after broadcasting them against the result."""
    shape = facts.out_shape
    axes: dict[int, Axis] = {}
    mixed, why = False, ""
    for operand in operands:
        value = facts.value(operand)
        if operand.meta.get("shape") is None:
            mixed, why = True, why or "the number of tokens is used as a value"
            continue
        shift = len(shape) - len(facts.shape(operand))
        for dim, axis in value.axes:
            joined = join(axes.get(dim + shift), axis)
            assert joined is not None
            axes[dim + shift] = fitted(joined, shape[dim + shift])
        mixed, why = mixed or value.mixed, why or value.why
    return make(axes, mixed, why)


@rule(*POINTWISE)
def pointwise(facts: Facts) -> Value:
    return combine(facts, facts.operands)


@rule("copy")
def copy(facts: Facts) -> Value:
    """copy(destination, source): only the source's elements survive."""
    source = facts.argument(1, "src")
    assert isinstance(source, fx.Node)
    return combine(facts, [source])
