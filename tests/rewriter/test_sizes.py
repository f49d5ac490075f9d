"""Where a guard on the number of tokens holds, and what a size is there, against plain evaluation."""

from __future__ import annotations

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod

from regraft.rewriter.sizes import (
    Interval,
    guard_interval,
    holds,
    missing_block,
    simplify_size,
)

S = sympy.Symbol("s70", integer=True, positive=True)


@pytest.mark.parametrize(
    ("guard", "example", "interval"),
    [
        (S >= 4, 37, Interval(4)),
        (S <= 64, 37, Interval(1, 64)),
        (sympy.Eq(S, 37), 37, None),  # one number of tokens is no interval
        (3 * S > 100, 37, Interval(34)),
        (sympy.Ne(S, 64), 37, Interval(1, 63)),
        (sympy.Ne(S, 1), 37, Interval(2)),
        (sympy.Eq(S, 512 - Max(0, 512 - S)), 37, Interval(1, 512)),
        (sympy.Eq(Min(64, S), S), 37, Interval(1, 64)),
        (sympy.Ne(Min(64, S) - 48, 16), 37, Interval(1, 63)),
        (sympy.And(S > 8, S < 100), 37, Interval(9, 99)),
        (sympy.Ne(FloorDiv(S, 8), 0), 37, Interval(8)),
        (FloorDiv(S, 128) >= 0, 37, Interval(1)),
        (S > 37, 37, None),  # not even true where it was traced
        (sympy.Eq(FloorDiv(S + 15, 16), 3), 37, None),
        (sympy.Eq(FloorDiv(S + 255, 256), 1), 37, None),
        (sympy.Ne(Mod(S, 8), 0), 37, None),
        (sympy.Eq(Mod(S, 2), 1), 37, None),
        (FloorDiv(S, 4096) < 1, 37, None),
    ],
)
def test_guards(guard: sympy.Basic, example: int, interval: Interval | None) -> None:
    assert guard_interval(guard, S, example) == interval


def test_a_guard_does_not_hold_where_it_divides_by_zero() -> None:
    guard = sympy.Ne(Mod(7, 4 * FloorDiv(S, 16)), 0)
    assert not holds(guard, S, 5) and holds(guard, S, 37)
    assert guard_interval(guard, S, 37) == Interval(16)


@pytest.mark.parametrize(
    ("size", "where", "simple"),
    [
        (Max(0, 1 - S), Interval(2), 0),
        (1 - Max(0, 1 - S), Interval(1), 1),
        (512 - Max(0, 512 - S), Interval(2, 512), S),
        (512 - Max(0, 512 - S), Interval(2), None),
        (Min(S, 512), Interval(2, 512), S),
        (Min(S, 512), Interval(2, 513), None),
        (2 * Max(S, 3), Interval(3), 2 * S),
        (Max(S, Min(S, 5)), Interval(1), S),
        (S * 4 + 2, Interval(1), S * 4 + 2),
        (FloorDiv(Max(S, 1), 8), Interval(1), FloorDiv(S, 8)),
    ],
)
def test_sizes(size: sympy.Expr, where: Interval, simple: sympy.Expr | int | None) -> None:
    assert simplify_size(size, S, where) == (size if simple is None else simple)


affine = st.builds(lambda a, b: a * S + b, st.integers(-3, 3), st.integers(-40, 40))
piecewise = st.recursive(
    affine,
    lambda inner: st.one_of(
        st.builds(Max, inner, inner),
        st.builds(Min, inner, inner),
        st.builds(lambda x, y: x + y, inner, inner),
    ),
    max_leaves=4,
)
guards = st.builds(
    lambda kind, left, right: kind(left, right),
    st.sampled_from([sympy.Eq, sympy.Ne, sympy.Le, sympy.Lt]),
    piecewise,
    piecewise,
)


@given(guards, st.integers(1, 60))
def test_intervals_are_right_and_as_large_as_can_be(guard: sympy.Basic, example: int) -> None:
    interval = guard_interval(guard, S, example)
    if interval is None:
        neighbours = [holds(guard, S, example + d) for d in (-1, 0, 1) if example + d >= 1]
        assert not all(neighbours)
        return
    assert interval.low <= example and (interval.high is None or example <= interval.high)
    top = interval.high if interval.high is not None else 300
    assert all(holds(guard, S, n) for n in range(interval.low, min(top, 300) + 1))
    assert interval.low == 1 or not holds(guard, S, interval.low - 1)
    assert interval.high is None or not holds(guard, S, interval.high + 1)


@given(piecewise, st.integers(1, 20), st.none() | st.integers(0, 60))
def test_simplified_sizes_are_equal_all_over_the_interval(
    size: sympy.Expr, low: int, width: int | None
) -> None:
    where = Interval(low, None if width is None else low + width)
    simple = sympy.sympify(simplify_size(sympy.sympify(size), S, where))
    for n in range(low, low + (60 if width is None else width) + 1):
        at = {S: sympy.Integer(n)}
        assert simple.xreplace(at) == sympy.sympify(size).xreplace(at)


@pytest.mark.parametrize(
    ("guard", "size"),
    [
        (sympy.Eq(FloorDiv(S, 128), 0), 128),
        (sympy.Eq(4 * FloorDiv(S, 4), 36), None),  # a row of 37 has some of these
        (sympy.Eq(FloorDiv(S, 4) + FloorDiv(S, 64), 9), 64),
        (sympy.Eq(FloorDiv(S + 15, 16), 3), None),  # blocks of which the last is filled up
        (sympy.Eq(FloorDiv(S, 1 << 20), 0), None),
        (sympy.Eq(S, 37), None),
    ],
)
def test_blocks_that_a_row_has_none_of(guard: sympy.Basic, size: int | None) -> None:
    assert missing_block(guard, S, 37) == size
