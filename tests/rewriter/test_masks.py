"""Relations of a query and a key: what is read says exactly what the condition says, or is declined with a reason."""

from __future__ import annotations

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from regraft.rewriter.formulas import Cell, pos, seg
from regraft.rewriter.graph import TOKENS
from regraft.rewriter.integers import Index, Quotient
from regraft.rewriter.masks import Relation, distances, is_possible, read_relation
from regraft.rewriter.pattern import Declined

Q, K = Index("q", TOKENS), Index("k", TOKENS)
CAUSAL = sympy.Le(K, Q)
LENGTH = 20


def chunk(size: int, index: sympy.Expr = K, other: sympy.Expr = Q) -> sympy.Eq:
    return sympy.Eq(Quotient(index, size), Quotient(other, size), evaluate=False)


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (CAUSAL, "k <= q"),
        (sympy.Ge(Q - K, 0), "k <= q"),
        (sympy.Lt(K, Q + 1), "k <= q"),
        (sympy.Not(sympy.Gt(K, Q)), "k <= q"),
        (CAUSAL & sympy.Gt(K, Q - 8), "k <= q & q - k < 8"),
        (CAUSAL & sympy.Lt(Q - K, 8), "k <= q & q - k < 8"),
        (CAUSAL & sympy.Le(2 * Q - 2 * K, 15), "k <= q & q - k < 8"),
        (CAUSAL & sympy.Gt(K, Q - 8) & sympy.Gt(K, Q - 5), "k <= q & q - k < 5"),
        (CAUSAL & chunk(8), "k <= q & floor(k/8) == floor(q/8)"),
        (CAUSAL & chunk(8, Q, K), "k <= q & floor(k/8) == floor(q/8)"),
        (CAUSAL & chunk(8) & chunk(4), "k <= q & floor(k/4) == floor(q/4)"),
        (CAUSAL & chunk(8) & sympy.Lt(Q - K, 3), "k <= q & q - k < 3 & floor(k/8) == floor(q/8)"),
        (sympy.Eq(seg(Q), seg(K)) & sympy.Le(pos(K), pos(Q)), "k <= q"),
        (
            sympy.Eq(seg(Q), seg(K)) & sympy.Le(pos(K), pos(Q)) & chunk(4, pos(K), pos(Q)),
            "k <= q & floor(k/4) == floor(q/4)",
        ),
        (CAUSAL & sympy.Lt(K, Q + 3), "k <= q"),
        (CAUSAL & sympy.Le(K, TOKENS), "k <= q"),
        (CAUSAL | sympy.Gt(K, TOKENS), "k <= q"),
        (CAUSAL | (CAUSAL & sympy.Lt(Q - K, 8)), "k <= q"),
        (sympy.Eq(K, Q) | sympy.Lt(K, Q), "k <= q"),
        (sympy.Eq(Q, K) | sympy.Eq(Q - K, 1), "k <= q & q - k < 2"),
        ((sympy.Ne(K, Q) & CAUSAL) | sympy.Eq(K, Q), "k <= q"),
        (
            CAUSAL & (sympy.Lt(Q - K, 4) | (sympy.Ge(Q - K, 4) & sympy.Lt(Q - K, 9))),
            "k <= q & q - k < 9",
        ),
    ],
)
def test_relations_that_parameters_express(allowed: sympy.Basic, expected: str) -> None:
    relation = read_relation(allowed, Q, K)
    assert isinstance(relation, Relation), relation
    assert str(relation) == expected


SELECTED = sympy.Ne(Cell(sympy.Symbol("scatter"), Q, K), 0)


