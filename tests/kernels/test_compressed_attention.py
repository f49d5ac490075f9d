"""Windows weighed into entries, entries selected and attended to, against what that means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regraft.kernels.compressed_attention import (
    attend,
    compressed_attention,
    index_entries,
    naive,
    pages,
    pool,
    pool_windows,
    select,
)
from tests.kernels.paged import Case, make, poisoned_memory
from tests.tolerance import assert_close

BATCHES = {
    "decode": Case((1, 1, 1, 1, 1), (0, 2, 11, 23, 20)),
    "prefill": Case((3, 9, 4, 16), (0, 0, 0, 0)),
    "continued": Case((5, 8, 30), (7, 1, 20)),
    "mixed": Case((3, 1, 0, 17, 1), (0, 9, 4, 5, 0), padding=2),
    "nothing": Case((0, 0), (3, 0), padding=1),
}
FORMS = {"on the host": True, "without a look at metadata": False}
METADATA = ("cu_seqlens", "context_lens", "block_table", "slot_mapping")
HEADS, WIDTH = 6, 8

Arguments = dict[str, Any]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The form of other devices too, here on the CPU."""
    monkeypatch.setattr(pages, "on_host", lambda tensor: FORMS[request.param])
    return str(request.param)


def pool_arguments(case: Case, rate: int, spans: int) -> Arguments:
    """Rows of which those that are further back than they are read are NaN."""
    case = replace(case, kv_heads=1, width=spans * WIDTH, v_width=spans * WIDTH)
    whole = make(replace(case, window=spans * rate))
    return {
        "values": whole["k"][:, 0],
        "gates": whole["v"][:, 0],
        "bias": torch.randn(rate, spans * WIDTH),
        "value_cache": whole["k_cache"][:, :, 0].contiguous(),
        "gate_cache": whole["v_cache"][:, :, 0].contiguous(),
        **{name: whole[name] for name in METADATA},
        "spans": spans,
    }


