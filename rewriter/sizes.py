"""Integer algebra in one symbol: where a guard on the number of tokens holds, and what a size is there.

Export leaves guards ("this graph is right where 512 - Max(0, 512 - T) equals T") and sizes in the same dialect. Both
are decided exactly for piecewise linear expressions (Min, Max, sums, integer multiples): between two neighbouring
breakpoints nothing can change, so one test on each side of each breakpoint settles it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import sympy
from torch.utils._sympy.functions import FloorDiv, Max, Min

FAR = 1 << 24
"""A number of tokens that no row reaches: what holds from some point up to here holds without bound."""

LARGEST_BLOCK = 4096
"""Most tokens of a block that a row is made longer for."""

_DENSE = 256
_MAX_PIECES = 64


@dataclass(frozen=True)
class Interval:
    """The numbers of tokens from `low` to `high` (None: no upper bound), both included."""

    low: int = 1
    high: int | None = None

    def meet(self, other: Interval) -> Interval:
        highs = [high for high in (self.high, other.high) if high is not None]
        return Interval(max(self.low, other.low), min(highs) if highs else None)


def holds(guard: sympy.Basic, symbol: sympy.Symbol, value: int) -> bool:
    """Whether `guard` is true with `symbol` = `value`. Where it divides by zero it does not hold."""
    try:
        return bool(guard.xreplace({symbol: sympy.Integer(value)}) == sympy.true)
    except (
        ZeroDivisionError,
        AssertionError,
    ):  # what the symbolic Mod raises for operands that it is not defined for
        return False


def guard_interval(guard: sympy.Basic, symbol: sympy.Symbol, example: int) -> Interval | None:
    """The interval around `example` where `guard` holds, or None if the guard fixes the number of tokens.

    A lower bound is always accepted. An upper bound is accepted only from a piecewise linear guard (a table of
    limited length); one that comes out of a division says that a count of blocks was fixed.
    """
    if not holds(guard, symbol, example):
        return None
    points = _breakpoints(guard, symbol)
    linear = points is not None
    if points is None:
        probes = _probes(guard)
    else:
        probes = sorted({p for q in points for p in (q - 1, q, q + 1) if 1 <= p <= FAR})
    low, high = 1, None
    for probe in probes:
        if holds(guard, symbol, probe):
            continue
        if probe < example:
            low = max(low, probe + 1)
        else:
            high = probe - 1
            break
    if high is None:
        return Interval(low)
    return Interval(low, high) if linear and high > low else None


def missing_block(guard: sympy.Basic, symbol: sympy.Symbol, example: int) -> int | None:
    """The size of the largest blocks that `guard` counts, if `example` tokens have none of them; None if they do."""
    sizes = {
        int(count.args[1])
        for count in guard.atoms(FloorDiv)
        if count.args[0] == symbol and count.args[1].is_Integer
    }
    largest = max(sizes, default=0)
    return largest if example < largest <= LARGEST_BLOCK else None


def _probes(guard: sympy.Basic) -> list[int]:
    """Numbers to try where the breakpoints are not known: all small ones, and around multiples of every divisor."""
    near = {
        factor * int(abs(c)) + d
        for c in guard.atoms(sympy.Integer)
        for factor in range(1, 5)
        for d in range(-2, 3)
    }
    powers = {(1 << n) + d for n in range(8, 25) for d in (-1, 0, 1)}
    return sorted(p for p in near | powers | set(range(1, _DENSE)) if 1 <= p <= FAR)


def simplify_size(expr: sympy.Basic, symbol: sympy.Symbol, where: Interval) -> sympy.Basic:
    """`expr` with each Min and Max decided where the order of its arguments is the same all over `where`."""
    if not isinstance(expr, sympy.Expr) or not expr.args:
        return expr
    args = [simplify_size(arg, symbol, where) for arg in expr.args]
    if isinstance(expr, (Max, Min, sympy.Max, sympy.Min)):
        return _decide(type(expr), args, symbol, where)
    rebuilt = expr.func(*args)
    return sympy.expand(rebuilt) if _affine(rebuilt, symbol) else rebuilt


def _decide(
    kind: type, args: list[sympy.Basic], symbol: sympy.Symbol, where: Interval
) -> sympy.Basic:
    """The winning arguments of a Min or Max."""
    wants_larger = kind in (Max, sympy.Max)
    kept: list[sympy.Basic] = []
    for arg in args:
        others = [other for other in args if other is not arg]
        beaten = False
        for other in others:
            sign = _sign(sympy.expand(other - arg), symbol, where)
            wins = sign is not None and (sign >= 0 if wants_larger else sign <= 0)
            beaten |= wins and not (sign == 0 and other not in kept)
        if not beaten:
            kept.append(arg)
    return kept[0] if len(kept) == 1 else kind(*kept)


def _sign(expr: sympy.Basic, symbol: sympy.Symbol, where: Interval) -> int | None:
    """Sign of an affine expression over an interval: 1 (never negative), -1 (never positive), 0, None (unknown)."""
    if not _affine(expr, symbol):
        return None
    slope, start = expr.coeff(symbol), expr.xreplace({symbol: sympy.Integer(where.low)})
    if where.high is None:
        end = sympy.sign(slope) * sympy.oo if slope != 0 else start
    else:
        end = expr.xreplace({symbol: sympy.Integer(where.high)})
    if start == 0 and end == 0:
        return 0
    if start >= 0 and end >= 0:
        return 1
    return -1 if start <= 0 and end <= 0 else None


def _affine(expr: sympy.Basic, symbol: sympy.Symbol) -> bool:
    if not isinstance(expr, sympy.Expr) or not expr.free_symbols <= {symbol}:
        return False
    expanded = sympy.expand(expr)
    rest = expanded - expanded.coeff(symbol) * symbol
    return bool(expanded.coeff(symbol).is_number and sympy.expand(rest).is_number)


def _breakpoints(guard: sympy.Basic, symbol: sympy.Symbol) -> set[int] | None:
    """Where the truth of a piecewise linear guard may change; None if it is not piecewise linear in `symbol`."""
    points: set[int] = set()
    for relation in _relations(guard):
        if relation is None:
            return None
        pieces = _pieces(relation.lhs - relation.rhs, symbol)
        if pieces is None:
            return None
        for one, two in itertools.combinations([*pieces, sympy.Integer(0)], 2):
            difference = sympy.expand(one - two)
            slope = difference.coeff(symbol)
            if slope != 0:
                root = -difference.coeff(symbol, 0) / slope
                points |= {math.floor(root), math.ceil(root)}
    return points


def _relations(guard: sympy.Basic) -> Iterator[sympy.core.relational.Relational | None]:
    if isinstance(guard, sympy.core.relational.Relational):
        yield guard
    elif isinstance(guard, (sympy.And, sympy.Or, sympy.Not)):
        for arg in guard.args:
            yield from _relations(arg)
    elif guard not in (sympy.true, sympy.false):
        yield None


def _pieces(expr: sympy.Basic, symbol: sympy.Symbol) -> list[sympy.Expr] | None:
    """Affine expressions of which `expr` equals one at every point; None if there are no such (or too many)."""
    if _affine(expr, symbol):
        return [sympy.expand(expr)]
    if isinstance(expr, (Max, Min, sympy.Max, sympy.Min)):
        found = [_pieces(arg, symbol) for arg in expr.args]
        if any(pieces is None for pieces in found):
            return None
        union = {piece for pieces in found for piece in pieces or ()}
        return sorted(union, key=str) if len(union) <= _MAX_PIECES else None
    if isinstance(expr, (sympy.Add, sympy.Mul)):
        found = [_pieces(arg, symbol) for arg in expr.args]
        if any(pieces is None for pieces in found):
            return None
        if math.prod(len(pieces or ()) for pieces in found) > _MAX_PIECES:
            return None
        combined = {
            sympy.expand(expr.func(*choice))
            for choice in itertools.product(*(p or () for p in found))
        }
        return (
            sorted(combined, key=str) if all(_affine(piece, symbol) for piece in combined) else None
        )
    return None
