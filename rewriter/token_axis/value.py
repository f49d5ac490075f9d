"""Abstract values: along which dimensions of a tensor do the tokens of the packed row run?

A dimension of size `outer * T * inner` with index `(o * T + t) * inner + i` carries the token axis. The meaning of a
value with axes A that is not `mixed`: an element depends on the rows of its own token indices along A, and on no other
row. So

    no axes, not mixed      depends on no token (weights, constants)
    one ok axis, not mixed  row-local: one independent row per token
    two ok axes, not mixed  pairwise (a mask, scores)
    mixed                   may depend on any row; nothing is promised but what the prefix test measures

A dimension whose size contains T but that is not among the axes is *uniform*: its elements do not differ along it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import sympy

from regraft.rewriter.graph import TOKENS, Size

Kind = Literal["ok", "odd", "perm"]
"""ok: rows in order; odd: rows in order but not T of them (padding, cuts); perm: order unknown."""


@dataclass(frozen=True)
class Axis:
    """The token axis inside one dimension."""

    outer: int = 1
    inner: int = 1
    kind: Kind = "ok"


ODD, PERM = Axis(kind="odd"), Axis(kind="perm")
Axes = tuple[tuple[int, Axis], ...]


@dataclass(frozen=True)
class Value:
    """What is known about one tensor. `why` says what mixed its rows, for reasons and reports."""

    axes: Axes = ()
    mixed: bool = False
    why: str = ""

    @property
    def is_fixed(self) -> bool:
        return not self.axes and not self.mixed

    @property
    def has_row_shape(self) -> bool:
        """One dimension with the rows in order: if it is mixed too, a region may close here."""
        return len(self.axes) == 1 and self.axes[0][1].kind == "ok"

    @property
    def is_row_local(self) -> bool:
        return self.has_row_shape and not self.mixed

    @property
    def token_dim(self) -> int:
        """The dimension that carries the tokens of a value with row shape."""
        assert self.has_row_shape
        return self.axes[0][0]

    def mix(self, why: str) -> Value:
        """The same axes, after an operation that mixes tokens."""
        return replace(self, mixed=True, why=self.why or why)


FIXED = Value()
ROWS = Value(((1, Axis()),))


def make(axes: dict[int, Axis], mixed: bool, why: str = "") -> Value:
    """A value from a dict of axes. Axes out of order or of odd size have lost their alignment: that is mixing."""
    mixed = mixed or any(axis.kind != "ok" for axis in axes.values())
    return Value(tuple(sorted(axes.items())), mixed, why if mixed else "")


def has_tokens(size: Size) -> bool:
    """True for a size that is not one number: it grows with T, or depends on values (`nonzero`)."""
    return isinstance(size, sympy.Expr) and not size.is_number


def tokens_multiple(size: Size) -> int | None:
    """c where size == c * T, else None."""
    return _multiple(size) if isinstance(size, sympy.Expr) else None


@cache
def _multiple(size: sympy.Expr) -> int | None:
    quotient = sympy.cancel(size / TOKENS) if has_tokens(size) else None
    return int(quotient) if quotient is not None and quotient.is_Integer else None


def fitted(axis: Axis, size: Size) -> Axis:
    """`axis` on a dimension that now has `size`: an axis whose size no longer fits is odd."""
    if axis.kind == "ok" and tokens_multiple(size) != axis.outer * axis.inner:
        return ODD
    return axis


def join(first: Axis | None, second: Axis) -> Axis:
    """The axis of a dimension along which two operands are combined element by element."""
    return second if first is None or first == second else PERM


def together(parts: Iterable[tuple[Value, Callable[[int], int | None]]]) -> Value:
    """The value of elements combined one by one. `place(dim)` is where a part's dimension is in the result, None if
    it is no dimension of the result.
    """
    axes: dict[int, Axis] = {}
    mixed, why = False, ""
    for value, place in parts:
        mixed, why = mixed or value.mixed, why or value.why
        for dim, axis in value.axes:
            at = place(dim)
            if at is not None:
                axes[at] = join(axes.get(at), axis)
    return make(axes, mixed, why)


def same_place(dim: int) -> int:
    """Every dimension of the operand is the same dimension of the result."""
    return dim
