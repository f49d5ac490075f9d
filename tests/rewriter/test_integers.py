"""Floor division, ranges and comparisons are checked against plain integers, on random formulas."""

from __future__ import annotations

import random

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from regraft.rewriter.graph import TOKENS
from regraft.rewriter.integers import (
    Index,
    Quotient,
    bounds,
    compare,
    decide_extrema,
    is_nonnegative,
    plain,
    remainder,
)

H, T, D = Index("h", 4), Index("t", TOKENS), Index("d", 16)


def value(e: sympy.Basic, at: dict[sympy.Basic, int]) -> sympy.Basic:
    return e.xreplace({symbol: sympy.Integer(v) for symbol, v in at.items()})


def places(seed: int = 0, count: int = 12) -> list[dict[sympy.Basic, int]]:
    """Random values of TOKENS and, within their ranges, of the indices."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        tokens = rng.choice([1, 2, 3, 7, 16])
        found.append(
            {TOKENS: tokens, H: rng.randrange(4), T: rng.randrange(tokens), D: rng.randrange(16)}
        )
    return found


@pytest.mark.parametrize(
    ("a", "n", "expected"),
    [
        (H * TOKENS + T, TOKENS, H),
        (H * TOKENS * 16 + T * 16 + D, 16 * TOKENS, H),
        (H * TOKENS * 16 + T * 16 + D, sympy.Integer(16), H * TOKENS + T),
        (T * 4 + H, sympy.Integer(4), T),
        (48 * H + 16 + D, sympy.Integer(16), 3 * H + 1),
        (D, sympy.Integer(16), 0),
        (4 * H + 2, sympy.Integer(4), H),
        (16 * H + D, sympy.Integer(32), Quotient(H, 2)),
    ],
)
def test_a_division_without_rest_disappears(a: sympy.Expr, n: sympy.Expr, expected: object) -> None:
    assert Quotient(a, n) == expected


def test_quotient_and_remainder_fold_back() -> None:
    assert 2 * Quotient(H, 2) + remainder(H, sympy.Integer(2)) == H
    assert Quotient(2 * Quotient(H, 2) + remainder(H, sympy.Integer(2)), 2) == Quotient(H, 2)
    assert Quotient(Quotient(D, 2), 4) == Quotient(D, 8)
    assert remainder(H * TOKENS + T, TOKENS) == T


def test_a_division_with_a_rest_stays_and_prints_as_floor() -> None:
    assert str(Quotient(H, 2)) == "floor(h/2)"
    assert str(Quotient(T + 1, 8)) == "floor((t + 1)/8)"


def test_a_division_that_just_reaches_the_next_number_stays() -> None:
    for a, n in ((D + 1, sympy.Integer(16)), (T + 1, TOKENS), (4 * H + 4, sympy.Integer(16))):
        assert Quotient(a, n) != 0
    assert value(Quotient(D + 1, 16), {D: 15}) == 1


def linear() -> st.SearchStrategy[sympy.Expr]:
    coefficient = st.integers(-20, 20)
    tokens = st.sampled_from([sympy.Integer(1), TOKENS])
    term = st.builds(lambda c, t, x: c * t * x, coefficient, tokens, st.sampled_from([H, T, D]))
    return st.builds(lambda terms, c: sympy.Add(*terms, c), st.lists(term, max_size=4), coefficient)


def formulas() -> st.SearchStrategy[sympy.Expr]:
    divisor = st.sampled_from([*map(sympy.Integer, (1, 2, 3, 4, 8, 16)), TOKENS, 4 * TOKENS])
    divided = st.builds(Quotient, linear(), divisor)
    left = st.builds(remainder, linear(), divisor)
    return st.one_of(linear(), divided, left, st.builds(lambda a, b: a - 2 * b, divided, left))


@given(linear(), st.sampled_from([1, 2, 3, 4, 6, 8, 16, 48]), st.booleans(), st.integers(0, 99))
def test_a_quotient_is_floor_division(a: sympy.Expr, n: int, by_tokens: bool, seed: int) -> None:
    divisor = n * TOKENS if by_tokens else sympy.Integer(n)
    found = Quotient(a, divisor)
    for at in places(seed):
        assert value(found, at) == int(value(a, at)) // int(value(divisor, at)), at


@given(formulas(), st.integers(0, 99))
def test_every_value_lies_within_its_bounds(e: sympy.Expr, seed: int) -> None:
    low, high = bounds(e)
    for at in places(seed):
        assert low is None or value(low, at) <= value(e, at)
        assert high is None or value(e, at) <= value(high, at)


@given(
    formulas(), st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), formulas(), st.integers(0, 99)
)
def test_a_decided_comparison_holds_everywhere(
    a: sympy.Expr, relation: str, b: sympy.Expr, seed: int
) -> None:
    decided = compare(a, relation, b)
    for at in places(seed):
        one, two = value(a, at), value(b, at)
        truth = {
            "<": one < two,
            "<=": one <= two,
            ">": one > two,
            ">=": one >= two,
            "==": sympy.sympify(one == two),
            "!=": sympy.sympify(one != two),
        }[relation]
        assert value(decided, at) == truth


def test_comparisons_that_ranges_decide() -> None:
    assert compare(T, "<", TOKENS) == sympy.true
    assert compare(T, "<", TOKENS - 1) not in (sympy.true, sympy.false)
    assert compare(T, "==", TOKENS) == sympy.false
    assert compare(H, ">", sympy.Integer(3)) == sympy.false
    assert is_nonnegative(TOKENS - 1)
    assert not is_nonnegative(TOKENS - 2)


def test_parts_of_the_tokens_are_neither_negative_nor_more_than_there_are() -> None:
    k, part = Index("k", TOKENS), Quotient(TOKENS, 4)
    assert compare(k, "<", TOKENS + part) == sympy.true
    assert compare(TOKENS + Index("e", part), ">=", TOKENS) == sympy.true
    assert compare(4 * part, "<=", TOKENS) == sympy.true
    assert compare(part, "<=", Quotient(TOKENS, 2)) != sympy.false
    assert compare(sympy.Integer(1), "<=", part) not in (sympy.true, sympy.false)
    assert compare(5 * part, ">", TOKENS) not in (sympy.true, sympy.false)


def test_extrema_that_ranges_decide() -> None:
    assert decide_extrema(sympy.Min(11, sympy.Max(0, H + 3))) == H + 3
    assert decide_extrema(sympy.Max(0, H - 1)) == sympy.Max(0, H - 1)
    assert bounds(sympy.Min(11, sympy.Max(0, T - D))) == (0, 11)


def test_a_minimum_is_not_below_zero_if_nothing_in_it_is() -> None:
    """Whichever of the two is the least."""
    unlimited = sympy.Symbol("p", integer=True, nonnegative=True)
    assert is_nonnegative(sympy.Min(TOKENS - 1, 4 * unlimited + 2))
    assert not is_nonnegative(sympy.Min(TOKENS - 1, 4 * unlimited - 1))


def test_sizes_of_an_export_are_rewritten() -> None:
    from torch.utils._sympy.functions import FloorDiv, Max, Mod

    size = FloorDiv(TOKENS, sympy.Integer(4)) + Mod(TOKENS, sympy.Integer(4)) + Max(1, TOKENS)
    assert plain(size).xreplace({TOKENS: sympy.Integer(11)}) == 2 + 3 + 11


def test_indices_of_different_ranges_differ() -> None:
    assert Index("h", 4) == Index("h", 4)
    assert Index("h", 4) != Index("h", 8)
    assert hash(Index("h", 4)) == hash(Index("h", 4))
