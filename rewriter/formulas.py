"""The vocabulary of formulas: what a tensor element can be, besides sympy's numbers and conditions.

A formula is exact: `Cell` stands for what is not known, and nothing else is left out.
"""

from __future__ import annotations

import math

import sympy
from sympy.logic.boolalg import Boolean

from .integers import ZERO, Condition, Expr, compare

Value = Expr
"""A number, or a Condition."""


class Cell(sympy.Function):
    """`Cell(node name, *coordinates)`: a real number, the element of that node there."""

    is_real = True

    def _sympystr(self, printer: sympy.printing.StrPrinter) -> str:
        name, *place = (printer.doprint(arg) for arg in self.args)
        return f"{name}[{', '.join(place)}]"


class Choose(sympy.Function):
    """`Choose(condition, a, b)`: `a` where the condition holds, else `b`."""

    is_real = True
    nargs = (3,)

    @classmethod
    def eval(cls, condition: Condition, a: Expr, b: Expr) -> Expr | None:
        if condition in (sympy.true, sympy.false):
            return a if condition == sympy.true else b
        return a if a == b else None


class pos(sympy.Function):  # printed as a formula writes it
    """`pos(i)`: the position id of token `i` of the row."""

    is_integer = True
    is_nonnegative = True


class seg(sympy.Function):
    """`seg(i)`: how often the position ids jumped up to token `i`, the number of its request in a packed row."""

    is_integer = True
    is_nonnegative = True


def in_one_request(value: Value) -> Value:
    """The value within one request, where the position of a token is its index and no position jumps."""
    while found := value.atoms(pos, seg):
        value = value.xreplace({f: f.args[0] if isinstance(f, pos) else ZERO for f in found})
    return value


def cases(value: Value) -> list[tuple[Condition, Value]]:
    """Conditions that exclude each other, and the value without `Choose` under each."""
    choices = [c for c in value.atoms(Choose) if not c.args[0].atoms(Choose)]
    if not choices:
        return [(sympy.true, value)]
    condition = min((c.args[0] for c in choices), key=str)
    found = []
    for holds, side in ((condition, 1), (sympy.Not(condition), 2)):
        taken = {c: c.args[side] for c in choices if c.args[0] == condition}
        for further, leaf in cases(value.xreplace(taken)):
            both = sympy.And(holds, further)
            if both != sympy.false:
                found.append((both, leaf))
    return found


def number(value: Value) -> Expr:
    """A truth value counts as 1 or 0."""
    if is_condition(value):
        return Choose(value, sympy.Integer(1), ZERO)
    return value


def condition(value: Value) -> Condition:
    """A number counts as true where it is not 0."""
    return value if is_condition(value) else relate(value, "!=", ZERO)


def is_condition(value: Value) -> bool:
    """Whether a value is a truth value (a sympy Symbol is a Condition too, but here a number)."""
    return isinstance(value, Boolean) and not isinstance(value, sympy.Symbol)


def constant(value: float | bool) -> Value:
    """A Python scalar."""
    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    if math.isinf(value):
        return sympy.oo if value > 0 else -sympy.oo
    if value == int(value) and abs(value) < 2**53:
        return sympy.Integer(int(value))
    return sympy.Float(value)


def relate(a: Value, relation: str, b: Value) -> Condition:
    """The condition `a <relation> b` between values that may hold `Choose`."""
    found = [
        sympy.And(one, two, compare(left, relation, right))
        for one, left in cases(number(a))
        for two, right in cases(number(b))
    ]
    return sympy.Or(*found)
