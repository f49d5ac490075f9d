"""Operations that treat every element alike: the result's rows are the operands' rows, broadcast together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from .analysis import Facts, Result, rule
from .value import Value, fitted, make, together

POINTWISE = """
    abs acos acosh add addcdiv addcmul alias __and__ angle asin asinh atan atan2 atanh bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max
    clamp_min clone complex conj _conj conj_physical contiguous copysign cos cosh deg2rad detach digamma div
    dropout elu eq erf erfc erfinv exp exp2 expm1 fill float_power floor floor_divide fmax fmin fmod frac gcd
    ge gelu gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac imag isfinite isinf
    isnan lcm ldexp le leaky_relu lerp lgamma lift_fresh lift_fresh_copy log log10 log1p log2 log_sigmoid
    logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit __lshift__ lt masked_fill
    maximum minimum mish mul mvlgamma nan_to_num ne neg nextafter __or__ polar polygamma positive pow
    _prelu_kernel rad2deg real reciprocal relu relu6 remainder resolve_conj resolve_neg round __rshift__ rsqrt
    rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign special_bessel_j0
    special_entr special_erfcx special_i0e special_i1 special_log_ndtr special_ndtri special_zeta sqrt square
    sub tan tanh threshold to _to_copy trunc where xlogy __xor__
""".split()


def combine(facts: Facts, operands: Sequence[fx.Node]) -> Value:
    """Join the operands' axes after broadcasting them against the result."""
    shape = facts.out_shape

    def aligned(operand: fx.Node) -> tuple[Value, Callable[[int], int]]:
        shift = len(shape) - len(facts.shape(operand))
        return facts.value(operand), lambda dim: dim + shift

    joined = together(map(aligned, operands))
    axes = {dim: fitted(axis, shape[dim]) for dim, axis in joined.axes}
    return make(axes, joined.mixed, joined.why)


@rule(*POINTWISE)
def pointwise(facts: Facts) -> Result:
    if facts.node.meta.get("shape") is None:  # where(condition) lists the places where it is true
        return facts.unknown(f"{facts.name} finds places by value")
    return combine(facts, facts.tensors)


@rule("copy", "type_as")
def one_operand(facts: Facts) -> Value:
    """copy(destination, source) and type_as(source, like): only the source's elements survive."""
    source = facts.tensor(1, "src") if facts.name == "copy" else facts.tensor(0, "self")
    return combine(facts, [source])


@rule("bucketize")
def bucketize(facts: Facts) -> Result:
    """Which of the intervals between the boundaries each element falls into."""
    if not facts.value(facts.tensor(1, "boundaries")).is_fixed:
        return facts.unknown("boundaries that depend on tokens")
    return combine(facts, [facts.tensor(0, "self")])