@pytest.mark.parametrize(
    ("allowed", "reason"),
    [
        (sympy.true, "not causal: a query also attends to all later keys"),
        (sympy.Lt(K - Q, 8), "not causal: a query also attends to 7 later keys"),
        (sympy.Lt(Q - K, 8), "not causal: a query also attends to all later keys"),
        (sympy.Lt(sympy.Abs(Q - K), 8), "the mask is no relation of positions: Abs(k - q) < 8"),
        (sympy.Eq(seg(Q), seg(K)), "not causal: a query also attends to all later keys"),
        (sympy.Lt(K, Q), "a query does not attend to its own key: the mask is k <= q - 1"),
        (CAUSAL & SELECTED, "the mask is no relation of positions: Ne(scatter[q, k], 0)"),
        (CAUSAL & ~SELECTED, "the mask is no relation of positions: Eq(scatter[q, k], 0)"),
        (CAUSAL & sympy.Lt(K, 4), "the mask is no relation of positions: k < 4"),
        (CAUSAL & sympy.Lt(Q + K, 4), "the mask is no relation of positions: k + q < 4"),
        (CAUSAL & sympy.Ge(K, TOKENS - 8), "the mask is no relation of positions: "),
        (CAUSAL & (sympy.Lt(Q - K, 3) | sympy.Gt(Q - K, 6)), "the mask is no single window: "),
        (
            CAUSAL & (sympy.Lt(Q - K, 3) | sympy.Eq(K, 0)),
            "the mask is no relation of positions: Eq(k, 0)",
        ),
        (CAUSAL & chunk(4) & chunk(6), "chunks of different sizes, [4, 6], that do not nest"),
        (CAUSAL & ~chunk(4), "the mask is no relation of positions: Ne(floor(k/4), floor(q/4))"),
        (CAUSAL & chunk(4, K, Q + 1), "the mask is no relation of positions: "),
        (sympy.false, "the mask lets no key through"),
        (CAUSAL & sympy.Gt(K, Q), "the mask lets no key through"),
    ],
)
def test_relations_that_are_declined(allowed: sympy.Basic, reason: str) -> None:
    declined = read_relation(allowed, Q, K)
    assert isinstance(declined, Declined), declined
    assert declined.reason.startswith(reason)


def holds(relation: Relation, q: int, k: int) -> bool:
    near = not relation.window or q - k < relation.window
    together = not relation.chunk or q // relation.chunk == k // relation.chunk
    return k <= q and near and together


def conditions() -> st.SearchStrategy[sympy.Basic]:
    size = st.integers(1, 6)
    atoms = st.one_of(
        st.just(CAUSAL),
        st.builds(lambda n: sympy.Lt(Q - K, n), st.integers(-2, 8)),
        st.builds(lambda n: sympy.Ge(K, Q - n), st.integers(-2, 8)),
        st.builds(lambda n: sympy.Eq(Q - K, n), st.integers(0, 3)),
        st.builds(chunk, size),
        st.builds(lambda n: sympy.Lt(K, n), st.integers(0, 4)),
    )
    return st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.builds(sympy.And, inner, inner),
            st.builds(sympy.Or, inner, inner),
            st.builds(sympy.Not, inner),
        ),
        max_leaves=6,
    )


@given(conditions())
def test_what_is_read_is_what_is_said(allowed: sympy.Basic) -> None:
    """For every query and key: a relation that is accepted holds exactly where the condition does."""
    for condition in (allowed, CAUSAL & allowed):
        relation = read_relation(condition, Q, K)
        if isinstance(relation, Declined):
            continue
        for q in range(LENGTH):
            for k in range(LENGTH):
                known = {Q: sympy.Integer(q), K: sympy.Integer(k), TOKENS: sympy.Integer(LENGTH)}
                assert bool(condition.xreplace(known)) == holds(relation, q, k), (
                    condition,
                    relation,
                    q,
                    k,
                )


@given(conditions())
def test_only_the_impossible_is_called_impossible(condition: sympy.Basic) -> None:
    pairs = [(q, k) for q in range(LENGTH) for k in range(LENGTH)]
    true = [
        q - k
        for q, k in pairs
        if condition.xreplace({Q: sympy.Integer(q), K: sympy.Integer(k)}) == sympy.true
    ]
    if true:
        assert is_possible(condition, Q, K)
    found = distances(condition, Q, K)
    if found is not None and true:
        low, high = found
        assert low is None or min(true) >= low
        assert high is None or max(true) <= high


def test_too_many_alternatives_are_declined() -> None:
    alternatives = [chunk(n) | sympy.Eq(Cell(sympy.Symbol(f"c{n}"), K), 0) for n in range(2, 12)]
    declined = read_relation(sympy.And(CAUSAL, *alternatives), Q, K)
    assert isinstance(declined, Declined)
    assert declined.reason.startswith("the mask has too many alternatives: ")
