"""What the analysis says of one operation at a time: each case is also run, and must not contradict the claim."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import sympy
import torch
from torch import fx

from regraft.kernels.experts import expert_linear
from regraft.rewriter.graph import TOKENS
from regraft.rewriter.token_axis import FIXED, Axis, Value, analyse
from regraft.rewriter.token_axis.layout import groups
from regraft.rewriter.token_axis.regions import verdict
from regraft.rewriter.token_axis.value import has_tokens, tokens_multiple

from .operations import program
from .programs import Program, violation

aten = torch.ops.aten
Case = Callable[[Program], fx.Node | None]
F64 = {"dtype": torch.float64}


def rows(p: Program, width: int = 4) -> fx.Node:
    """[1, T, width]."""
    return p.call(aten.embedding.default, p.weight(12, width), p.ids)  # type: ignore[return-value]


def flat(p: Program, width: int = 4) -> fx.Node:
    """[T, width]."""
    return p.call(aten.select.int, rows(p, width), 0, 0)  # type: ignore[return-value]


def ids(p: Program, below: int = 4) -> fx.Node:
    """[T], whole numbers."""
    return p.call(aten.select.int, p.call(aten.remainder.Scalar, p.ids, below), 0, 0)  # type: ignore[return-value]


def ones(p: Program, *sizes: object) -> fx.Node:
    return p.call(aten.ones.default, list(sizes), **F64)  # type: ignore[return-value]


def merged(p: Program) -> fx.Node:
    """[2 T], two rows a token next to each other."""
    return p.call(aten.reshape.default, flat(p, 2), [p.size(2 * TOKENS)])  # type: ignore[return-value]


def after(p: Program) -> int | fx.Node:
    return p.size(TOKENS + 1)


ROW: dict[str, tuple[Case, tuple[int, Axis]]] = {
    "rows stay rows": (lambda p: p.call(aten.relu.default, rows(p)), (1, Axis())),
    "tokens merged with what is behind them": (merged, (0, Axis(1, 2))),
    "tokens merged with what is in front of them": (
        lambda p: p.call(aten.flatten.using_ints, p.call(aten.transpose.int, flat(p), 0, 1), 0, 1), (0, Axis(4, 1)),
    ),
    "merged and split at another place": (
        lambda p: p.call(aten.reshape.default, flat(p, 6), [p.size(3 * TOKENS), 2]), (0, Axis(1, 3)),
    ),
    "copies behind one another": (lambda p: p.call(aten.repeat.default, flat(p), [3, 1]), (0, Axis(3, 1))),
    "copies side by side": (lambda p: p.call(aten.repeat_interleave.self_int, flat(p), 3, 0), (0, Axis(1, 3))),
    "a weight once a token in one dimension": (
        lambda p: p.call(aten.repeat.default, p.weight(4), [p.tokens]), (0, Axis(1, 4)),
    ),
    "a constant merged with a uniform dimension": (
        lambda p: p.call(aten.flatten.using_ints, p.call(aten.expand.default, p.weight(1, 4), [p.tokens, 4]), 0, 1),
        (0, Axis(1, 4)),
    ),
    "rows picked from a table": (lambda p: p.call(aten.index.Tensor, p.weight(4, 3), [ids(p)]), (0, Axis())),
    "indices apart go in front": (
        lambda p: p.call(aten.index.Tensor, p.weight(4, 3, 4), [ids(p), None, ids(p)]), (0, Axis()),
    ),
    "indices side by side stay": (
        lambda p: p.call(aten.index.Tensor, p.weight(3, 4, 4), [None, ids(p), ids(p)]), (1, Axis()),
    ),
    "an expert's matrix per token": (
        lambda p: p.call(
            aten.bmm.default, p.call(aten.index.Tensor, p.weight(4, 3, 4), [ids(p)]),
            p.call(aten.unsqueeze.default, flat(p), -1),
        ),
        (0, Axis()),
    ),
    "a sort of each row": (lambda p: p.call(aten.sort.default, flat(p), 1), (0, Axis())),
    "a gather in each row": (
        lambda p: p.call(aten.gather.default, flat(p), 1, p.call(aten.unsqueeze.default, ids(p), 1)), (0, Axis()),
    ),
    "a scatter in each row": (
        lambda p: p.call(aten.scatter.value, flat(p), 1, p.call(aten.unsqueeze.default, ids(p), 1), 2.0), (0, Axis()),
    ),
    "attention within a token": (
        lambda p: _attend(p, p.call(aten.reshape.default, flat(p, 8), [p.tokens, 4, 2])), (0, Axis()),
    ),
    "a convolution within a token": (
        lambda p: p.call(aten.conv1d.default, p.call(aten.unsqueeze.default, flat(p), 1), p.weight(2, 1, 3)),
        (0, Axis()),
    ),
    "complex numbers": (
        lambda p: p.call(aten.view_as_real.default, p.call(aten.view_as_complex.default, flat(p, 2))), (0, Axis()),
    ),
    "type_as takes only a dtype": (
        lambda p: p.call(aten.type_as.default, flat(p), p.call(aten.unsqueeze.default, rows(p), 0)), (0, Axis()),
    ),
    "a cut of the last dimension": (lambda p: p.call(aten.slice.Tensor, flat(p), 1, 1, 3), (0, Axis())),
    "a stack in front": (lambda p: p.call(aten.stack.default, [flat(p), flat(p)], 0), (1, Axis())),
    "a median of each row": (lambda p: p.call(aten.kthvalue.default, flat(p), 2, 1), (0, Axis())),
    "a routed matrix, as an operator": (
        lambda p: p.call(expert_linear._opoverload, flat(p), p.weight(4, 3, 4), ids(p), False), (0, Axis()),
    ),
}  # fmt: skip


def _attend(p: Program, x: fx.Node | None, **options: bool) -> fx.Node | None:
    return p.call(
        aten.scaled_dot_product_attention.default, x, x, x, None, 0.0, options.get("causal", False)
    )


@pytest.mark.parametrize("name", ROW)
def test_row_local(name: str) -> None:
    p = Program()
    build, (dim, axis) = ROW[name]
    node = build(p)
    assert node is not None
    analysis = analyse(p.graph)
    assert analysis.values[node] == Value(((dim, axis),)) and not analysis.uncut
    assert violation(node, analysis.value(node), p) == ""


UNIFORM: dict[str, Case] = {
    "ones": lambda p: ones(p, p.tokens, 4),
    "ones times a weight": lambda p: p.call(aten.mul.Tensor, ones(p, p.tokens, 4), p.weight(4)),
    "like a tensor of rows": lambda p: p.call(aten.zeros_like.default, rows(p)),
    "a uniform dimension that is only split": lambda p: p.call(
        aten.reshape.default, ones(p, p.size(2 * TOKENS)), [p.tokens, 2]
    ),
    "two uniform dimensions merged": lambda p: p.call(
        aten.flatten.using_ints, ones(p, p.tokens, p.tokens, 4), 0, 1
    ),
    "a part of a uniform dimension": lambda p: p.call(
        aten.slice.Tensor, ones(p, p.tokens, 4), 0, 1, -1
    ),
    "a weight of another weight": lambda p: p.call(
        aten.index.Tensor, p.weight(5, 2), [p.weight(3, high=5)]
    ),
}


@pytest.mark.parametrize("name", UNIFORM)
def test_fixed(name: str) -> None:
    p = Program()
    node = UNIFORM[name](p)
    assert node is not None
    value = analyse(p.graph).values[node]
    assert value == FIXED
    assert violation(node, FIXED, p) == ""


def _padded(p: Program) -> fx.Node | None:
    """[T], uniform but for its first element."""
    longer = p.call(aten.constant_pad_nd.default, ones(p, p.tokens), [1, 0], 5.0)
    return p.call(aten.narrow.default, longer, 0, 0, p.tokens)


MIXED: dict[str, tuple[Case, str]] = {
    "the number of tokens": (
        lambda p: p.call(aten.mul.Tensor, flat(p), p.tokens), "the number of tokens is used as a value",
    ),
    "a sum of ones counts tokens": (lambda p: p.call(aten.sum.default, ones(p, p.tokens)), "sum over tokens"),
    "a product of ones counts tokens": (
        lambda p: p.call(aten.matmul.default, ones(p, 2, p.tokens), ones(p, p.tokens, 2)), "contracts tokens",
    ),
    "an index from the end": (
        lambda p: p.call(aten.select.int, p.weight(12), 0, p.size(TOKENS - 4)),
        "the number of tokens is used as a value",
    ),
    "a slice from the end": (
        lambda p: p.call(aten.slice.Tensor, p.weight(12), 0, p.size(TOKENS - 5), p.size(TOKENS - 3)),
        "the number of tokens is used as a value",
    ),
    "a table cut to the row": (
        lambda p: p.call(aten.slice.Tensor, p.weight(12, 2), 0, 0, p.tokens),
        "slice of a constant by the number of tokens",
    ),
    "a padded constant is not uniform": (_padded, "pads tokens"),
    "padded by tokens": (lambda p: p.call(aten.constant_pad_nd.default, p.weight(3), [0, p.tokens]), "pads tokens"),
    "one-hot over tokens and one more": (
        lambda p: p.call(aten.one_hot.default, ids(p), after(p)), "one_hot over tokens",
    ),
    "tokens per expert": (
        lambda p: p.call(aten.scatter_add.default, p.weight(4), 0, ids(p), ones(p, p.tokens)), "scatter along tokens",
    ),
    "tokens per expert, counted by index_add": (
        lambda p: p.call(aten.index_add.default, p.weight(4), 0, ids(p), ones(p, p.tokens)), "index_add by token",
    ),
    "tokens per expert, by an operator without a rule": (
        lambda p: p.call(aten.bincount.default, ids(p), None, 4), "no rule for aten.bincount.default",
    ),
    "counted by an operator without a rule": (
        lambda p: p.call(aten.bincount.default, p.call(aten.zeros.default, [p.tokens], dtype=torch.int64), None, 4),
        "no rule for aten.bincount.default",
    ),
    "put by value": (
        lambda p: p.call(
            aten.index_put.default, p.weight(4), [p.call(aten.zeros.default, [p.tokens], dtype=torch.int64)],
            ones(p, p.tokens), True,
        ),
        "index_put places values by value",
    ),
    "only the first rows are written": (
        lambda p: p.call(aten.scatter.value, ones(p, p.tokens, 4), 1, p.weight(3, 2, high=4), 0.0),
        "scatter along tokens",
    ),
    "an index as long as the row over a longer table": (
        lambda p: p.call(aten.gather.default, p.weight(4, 12), 0, p.call(aten.remainder.Scalar, p.ids, 4)),
        "gather along tokens",
    ),
    "causal attention to constants": (
        lambda p: p.call(
            aten.scaled_dot_product_attention.default, rows(p), ones(p, 1, 3, 4), ones(p, 1, 3, 4), None, 0.0, True,
        ),
        "attention to what comes before the row's own index",
    ),
    "attention over tokens": (lambda p: _attend(p, rows(p)), "attention over tokens"),
    "a convolution over tokens": (
        lambda p: p.call(aten.conv1d.default, p.call(aten.transpose.int, rows(p), 1, 2), p.weight(4, 4, 1)),
        "convolution over tokens",
    ),
    "the row's own index": (lambda p: p.call(aten.arange.default, p.tokens), "the row's own index (arange)"),
    "a flattened lookup": (
        lambda p: p.call(aten.take.default, ones(p, 4, p.tokens), p.weight(2, high=9)), "indexes along tokens",
    ),
    "neighbours": (lambda p: p.call(aten.diff.default, p.positions), "difference of neighbouring tokens"),
    "what stands before a difference": (
        lambda p: p.call(aten.diff.default, flat(p), 1, 1, p.call(aten.flip.default, flat(p, 1), [0])),
        "flip over tokens",
    ),
    "a norm over tokens": (
        lambda p: p.call(aten.layer_norm.default, p.call(aten.transpose.int, flat(p), 0, 1), [p.tokens]),
        "norm over tokens",
    ),
    "a softmax over tokens": (lambda p: p.call(aten.softmax.int, flat(p), 0), "softmax over tokens"),
    "tokens in another order": (
        lambda p: p.call(aten.reshape.default, flat(p), [4, p.tokens]), "rows are reordered by a view",
    ),
    "rows and their mirror": (lambda p: p.call(aten.roll.default, flat(p), [1], [0]), "roll over tokens"),
    "two layouts of two rows a token": (
        lambda p: p.call(
            aten.add.Tensor, p.call(aten.repeat.default, ids(p), [2]),
            p.call(aten.repeat_interleave.self_int, ids(p), 2, 0),
        ),
        "",
    ),
    "a mask as an index": (
        lambda p: p.call(aten.index.Tensor, ids(p), [p.call(aten.gt.Scalar, ids(p), -1)]), "selects tokens by a mask",
    ),
    "bits of tokens": (lambda p: p.call(aten.view.dtype, ids(p), torch.int32), "tokens are split into bits"),
    "a diagonal": (
        lambda p: p.call(
            aten.einsum.default, "aa->a",
            [p.call(aten.eq.Tensor, ids(p), p.call(aten.unsqueeze.default, ids(p), 1))],
        ),
        "einsum aa->a takes a diagonal",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_mixed(name: str) -> None:
    p = Program()
    build, why = MIXED[name]
    node = build(p)
    assert node is not None
    analysis = analyse(p.graph)
    found = analysis.uncut.get(node, analysis.values[node])
    found = found[0] if isinstance(found, tuple) else found
    assert found.mixed
    assert why in found.why


def test_two_axes_are_pairs() -> None:
    p = Program()
    column = p.call(aten.unsqueeze.default, ids(p), 1)
    mask = p.call(aten.eq.Tensor, column, ids(p))
    value = analyse(p.graph).value(mask)
    assert value == Value(((0, Axis()), (1, Axis())))
    assert violation(mask, value, p) == ""


def test_a_mixed_value_that_still_grows_with_the_row_is_no_row() -> None:
    """A softmax of scores has rows in order, but each is as long as the text: the region must not close here."""
    p = Program()
    scores = p.call(
        aten.matmul.default, flat(p), p.call(aten.transpose.int, ones(p, p.tokens, 4), 0, 1)
    )
    weights = p.call(aten.softmax.int, scores, 1)
    analysis = analyse(p.graph)
    assert analysis.value(scores).is_row_local
    assert not analysis.is_cut(weights) and analysis.is_wide(weights)


def test_a_size_read_from_a_tensor_is_mixed() -> None:
    graph = Program()
    total = graph.call(aten.sum.default, graph.ids)
    count = graph.graph.call_function(aten._local_scalar_dense.default, (total,))
    unknown = sympy.Symbol("u0", integer=True)
    count.meta.update(shape=None, dtype=None, size=unknown)
    more = graph.graph.call_function(operator.add, (count, 1))
    more.meta.update(shape=None, dtype=None, size=unknown + 1)
    made = graph.graph.call_function(aten.zeros.default, ([more],))
    made.meta.update(shape=(unknown + 1,), dtype=torch.float32)
    counted = graph.graph.call_function(aten.sum.default, (made,))
    counted.meta.update(shape=(), dtype=torch.float32)
    analysis = analyse(graph.graph)
    assert analysis.value(more).mixed and "sum over tokens" in analysis.value(more).why
    assert analysis.value(counted).mixed
    assert has_tokens(unknown) and tokens_multiple(unknown) is None


def test_caches_are_read_by_operators_only() -> None:
    p = Program()
    pool = p.graph.placeholder("pool")
    pool.meta.update(shape=None, dtype=None)
    read = p.graph.call_function(aten.select.int, (pool, 0, 0))
    read.meta.update(shape=(4,), dtype=torch.float64)
    summed = p.graph.call_function(aten.add.Tensor, (flat(p), read))
    summed.meta.update(shape=(TOKENS, 4), dtype=torch.float64)
    p.graph.output((summed,))
    analysis = analyse(p.graph)
    assert analysis.value(read) == Value((), True, "reads pool outside of an operator")
    assert not verdict(analysis).proven
    assert "reads pool outside of an operator" in str(verdict(analysis).offence)


@pytest.mark.parametrize(("layout", "proven"), [((TOKENS, 4), True), ((4, TOKENS), False)])
def test_an_operator_of_our_own_reads_rows_in_order(layout: tuple, proven: bool) -> None:
    from regraft.kernels.decayed_linear import decayed_linear

    p = Program()
    source = flat(p) if proven else p.call(aten.transpose.int, flat(p), 0, 1)
    node = p.graph.call_function(decayed_linear._opoverload, (source,))
    node.meta.update(shape=(TOKENS, 4), dtype=torch.float64)
    value = analyse(p.graph).value(node)
    assert value.is_row_local == proven
    if not proven:
        assert value.why == "a grafted operator reads rows in another layout"


def test_groups_of_a_view() -> None:
    t = TOKENS
    assert groups((1, t, 8), (t, 2, 4)) == (((0, 1), (0,)), ((2,), (1, 2)))
    assert groups((2, t, 4), (2 * t, 4)) == (((0, 1), (0,)), ((2,), (1,)))
    blocks = (t + sympy.Mod(-t, 4)) // 4
    assert groups((t + sympy.Mod(-t, 4), 8), (blocks, 4, 8))[-1] == ((1,), (2,))


def test_the_verdict_counts_and_names_the_first_offence() -> None:
    p = Program()
    x = rows(p)
    good = p.call(aten.relu.default, x)
    late = p.call(aten.cumsum.default, good, 1)
    later = p.call(aten.flip.default, late, [1])
    assert later is not None and late is not None
    late.meta.update(path="layer.mix", source="model.py:3: x.cumsum(1)")
    p.graph.output((later,))
    found = verdict(analyse(p.graph))
    assert (
        found.offence
        == "cumsum over tokens: aten.cumsum.default in layer.mix at model.py:3: x.cumsum(1)"
    )
    assert str(found) == f"not proven: {found.offence}"


def test_every_operation_of_the_random_programs_runs() -> None:
    """A maker that can never run would silently take an operation out of the property test."""
    import random

    from .operations import MAKERS
    from .programs import Chooser

    made = set()
    for seed in range(120):
        generator = random.Random(seed)
        p = program(Chooser(generator.randrange), 12)
        made |= {getattr(n.target, "_opname", "") for n in p.graph.nodes if n.op == "call_function"}
    assert len(made) > 90, sorted(made)
    assert len(MAKERS) > 50
