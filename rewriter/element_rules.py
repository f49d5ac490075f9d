"""What each operation makes of the elements of its operands, one rule an operation.

A rule gets the reader (rewriter/elements.py), the node and the coordinates of one element, and returns a formula or
raises OpaqueError where none is certain.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

import sympy
import torch
from torch import fx

from .formulas import (
    Cell,
    Choose,
    Value,
    cases,
    condition,
    constant,
    in_one_request,
    is_condition,
    number,
    pos,
    relate,
    seg,
)
from .indexing import Coordinates, argument, arguments, broadcast, size_value, sizes_of, trace
from .integers import ZERO, Condition, Expr, Index, Quotient, compare, is_nonnegative, remainder

if TYPE_CHECKING:
    from .elements import Elements


class OpaqueError(Exception):
    """An element that cannot be written as a formula."""


Rule = Callable[["Elements", fx.Node, Coordinates], Value]


def _name(node: fx.Node) -> str:
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target._opname


# ---- arithmetic


def _pointwise(function: Callable[..., Expr]) -> Rule:
    """An operation of one or two numbers."""

    def rule(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
        operands = [number(elements.operand(arg, coordinates)) for arg in arguments(node)]
        return function(*operands)

    return rule


def _of_two(function: Callable[..., Expr]) -> Rule:
    """max and min of two tensors; the same names also reduce one."""

    def rule(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
        if len(arguments(node)) != 2 or not isinstance(arguments(node)[1], fx.Node):
            raise OpaqueError
        return _pointwise(function)(elements, node, coordinates)

    return rule


def _scaled_sum(sign: int, reverse: bool = False) -> Rule:
    """`self + sign * alpha * other`, or the two exchanged."""

    def rule(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
        a, b = (number(elements.operand(arg, coordinates)) for arg in arguments(node)[:2])
        alpha = argument(node, 2, "alpha", 1)
        if reverse:
            a, b = b, a
        return a + sign * constant(alpha) * b

    return rule


def _divide(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
    a, b = (number(elements.operand(arg, coordinates)) for arg in arguments(node)[:2])
    rounding = node.kwargs.get("rounding_mode")
    if rounding is None:
        return a / b
    if rounding == "trunc" and not is_nonnegative(a):
        raise OpaqueError
    return _floor(a / b)


def _floor_divide(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
    a, b = (number(elements.operand(arg, coordinates)) for arg in arguments(node)[:2])
    return _floor(a / b)


def _floor(value: Expr) -> Expr:
    above, below = sympy.fraction(sympy.together(value))
    if not (above.is_integer and below.is_integer and is_nonnegative(below - 1)):
        raise OpaqueError
    return Quotient(above, below)


def _modulo(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
    a, n = (number(elements.operand(arg, coordinates)) for arg in arguments(node)[:2])
    if not (a.is_integer and n.is_integer and is_nonnegative(n - 1)):
        raise OpaqueError
    if _name(node) == "fmod" and not is_nonnegative(a):
        raise OpaqueError
    return remainder(a, n)


def _clamp(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
    value = number(elements.operand(arguments(node)[0], coordinates))
    least, greatest = argument(node, 1, "min"), argument(node, 2, "max")
    if least is not None:
        value = sympy.Max(value, number(elements.operand(least, coordinates)))
    if greatest is not None:
        value = sympy.Min(value, number(elements.operand(greatest, coordinates)))
    return value


def _cast(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
    """A cast that may round; formulas are of real numbers, and rounding a float is not their subject."""
    value, dtype = elements.at(arguments(node)[0], coordinates), node.meta["dtype"]
    if dtype == torch.bool:
        return condition(value)
    value = number(value)
    if dtype.is_floating_point or all(leaf.is_integer for _, leaf in cases(value)):
        return value
    raise OpaqueError


def _batched_product(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
    """baddbmm: beta * self + alpha * (product); the product itself is the node's cell."""
    beta, alpha = (constant(argument(node, i, name, 1)) for i, name in ((3, "beta"), (4, "alpha")))
    added = ZERO if beta == 0 else beta * number(elements.operand(arguments(node)[0], coordinates))
    return added + alpha * elements.cell(node, coordinates)


# ---- conditions and selections