def entry_pages(case: Case, rate: int, width: int) -> tuple[Tensor, Tensor]:
    """A cache of entries, NaN but for those of windows that were whole before; and its block table."""
    whole, size = make(replace(case, window=0)), case.page_size
    table = whole["block_table"]
    cache = torch.full(
        (len(whole["k_cache"]), -(-size // rate), width), torch.nan, dtype=case.dtype
    )
    for seq, context in enumerate(case.contexts):
        for window in range(context // rate):
            page = (window * rate + rate - 1) // size
            place = table[seq, page], window - naive.earlier(page, size, rate)
            cache[place] = torch.randn(width).to(case.dtype)
    return cache, table


def new_entries(case: Case, rate: int, width: int) -> Tensor:
    """[N, width], NaN but where a window becomes whole."""
    ends = [
        (pos + 1) % rate == 0
        for new, context in zip(case.news, case.contexts)
        for pos in range(context, context + new)
    ] + [False] * case.padding
    entries = torch.randn(len(ends), width).to(case.dtype)
    return entries.masked_fill(~torch.tensor(ends, dtype=torch.bool)[:, None], torch.nan)


def index_arguments(case: Case, rate: int, topk: int, relu: bool = True) -> Arguments:
    whole = make(case)
    cache, table = entry_pages(case, rate, WIDTH)
    return {
        "q": whole["q"],
        "entries": new_entries(case, rate, WIDTH),
        "weights": torch.randn(whole["q"].shape[:2]),
        "cache": cache,
        "paged": whole["k_cache"],
        "cu_seqlens": whole["cu_seqlens"],
        "context_lens": whole["context_lens"],
        "block_table": table,
        "rate": rate,
        "topk": topk,
        "scale": case.scale,
        "relu": relu,
    }


def attention_arguments(case: Case, rate: int, topk: int = 0) -> Arguments:
    whole = make(replace(case, kv_heads=1))
    cache, table = entry_pages(case, rate, WIDTH)
    return {
        "q": whole["q"],
        "rows": whole["k"][:, 0],
        "entries": new_entries(case, rate, WIDTH),
        "row_cache": whole["k_cache"][:, :, 0].contiguous(),
        "entry_cache": cache,
        "selected": random_selection(case, rate, topk) if topk else None,
        **{name: whole[name] for name in METADATA},
        "entry_table": table,
        "rate": rate,
        "scale": case.scale,
        "window": case.window,
        "sinks": whole["sinks"],
    }


def random_selection(case: Case, rate: int, topk: int) -> Tensor:
    """[N, topk] int32: distinct whole windows in any order, -1 anywhere."""
    rows = []
    for new, context in zip(case.news, case.contexts):
        for pos in range(context, context + new):
            chosen = torch.randperm((pos + 1) // rate)[:topk]
            chosen = torch.cat([chosen, torch.full((topk - len(chosen),), -1)])
            rows.append(chosen[torch.randperm(topk)])
    rows += [torch.full((topk,), -1)] * case.padding
    return torch.stack(rows).int() if rows else torch.empty(0, topk, dtype=torch.int32)


def check(operator: Callable, oracle: Callable, arguments: Arguments, **changes: Any) -> None:
    """Output and what is left in the pages; `changes` make a mutant."""
    theirs, mine = owned(arguments), owned(arguments) | changes
    expected = oracle(**theirs)
    with poisoned_memory():
        actual = operator(**mine)
    assert actual.is_contiguous()
    assert actual.dtype == expected.dtype
    if expected.is_floating_point():
        assert_close(actual, expected)
    else:
        assert torch.equal(actual, expected)
    for name in (n for n in arguments if n.endswith("cache")):  # but for the scratch page
        left, wanted = (side[name][1:].nan_to_num(7.0) for side in (mine, theirs))
        assert torch.equal(left, wanted), name


def owned(arguments: Arguments) -> Arguments:
    """The same arguments with caches of their own."""
    return {n: x.clone() if n.endswith("cache") else x for n, x in arguments.items()}


def check_pool(arguments: Arguments, **changes: Any) -> None:
    check(pool_windows, naive.pool_windows_naive, arguments, **changes)


def check_index(arguments: Arguments, **changes: Any) -> None:
    check(index_entries, naive.index_entries_naive, arguments, **changes)


def check_attention(arguments: Arguments, **changes: Any) -> None:
    check(compressed_attention, naive.compressed_attention_naive, arguments, **changes)


RATES = [(2, 1), (3, 1), (4, 2), (8, 1), (5, 3)]
"""Tokens of a window, and windows of an entry: more and fewer than a page of four has, and none of its divisors."""


@pytest.mark.parametrize(("rate", "spans"), RATES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.usefixtures("form")
def test_windows_are_weighed(batch: str, rate: int, spans: int) -> None:
    torch.manual_seed(0)
    check_pool(pool_arguments(BATCHES[batch], rate, spans))


@pytest.mark.parametrize("topk", [1, 3, 50])
@pytest.mark.parametrize("rate", [2, 3, 4, 8])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.usefixtures("form")
def test_selects_the_entries_that_naive_selects(batch: str, rate: int, topk: int) -> None:
    torch.manual_seed(0)
    for relu in (True, False):
        check_index(index_arguments(BATCHES[batch], rate, topk, relu))


@pytest.mark.parametrize("topk", [0, 1, 3, 50])
@pytest.mark.parametrize("rate", [2, 3, 4, 8])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.usefixtures("form")
def test_attends_as_naive_does(batch: str, rate: int, topk: int) -> None:
    torch.manual_seed(0)
    for scoring in ({"window": 5, "sinks": True}, {"window": 1}, {}):
        check_attention(attention_arguments(replace(BATCHES[batch], **scoring), rate, topk))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("form")
def test_other_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case = replace(BATCHES["mixed"], dtype=dtype, sinks=True, window=5)
    check_pool(pool_arguments(case, 3, 2))
    check_attention(attention_arguments(case, 3, 2))


@pytest.mark.usefixtures("form")
def test_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attend, pool, select):
        monkeypatch.setattr(module, "_ELEMENTS", 300)
    torch.manual_seed(0)
    case = Case((70, 33, 1), (0, 9, 40), page_size=16, window=7)
    check_pool(pool_arguments(case, 5, 2))
    check_index(index_arguments(case, 5, 4))
    check_attention(attention_arguments(case, 5, 4))


CONTINUED = replace(BATCHES["continued"], window=5, sinks=True)
CHECKS = {
    "pool": (check_pool, lambda: pool_arguments(CONTINUED, 3, 2)),
    "index": (check_index, lambda: index_arguments(CONTINUED, 3, 2)),
    "attention": (check_attention, lambda: attention_arguments(CONTINUED, 3)),
    "selected": (check_attention, lambda: attention_arguments(CONTINUED, 3, 2)),
}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("pool", {"bias": lambda x: x.flip(0)}),
        ("pool", {"gates": lambda x: x.flip(1)}),
        ("pool", {"context_lens": lambda x: x - 1}),
        ("index", {"topk": lambda x: x + 1}),
        ("index", {"relu": lambda x: not x}),
        ("index", {"weights": lambda x: x.flip(1)}),
        ("index", {"context_lens": lambda x: x - 1}),
        ("attention", {"window": lambda x: x + 1}),
        ("attention", {"sinks": lambda x: x + 1}),
        ("attention", {"context_lens": lambda x: x - 1}),
        ("attention", {"selected": lambda x: torch.zeros(43, 1, dtype=torch.int32)}),
        ("selected", {"selected": lambda x: x.clamp(max=1)}),
        ("selected", {"selected": lambda x: None}),
    ],
)
def test_a_mutant_is_noticed(name: str, change: dict[str, Callable]) -> None:
    torch.manual_seed(0)
    compare, make_arguments = CHECKS[name]
    arguments = make_arguments()
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        compare(arguments, **{n: made(arguments[n]) for n, made in change.items()})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("pool", {"gates": torch.zeros(43, 3)}, "differ in width"),
        ("pool", {"spans": 5}, "no 5 parts"),
        ("pool", {"value_cache": torch.zeros(9, 4, 3)}, "does not hold"),
        ("index", {"entries": torch.zeros(43, 3)}, "do not fit index queries"),
        ("index", {"weights": torch.zeros(43, 3)}, "do not fit index queries"),
        ("index", {"topk": 0}, "nothing to select"),
        ("index", {"cache": torch.zeros(9, 1, WIDTH)}, "has 2 entries of 3, not 1"),
        ("attention", {"rows": torch.zeros(43, 3)}, "do not fit q"),
        ("attention", {"entry_cache": torch.zeros(9, 3, WIDTH)}, "has 2 entries of 3, not 3"),
        ("attention", {"selected": torch.zeros(43, 3)}, "expected int32"),
    ],
)
def test_shapes_that_do_not_fit(name: str, change: Arguments, message: str) -> None:
    make_arguments = CHECKS[name][1]
    operator = {"pool": pool_windows, "index": index_entries}.get(name, compressed_attention)
    with pytest.raises(ValueError, match=message):
        operator(**(make_arguments() | change))


@pytest.mark.parametrize("name", CHECKS)
def test_operators_are_well_formed(name: str) -> None:
    """Schema, fake implementation and declared mutation agree."""
    operator = {
        "pool": torch.ops.regraft.pool_windows.default,
        "index": torch.ops.regraft.index_entries.default,
    }.get(name, torch.ops.regraft.compressed_attention.default)
    arguments = CHECKS[name][1]()
    positional = tuple(arguments[argument.name] for argument in operator._schema.arguments)
    torch.library.opcheck(operator, positional, test_utils=("test_schema", "test_faketensor"))
