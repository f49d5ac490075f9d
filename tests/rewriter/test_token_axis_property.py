"""Whatever the analysis promises of a random program must hold when the program runs; and the test can fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from regraft.rewriter.token_axis import (
    FIXED,
    Axis,
    Value,
    analysis,
    contract,
    layout,
    reduce,
    select,
)
from regraft.rewriter.token_axis import value as values
from regraft.rewriter.token_axis.analysis import RULES, SIZED, Facts, Rule

from . import operations as make
from .operations import MAKERS, Maker, program
from .programs import Chooser, Program, claims, violation, violations

NUM_PROGRAMS = 300
LENGTH = 14


@settings(max_examples=250)
@given(st.data())
def test_no_random_program_contradicts_the_analysis(data: st.DataObject) -> None:
    chooser = Chooser(lambda bound: data.draw(st.integers(0, bound - 1)))
    assert not violations(program(chooser, LENGTH))


def drawn(seed: int, favourite: Maker | None = None) -> Program:
    return program(Chooser(random.Random(seed).randrange), LENGTH, favourite)


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    """Each operation is the favourite of a few."""
    return [drawn(seed, maker) for maker in dict.fromkeys(MAKERS) for seed in range(6)]


def test_these_programs_contradict_nothing(programs: list[Program]) -> None:
    """Programs of the kind that the broken rules below are tried on, where nothing is broken."""
    assert not [problem for p in programs for problem in violations(p)]


def test_the_claims_are_not_empty(programs: list[Program]) -> None:
    """Operations that are looked at while they hold one row per token, or one value per pair of tokens."""
    rows, pairs = set(), 0
    for p in programs:
        for node, value in claims(p):
            if value.is_row_local:
                rows.add(name_of(node))
            pairs += len(value.axes) > 1
    expected = """
        add addmm amax argmax cat constant_pad_nd conv1d cumsum diff einsum embedding expand flatten flip gather glu
        index index_add index_fill index_select layer_norm linear masked_fill matmul max mean movedim msort mul one_hot
        permute repeat repeat_interleave reshape rms_norm roll scaled_dot_product_attention scatter scatter_add select
        select_scatter slice slice_scatter softmax squeeze stack sum transpose tril type_as unsqueeze view
        view_as_complex where
    """.split()
    missing = set(expected) - rows
    assert not missing, missing
    assert pairs > 100


def name_of(node: fx.Node) -> str:
    return str(getattr(node.target, "_opname", node.target))


# ---- mutants: a rule is broken on purpose, and the programs must tell --------------------------------------------


def as_rows(facts: Facts) -> Value:
    """A rule that believes its first operand's value to be the result's."""
    return facts.value(facts.node.args[0])


def unmixed(rule: Rule) -> Rule:
    """A rule that forgets to say that it mixes, and calls every axis good."""

    def broken(facts: Facts) -> object:
        result = rule(facts)
        before = any(facts.value(operand).mixed for operand in facts.tensors)
        if before or isinstance(result, tuple):
            return result
        return Value(tuple((d, replace(a, kind="ok")) for d, a in result.axes))

    return broken


def swapped(rule: Rule) -> Rule:
    """A rule that takes `outer` for `inner`."""

    def broken(facts: Facts) -> object:
        value = rule(facts)
        assert isinstance(value, Value)
        return replace(
            value, axes=tuple((d, Axis(a.inner, a.outer, a.kind)) for d, a in value.axes)
        )

    return broken


FORGETFUL: dict[str, Maker] = {
    "amax": make.reduce, "arange": make.arange, "cat": make.cat, "constant_pad_nd": make.pad, "conv1d": make.conv,
    "cumprod": make.running, "cumsum": make.running, "diff": make.diff, "einsum": make.einsum, "gather": make.gather,
    "glu": make.norm, "index": make.index, "index_add": make.place, "index_select": make.index_select,
    "matmul": make.matmul, "max": make.extreme, "mean": make.reduce, "narrow": make.narrow_back,
    "one_hot": make.one_hot, "repeat": make.repeat, "reshape": make.view,
    "scaled_dot_product_attention": make.attention,
    "scatter": make.scatter, "scatter_add": make.scatter, "select": make.select, "select_scatter": make.place,
    "slice": make.slice_, "slice_scatter": make.place, "softmax": make.running, "sum": make.reduce,
    "take": make.index_select, "tril": make.triangle,
}  # fmt: skip
"""Operator -> what makes programs with many of it."""
SWAPPED: dict[str, Maker] = {
    "flatten": make.rejoin, "repeat": make.repeat, "repeat_interleave": make.repeat_interleave, "reshape": make.view,
}  # fmt: skip
IDLE: dict[str, Maker] = {
    "expand": make.expand, "flip": make.sort, "msort": make.sort, "permute": make.transpose, "roll": make.sort,
    "transpose": make.transpose, "tril": make.triangle, "unsqueeze": make.unsqueeze,
}  # fmt: skip


def is_found(favourite: Maker | None = None) -> bool:
    """Some program contradicts the broken analysis."""
    return any(violations(drawn(seed, favourite)) for seed in range(NUM_PROGRAMS))


@pytest.mark.parametrize("name", FORGETFUL)
def test_a_rule_that_forgets_to_mix_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, name, unmixed(RULES[name]))
    assert is_found(FORGETFUL[name])


@pytest.mark.parametrize("name", SWAPPED)
def test_a_rule_that_swaps_outer_and_inner_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, name, swapped(RULES[name]))
    assert is_found(SWAPPED[name])


@pytest.mark.parametrize("name", IDLE)
def test_a_rule_that_does_nothing_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, name, as_rows)
    assert is_found(IDLE[name])


def _sizes_are_harmless(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(analysis, "SIZED", SIZED | set(RULES))


def _unknown_is_aligned_by_shape(patch: pytest.MonkeyPatch) -> None:
    def aligned(facts: Facts, why: str) -> object:
        results = [
            Value(
                tuple(
                    (d, values.fitted(Axis(), s))
                    for d, s in enumerate(shape)
                    if values.has_tokens(s)
                )
            )
            for shape in facts.out_shapes
        ]
        return tuple(results) if facts.has_many else results[0]

    patch.setattr(Facts, "unknown", aligned)


def _views_keep_uniform_dimensions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layout, "_held", lambda axes, old, dims: {d: axes[d] for d in dims if d in axes})


def _views_always_find_the_tokens(patch: pytest.MonkeyPatch) -> None:
    def anywhere(
        axis: Axis, held: int, old: tuple, old_dims: tuple, new: tuple, new_dims: tuple
    ) -> dict:
        return {
            d: Axis(1, values.tokens_multiple(new[d]) or 1)
            for d in new_dims
            if values.has_tokens(new[d])
        }

    patch.setattr(layout, "_redistribute", anywhere)


def _any_two_axes_join(patch: pytest.MonkeyPatch) -> None:
    for module in (values, contract):
        patch.setattr(module, "join", lambda first, second: first or second)


def _uniform_sums_are_fixed(patch: pytest.MonkeyPatch) -> None:
    def reduced(value: Value, shape: tuple, dims: list, keep: bool, why: str) -> Value:
        axes = {
            d if keep else d - sum(x < d for x in dims): a for d, a in value.axes if d not in dims
        }
        mixes = any(d in dims for d, _ in value.axes)
        return values.make(axes, value.mixed or mixes, why)

    patch.setattr(reduce, "reduced", reduced)


def _smaller_indices_are_whole(patch: pytest.MonkeyPatch) -> None:
    from regraft.rewriter.token_axis import place

    for module in (select, place):
        patch.setattr(module, "differ", lambda sizes: False)


def _getitem_takes_the_first(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(analysis.OPERATOR_RULES, "_operator.getitem", lambda facts: FIXED)


BROKEN: dict[Callable[[pytest.MonkeyPatch], None], Maker | None] = {
    _sizes_are_harmless: make.by_tokens,
    _unknown_is_aligned_by_shape: make.nothing_known,
    _views_keep_uniform_dimensions: make.uniform,
    _views_always_find_the_tokens: make.view,
    _any_two_axes_join: make.twins,
    _uniform_sums_are_fixed: make.uniform,
    _smaller_indices_are_whole: make.gather,
    _getitem_takes_the_first: make.split,
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda f: f.__name__.strip("_"))
def test_a_broken_idea_is_found(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    assert is_found(BROKEN[broken])


def test_the_naive_meaning_of_a_claim() -> None:
    """A sum over tokens contradicts every claim of rows, of one value, and of a wrong layout."""
    p = Program()
    rows = p.call(torch.ops.aten._to_copy.default, p.ids, dtype=torch.float64)
    total = p.call(torch.ops.aten.add.Tensor, rows, p.call(torch.ops.aten.sum.default, rows))
    assert violation(rows, Value(((1, Axis()),)), p) == ""
    assert "differ" in violation(total, Value(((1, Axis()),)), p)
    assert "uniform" in violation(total, FIXED, p)
    assert "does not make" in violation(rows, Value(((1, Axis(2, 1)),)), p)
