"""Integers inside a tensor's index: symbols with a known range, and floor division that simplifies.

Sizes and coordinates are sympy expressions in TOKENS and `Index` symbols. sympy knows too little about ranges to see
that `floor((h*T + t) / T)` is `h`, so floor division is the function `Quotient` below, and a remainder is spelled
`a - n * floor(a/n)`, so that `n * floor(a/n) + a mod n` folds back to `a` by plain addition.
"""

from __future__ import annotations

import functools
import math
from typing import Any, TypeAlias

import sympy
from torch.utils._sympy import functions as export_functions

from .graph import TOKENS, Size

Expr: TypeAlias = Any
"""A sympy expression (sympy's own annotations are too wrong to check against)."""
Condition: TypeAlias = Any
"""A sympy condition: a Boolean that is no Symbol."""
Bound: TypeAlias = Any
"""An Expr, or None where there is no limit."""

ZERO, ONE = sympy.Integer(0), sympy.Integer(1)


class Index(sympy.Symbol):
    """An integer `i` with `0 <= i < size`: one coordinate of a tensor element."""

    size: Expr

    def __new__(cls, name: str, size: Size) -> Index:
        self = sympy.Symbol.__xnew__(cls, name, integer=True, nonnegative=True)
        self.size = plain(size)
        return self

    def __getnewargs_ex__(self) -> tuple:
        return (self.name, self.size), {}

    def _hashable_content(self) -> tuple:
        return (*super()._hashable_content(), self.size)