def _comparison(relation: str) -> Rule:
    def rule(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
        a, b = (elements.operand(arg, coordinates) for arg in arguments(node)[:2])
        if is_condition(a) and is_condition(b) and relation in ("==", "!="):
            same = sympy.Or(sympy.And(a, b), sympy.And(sympy.Not(a), sympy.Not(b)))
            return same if relation == "==" else sympy.Not(same)
        return relate(a, relation, b)

    return rule


def _logical(combine: Callable[..., Condition], only_bool: bool) -> Rule:
    """And, or, not, xor; the bitwise spelling is the same thing on truth values only."""

    def rule(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
        operands = [elements.operand(arg, coordinates) for arg in arguments(node)]
        if only_bool and not all(is_condition(value) for value in operands):
            raise OpaqueError
        return combine(*(condition(value) for value in operands))

    return rule


def _exclusive_or(a: Condition, b: Condition) -> Condition:
    return sympy.Or(sympy.And(a, sympy.Not(b)), sympy.And(sympy.Not(a), b))


def choose(when: Condition, a: Value, b: Value) -> Value:
    """`a` where the condition holds, else `b`."""
    if is_condition(a) and is_condition(b):
        return sympy.Or(sympy.And(when, a), sympy.And(sympy.Not(when), b))
    return Choose(when, number(a), number(b))


def _where(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
    when, a, b = (elements.operand(arg, coordinates) for arg in arguments(node))
    return choose(condition(when), a, b)


def _masked_fill(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
    value, when, filled = (elements.operand(arg, coordinates) for arg in arguments(node))
    return choose(condition(when), filled, value)


def _triangle(relation: str) -> Rule:
    def rule(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
        value = elements.at(arguments(node)[0], coordinates)
        diagonal = size_value(argument(node, 1, "diagonal", 0))
        row, column = coordinates[-2:]
        kept = compare(column - row, relation, diagonal)
        return choose(kept, value, sympy.false if is_condition(value) else ZERO)

    return rule


# ---- creation


def _filled(value: float) -> Rule:
    def rule(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
        return constant(bool(value) if node.meta["dtype"] == torch.bool else value)

    return rule


def _full(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
    position = 2 if _name(node) == "new_full" else 1
    value = elements.operand(arguments(node)[position], ())
    return condition(value) if node.meta["dtype"] == torch.bool else number(value)


def _arange(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
    bounds = [size_value(arg) for arg in arguments(node)]
    start = bounds[0] if len(bounds) > 1 else ZERO
    step = bounds[2] if len(bounds) > 2 else sympy.Integer(1)
    if start is None or step is None:
        raise OpaqueError
    return start + step * coordinates[0]


def _copy(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
    return elements.operand(arguments(node)[1], coordinates)


def _pad(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
    source, widths = arguments(node)[:2]
    named = _name(node) == "pad"
    if named and argument(node, 2, "mode", "constant") != "constant":
        raise OpaqueError
    fill = argument(node, 3 if named else 2, "value", 0) or 0
    place, inside = list(coordinates), []
    for i in range(len(widths) // 2):
        dim, before = len(place) - 1 - i, size_value(widths[2 * i])
        if before is None:
            raise OpaqueError
        place[dim] = place[dim] - before
        inside += [compare(place[dim], ">=", ZERO), compare(place[dim], "<", sizes_of(source)[dim])]
    value = elements.at(source, tuple(place))
    filled = constant(fill)
    return choose(sympy.And(*inside), value, condition(filled) if is_condition(value) else filled)


# ---- along the token axis


def _difference(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
    """diff with one value prepended: `x[i] - x[i-1]`, and `x[0] - prepended` at the start."""
    source, prepended = arguments(node)[0], argument(node, 3, "prepend")
    dim = argument(node, 2, "dim", -1) % len(coordinates)
    simple = argument(node, 1, "n", 1) == 1 and argument(node, 4, "append") is None
    if not simple or not isinstance(prepended, fx.Node) or sizes_of(prepended)[dim] != 1:
        raise OpaqueError

    def place(at: Expr) -> Coordinates:
        return (*coordinates[:dim], at, *coordinates[dim + 1 :])

    at = coordinates[dim]
    first = number(elements.at(source, place(ZERO))) - number(elements.at(prepended, place(ZERO)))
    later = number(elements.at(source, place(at))) - number(elements.at(source, place(at - 1)))
    return Choose(compare(at, "==", ZERO), first, later)


def _running_sum(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
    """cumsum of a constant, or of something that is zero unless positions jump."""
    source, dim = arguments(node)[0], arguments(node)[1] % len(coordinates)
    each = Index("i", sizes_of(source)[dim])
    summand = number(elements.at(source, (*coordinates[:dim], each, *coordinates[dim + 1 :])))
    within = number(in_one_request(summand))
    if within == 0 and summand.atoms(pos):
        return seg(coordinates[dim])
    if within.has(each):
        raise OpaqueError
    return summand * (coordinates[dim] + 1)


def _index(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
    """x[i, j, ...] with tensors of integers."""
    source, indices = arguments(node)
    taken = [dim for dim, index in enumerate(indices) if index is not None]
    if any(indices[dim].meta["dtype"] in (torch.bool, torch.uint8) for dim in taken):
        raise OpaqueError
    rank = max(len(sizes_of(indices[dim])) for dim in taken)
    adjacent = taken == list(range(taken[0], taken[-1] + 1))
    start = taken[0] if adjacent else 0
    inner = coordinates[start : start + rank]
    rest = iter((*coordinates[:start], *coordinates[start + rank :]))
    place = []
    for dim in range(len(sizes_of(source))):
        if dim in taken:
            place.append(
                _integer(elements.at(indices[dim], broadcast(inner, sizes_of(indices[dim]))))
            )
        else:
            place.append(next(rest))
    return elements.at(source, tuple(place))


def _gather(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
    source, dim, index = arguments(node)[:3]
    dim = dim % len(coordinates)
    at = _integer(elements.at(index, coordinates))
    place = (*coordinates[:dim], at, *coordinates[dim + 1 :])
    value = elements.at(source, place)
    # A table computed from rows is one unknown: what it was computed from says nothing about its entries.
    return elements.cell(*trace(source, place)[-1]) if value.atoms(Cell) else value


def _index_select(elements: Elements, node: fx.Node, coordinates: Coordinates) -> Value:
    source, dim, index = arguments(node)
    dim = dim % len(coordinates)
    at = _integer(elements.at(index, (coordinates[dim],)))
    return elements.at(source, (*coordinates[:dim], at, *coordinates[dim + 1 :]))


def _integer(value: Value) -> Expr:
    """An index, which must be known not to count from the end."""
    value = number(value)
    if not value.is_integer or value.has(Choose) or not is_nonnegative(value):
        raise OpaqueError
    return value


RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "add_"), _scaled_sum(1)),
    "sub": _scaled_sum(-1),
    "rsub": _scaled_sum(-1, reverse=True),
    "mul": _pointwise(operator.mul),
    "neg": _pointwise(operator.neg),
    "div": _divide,
    "floor_divide": _floor_divide,
    **dict.fromkeys(("remainder", "fmod"), _modulo),
    "floor": _pointwise(_floor),
    "reciprocal": _pointwise(lambda a: 1 / a),
    "abs": _pointwise(sympy.Abs),
    "square": _pointwise(lambda a: a**2),
    "pow": _pointwise(operator.pow),
    "exp": _pointwise(sympy.exp),
    "exp2": _pointwise(lambda a: 2**a),
    "log": _pointwise(sympy.log),
    "tanh": _pointwise(sympy.tanh),
    "relu": _pointwise(lambda a: sympy.Max(a, 0)),
    "maximum": _pointwise(sympy.Max),
    "minimum": _pointwise(sympy.Min),
    "max": _of_two(sympy.Max),
    "min": _of_two(sympy.Min),
    "clamp": _clamp,
    "clamp_min": _pointwise(sympy.Max),
    "clamp_max": _pointwise(sympy.Min),
    **dict.fromkeys(("_to_copy", "to", "type_as"), _cast),
    "baddbmm": _batched_product,
    "eq": _comparison("=="),
    "ne": _comparison("!="),
    "lt": _comparison("<"),
    "le": _comparison("<="),
    "gt": _comparison(">"),
    "ge": _comparison(">="),
    **dict.fromkeys(("__and__", "bitwise_and"), _logical(sympy.And, only_bool=True)),
    **dict.fromkeys(("__or__", "bitwise_or"), _logical(sympy.Or, only_bool=True)),
    **dict.fromkeys(("__xor__", "bitwise_xor"), _logical(_exclusive_or, only_bool=True)),
    "bitwise_not": _logical(sympy.Not, only_bool=True),
    "logical_and": _logical(sympy.And, only_bool=False),
    "logical_or": _logical(sympy.Or, only_bool=False),
    "logical_xor": _logical(_exclusive_or, only_bool=False),
    "logical_not": _logical(sympy.Not, only_bool=False),
    "where": _where,
    "masked_fill": _masked_fill,
    "tril": _triangle("<="),
    "triu": _triangle(">="),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _filled(0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _filled(1)),
    **dict.fromkeys(("full", "full_like", "new_full"), _full),
    "scalar_tensor": lambda elements, node, coordinates: elements.operand(arguments(node)[0], ()),
    "arange": _arange,
    "copy": _copy,
    **dict.fromkeys(("pad", "constant_pad_nd"), _pad),
    "diff": _difference,
    "cumsum": _running_sum,
    "index": _index,
    "gather": _gather,
    "index_select": _index_select,
}