class Quotient(sympy.Function):
    """`floor(a / n)` for an integer `a` and a positive integer `n`, which may both contain TOKENS."""

    is_integer = True
    nargs = (2,)

    @classmethod
    def eval(cls, a: Expr, n: Expr) -> Expr | None:
        if n == 1:
            return a
        if a.is_Integer and n.is_Integer:
            return sympy.Integer(int(a) // int(n))
        if isinstance(a, Quotient):
            return cls(a.args[0], a.args[1] * n)
        whole, rest = _divide(sympy.expand(a), n)
        if whole != 0:
            return whole + cls(rest, n)
        return ZERO if _within(rest, n) else _cancel(rest, n)

    def _sympystr(self, printer: sympy.printing.StrPrinter) -> str:
        a, n = (f"({arg})" if arg.is_Add or arg.is_Mul else str(arg) for arg in self.args)
        return f"floor({a}/{n})"


def remainder(a: Expr, n: Expr) -> Expr:
    """`a mod n`, in 0..n-1."""
    return sympy.expand(a - n * Quotient(a, n))


_SPELLINGS = (
    (export_functions.Max, sympy.Max),
    (export_functions.Min, sympy.Min),
    (export_functions.FloorDiv, Quotient),
    (export_functions.CleanDiv, Quotient),
    (export_functions.PythonMod, remainder),
    (export_functions.Mod, remainder),
)


def plain(size: Size) -> Expr:
    """A size with export's own functions replaced by the ones used here."""
    size = sympy.sympify(size)
    for theirs, ours in _SPELLINGS:
        if size.has(theirs):
            size = size.replace(theirs, ours)
    return size


def _divide(a: Expr, n: Expr) -> tuple[Expr, Expr]:
    """`a = n * whole + rest`, moving into `whole` what divides term by term."""
    whole = rest = ZERO
    for term in sympy.Add.make_args(a):
        coefficient, symbols = term.as_coeff_Mul()
        if _is_integral(term / n):
            whole += term / n
        elif n.is_Integer and coefficient.is_Integer:
            whole += (int(coefficient) // int(n)) * symbols
            rest += (int(coefficient) % int(n)) * symbols
        else:
            rest += term
    return whole, rest


def _is_integral(monomial: Expr) -> bool:
    numerator, denominator = monomial.as_numer_denom()
    return bool(denominator == 1 and numerator.as_coeff_Mul()[0].is_Integer)


def _cancel(a: Expr, n: Expr) -> Expr | None:
    """Divide both by a common factor g, if what g does not divide stays within 0..g-1."""
    terms = sympy.Add.make_args(a)
    for g in dict.fromkeys(_common_factor(term, n) for term in terms):
        if g == 1:
            continue
        divided = [term for term in terms if _is_integral(term / g)]
        left = sympy.Add(*(term for term in terms if term not in divided))
        if _within(left, g):
            return Quotient(sympy.Add(*(term / g for term in divided)), sympy.expand(n / g))
    return None


def _common_factor(term: Expr, n: Expr) -> Expr:
    (a, _), (b, _) = term.as_coeff_Mul(), n.as_coeff_Mul()
    if not (a.is_Integer and b.is_Integer):
        return ONE
    powers = [e.as_powers_dict().get(TOKENS, 0) for e in (term, n)]
    return math.gcd(int(a), int(b)) * TOKENS ** min(powers)


def _within(e: Expr, n: Expr) -> bool:
    """Whether `0 <= e < n` is certain."""
    low, high = bounds(e)
    return (
        low is not None
        and high is not None
        and is_nonnegative(low)
        and is_nonnegative(n - 1 - high)
    )


@functools.lru_cache(maxsize=1 << 16)
def bounds(e: Expr) -> tuple[Bound, Bound]:
    """The least and the greatest value of `e` over the ranges of its indices, in TOKENS; None where unknown."""
    low: Bound = ZERO
    high: Bound = ZERO
    for term in sympy.Add.make_args(_split_digits(sympy.expand(e))):
        least, greatest = _term_bounds(term)
        low = None if low is None or least is None else low + least
        high = None if high is None or greatest is None else high + greatest
    return low, high


def _term_bounds(term: Expr) -> tuple[Bound, Bound]:
    """Bounds of `coefficient * variable`, where the coefficient is made of numbers and TOKENS."""
    variables = [
        f for f in sympy.Mul.make_args(term) if f.has(sympy.Function, sympy.Max, sympy.Min)
    ]
    variables += [
        f for f in sympy.Mul.make_args(term) if f not in variables and f.free_symbols - {TOKENS}
    ]
    if not variables:
        return term, term
    if len(variables) > 1:
        return None, None
    coefficient = term / variables[0]
    least, greatest = _variable_bounds(variables[0])
    if is_nonnegative(-coefficient):
        least, greatest = greatest, least
    elif not is_nonnegative(coefficient):
        return None, None
    low, high = (b if b is None else sympy.expand(coefficient * b) for b in (least, greatest))
    return low, high


def _variable_bounds(e: Expr) -> tuple[Bound, Bound]:
    if isinstance(e, Index):
        return ZERO, e.size - 1
    if isinstance(e, Quotient):
        low, high = (b if b is None else Quotient(b, e.args[1]) for b in bounds(e.args[0]))
        return low, high
    if isinstance(e, (sympy.Max, sympy.Min)):
        return _extremum_bounds(e)
    return (ZERO, None) if e.is_nonnegative else (None, None)


def _extremum_bounds(e: Expr) -> tuple[Bound, Bound]:
    """One argument's limit bounds a maximum from below; to bound it from above takes a limit of all."""
    largest = isinstance(e, sympy.Max)
    lows, highs = zip(*(bounds(a) for a in e.args))
    one_sided, all_sided = (lows, highs) if largest else (highs, lows)
    sign = 1 if largest else -1
    either = next((b for b in one_sided if b is not None), None)
    outer = None
    if None not in all_sided:
        above_all = (b for b in all_sided if all(is_nonnegative(sign * (b - o)) for o in all_sided))
        outer = next(above_all, None)
        if outer is None and not largest and all(map(is_nonnegative, all_sided)):
            outer = ZERO  # none is the least for certain, but none is below zero
    return (either, outer) if largest else (outer, either)


def decide_extrema(e: Expr) -> Expr:
    """The expression without each `Max` and `Min` that the ranges of the indices decide."""
    for found in sorted(e.atoms(sympy.Max, sympy.Min), key=sympy.count_ops):
        sign = 1 if isinstance(found, sympy.Max) else -1
        for winner in found.args:
            if all(is_nonnegative(sympy.expand(sign * (winner - a))) for a in found.args):
                return decide_extrema(e.xreplace({found: winner}))
    return e


def _split_digits(e: Expr) -> Expr:
    """Write `i` as `n*high + low` wherever `e` also holds `floor(i/n)`, so that the two vary independently."""
    while True:
        digits = [
            q for q in e.atoms(Quotient) if isinstance(q.args[0], Index) and q.args[1].is_Integer
        ]
        if not digits:
            return e
        index, n = min(digits, key=lambda q: int(q.args[1])).args
        high = Index(f"{index.name}/{n}", Quotient(index.size - 1, n) + 1)
        low = Index(f"{index.name}%{n}", n)
        e = sympy.expand(e.xreplace({index: n * high + low}))


@functools.lru_cache(maxsize=1 << 16)
def is_nonnegative(e: Expr) -> bool:
    """Whether `e >= 0` is certain for every TOKENS >= 1 and every value of its indices."""
    if e.is_number:
        return bool(e >= 0)
    if e.free_symbols != {TOKENS} or e.has(sympy.Function, sympy.Max, sympy.Min):
        low, _ = bounds(e)
        if low == e:
            low = _below_parts_of_tokens(e)
        return low is not None and low != e and is_nonnegative(low)
    above_one = sympy.Poly(e.xreplace({TOKENS: TOKENS + 1}), TOKENS)
    return all(c >= 0 for c in above_one.coeffs())


def _below_parts_of_tokens(e: Expr) -> Bound:
    """The expression with a lower limit in place of each multiple of `floor(TOKENS / n)`, which is in 0..TOKENS/n."""
    for part in e.atoms(Quotient):
        factor = sympy.expand(e).coeff(part)
        rest = sympy.expand(e - factor * part)
        if part.args[0] != TOKENS or not part.args[1].is_Integer or rest.has(part):
            return None
        if not factor.is_number:
            return None
        e = rest if factor >= 0 else rest + factor * TOKENS / part.args[1]
    return e


def _is_positive(e: Expr) -> bool:
    return bool(e > 0) if e.is_number else is_nonnegative(e - 1)


def compare(a: Expr, relation: str, b: Expr) -> Condition:
    """The condition `a <relation> b` ("<", "<=", ">", ">=", "==", "!="), decided where the ranges allow it."""
    if relation in (">", ">="):
        a, relation, b = b, {">": "<", ">=": "<="}[relation], a
    low, high = bounds(b - a)
    above = low is not None and _is_positive(low)
    below = high is not None and _is_positive(-high)
    if relation in ("==", "!="):
        equal = False if above or below else True if sympy.expand(b - a) == 0 else None
        if equal is None:
            return sympy.Eq(a, b) if relation == "==" else sympy.Ne(a, b)
        return sympy.true if equal == (relation == "==") else sympy.false
    if relation == "<":
        certain, never = above, high is not None and is_nonnegative(-high)
    else:
        certain, never = low is not None and is_nonnegative(low), below
    if certain or never:
        return sympy.true if certain else sympy.false
    return sympy.Lt(a, b) if relation == "<" else sympy.Le(a, b)
