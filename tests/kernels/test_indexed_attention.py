"""Selecting keys by index scores, and attention to the selected rows, against what they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regraft.kernels.indexed_attention import (
    blocks,
    gather,
    index_block_topk,
    index_pool_topk,
    index_topk,
    indexed_attention,
    indexed_latent_attention,
    naive,
    pools,
    select,
)
from regraft.kernels.paged_attention import paged_attention
from tests.kernels.paged import Case, copied, make, poisoned_memory
from tests.tolerance import assert_close

BATCHES = {
    "decode": Case((1, 1, 1, 1), (0, 3, 11, 20)),
    "prefill": Case((3, 9, 4), (0, 0, 0)),
    "continued": Case((5, 8, 30), (7, 1, 20)),
    "mixed": Case((3, 1, 0, 17, 1), (0, 9, 4, 5, 0), padding=2),
    "nothing": Case((0, 0), (3, 0), padding=1),
}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 5},
    "chunk": {"chunk": 6},
    "window in chunk": {"window": 7, "chunk": 9},
}
SCORINGS: dict[str, dict[str, Any]] = {
    **MASKS,
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all": {"sinks": True, "window": 6, "softcap": 2.0},
}
METADATA = ("cu_seqlens", "context_lens", "block_table", "slot_mapping")
UNSUPPORTED = ("alibi_slopes", "rel_bias")


def index_arguments(case: Case, topk: int, relu: bool = True) -> dict[str, Any]:
    """Index queries of six heads, keys and weights."""
    whole = make(replace(case, kv_heads=1))
    return {
        "q": whole["q"],
        "k": whole["k"][:, 0],
        "weights": torch.randn(whole["q"].shape[:2]),
        "cache": whole["k_cache"][:, :, 0].contiguous(),
        **{name: whole[name] for name in METADATA},
        "topk": topk,
        "scale": case.scale,
        "relu": relu,
        "window": case.window,
        "chunk": case.chunk,
    }


def owned(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with caches of their own."""
    return {n: x.clone() if "cache" in n else x for n, x in arguments.items()}


def check_topk(arguments: dict[str, Any], **changes: Any) -> None:
    """The selection and what is left in the pages; `changes` make a mutant."""
    theirs, mine = owned(arguments), owned(arguments) | changes
    expected = naive.index_topk_naive(**theirs)
    actual = index_topk(**mine)
    assert actual.dtype == torch.int32
    assert torch.equal(actual, expected)
    assert torch.equal(mine["cache"][1:].nan_to_num(7.0), theirs["cache"][1:].nan_to_num(7.0))


@pytest.mark.parametrize("topk", [1, 4, 100])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("batch", BATCHES)
def test_selects_what_naive_selects(batch: str, mask: str, topk: int) -> None:
    torch.manual_seed(0)
    for relu in (True, False):
        check_topk(index_arguments(replace(BATCHES[batch], **MASKS[mask]), topk, relu))


@pytest.mark.parametrize("limit", [1, 300])
def test_selection_in_blocks(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_ELEMENTS", limit)
    check_topk(index_arguments(Case((70, 33, 1), (0, 9, 40), page_size=16), 7))


@pytest.mark.parametrize("topk", [1, 4, 100])
@pytest.mark.parametrize("batch", BATCHES)
def test_selection_without_a_look_at_metadata(batch: str, topk: int) -> None:
    """The form of other devices, here on the CPU."""
    arguments = index_arguments(replace(BATCHES[batch], window=9), topk)
    expected = naive.index_topk_naive(**owned(arguments))
    cache = arguments["cache"].clone()
    cache.view(-1, cache.shape[2])[arguments["slot_mapping"]] = arguments["k"]
    selected = torch.full_like(expected, -1)
    metadata = tuple(arguments[name] for name in METADATA[:3])
    select._by_token(
        selected, arguments["q"], arguments["weights"], cache, metadata, topk, arguments["scale"], True, (9, 0)
    )  # fmt: skip
    assert torch.equal(selected, expected)


def test_of_equal_scores_the_first_positions() -> None:
    """However many equals there are, on either side of the boundary."""
    scores = torch.tensor(
        [[1.0, 2.0, 1.0, 1.0, 3.0, 1.0], [0.0] * 6, [-0.0, 0.0, 5.0, 0.0, 5.0, 5.0]]
    )
    allowed = torch.tensor([[True] * 6, [False, True, True, True, True, True], [True] * 6])
    expected = [[0, 1, 2, 4], [1, 2, 3, 4], [0, 2, 4, 5]]
    assert select.best(scores, allowed, 4).tolist() == expected
    arguments = index_arguments(Case((9,), (4,)), 3)
    arguments["weights"] = torch.zeros_like(arguments["weights"])
    assert index_topk(**owned(arguments)).tolist() == [[0, 1, 2]] * 9
    check_topk(arguments)


def test_fewer_keys_than_may_be_selected() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0], [3.0, 1.0, 2.0]])
    allowed = torch.tensor([[True, False, True], [False, False, False]])
    assert select.best(scores, allowed, 2).tolist() == [[0, 2], [-1, -1]]
    assert select.best(scores, allowed, 5).tolist() == [[0, 2, -1, -1, -1], [-1] * 5]


@pytest.mark.parametrize(
    "change",
    [
        {"topk": 5},
        {"relu": False},
        {"scale": -0.4},
        {"window": 0},
        {"weights": "reversed"},
        {"context_lens": "one less"},
    ],
    ids=str,
)
def test_a_wrong_selection_is_noticed(change: dict[str, Any]) -> None:
    torch.manual_seed(0)
    arguments = index_arguments(replace(BATCHES["continued"], window=11), 6)
    made = {"reversed": lambda x: x.flip(1), "one less": lambda x: x - 1}
    changes = {n: made[x](arguments[n]) if isinstance(x, str) else x for n, x in change.items()}
    with pytest.raises((AssertionError, RuntimeError)):
        check_topk(arguments, **changes)


# ---- blocks


def block_arguments(
    case: Case, size: int, topk: int, relu: bool = True, weighed: bool = True
) -> dict[str, Any]:
    """Six index heads; a key for every token, of which those of a block's last token count."""
    arguments = index_arguments(case, topk, relu)
    del arguments["window"], arguments["chunk"]
    if not weighed:
        arguments["weights"] = None
    return arguments | {"size": size}


def check_blocks(arguments: dict[str, Any], **changes: Any) -> None:
    theirs, mine = owned(arguments), owned(arguments) | changes
    expected = naive.index_block_topk_naive(**theirs)
    actual = index_block_topk(**mine)
    assert actual.dtype == torch.int32
    assert torch.equal(actual, expected)
    assert torch.equal(mine["cache"][1:].nan_to_num(7.0), theirs["cache"][1:].nan_to_num(7.0))


@pytest.mark.parametrize(("size", "topk"), [(2, 1), (4, 2), (3, 3), (4, 50)])
@pytest.mark.parametrize("batch", BATCHES)
def test_selects_the_blocks_that_naive_selects(batch: str, size: int, topk: int) -> None:
    torch.manual_seed(0)
    for relu in (True, False):
        for weighed in (True, False):
            check_blocks(block_arguments(BATCHES[batch], size, topk, relu, weighed))


@pytest.mark.parametrize("limit", [1, 300])
def test_blocks_in_pieces(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_ELEMENTS", limit)
    check_blocks(block_arguments(Case((70, 33, 1), (0, 9, 40), page_size=16), 4, 5))


@pytest.mark.parametrize("batch", BATCHES)
def test_blocks_without_a_look_at_metadata(batch: str) -> None:
    """The form of other devices, here on the CPU."""
    arguments = block_arguments(BATCHES[batch], 3, 2)
    expected = naive.index_block_topk_naive(**owned(arguments))
    cache = arguments["cache"].clone()
    cache.view(-1, cache.shape[2])[arguments["slot_mapping"]] = arguments["k"]
    chosen = torch.full((len(expected), 2), -1, dtype=torch.int32)
    seq, pos = select.places(*(arguments[n] for n in METADATA[:2]), len(expected))
    blocks._by_token(
        chosen, arguments["q"], arguments["weights"], cache, arguments["block_table"][seq], pos, 3, arguments["scale"],
        True,
    )  # fmt: skip
    assert torch.equal(pools.tokens_of(chosen, pos, 3), expected)


def test_of_equal_blocks_those_that_topk_takes() -> None:
    """Of the scores of one head's relu, half are 0."""
    case = Case((60,), (0,), page_size=4)
    arguments = block_arguments(case, 2, 6, weighed=False)
    arguments["q"] = arguments["q"][:, :1]
    scores = arguments["scale"] * torch.relu(arguments["q"][:, 0] @ arguments["k"][1::2].t())
    found = index_block_topk(**owned(arguments))[:, :12:2]
    last = []
    for token in range(13, 60):
        best = scores[token, : (token + 1) // 2].topk(6)
        assert found[token].tolist() == (2 * best.indices.sort().values).tolist()
        last.append(float(best.values[-1]))
    assert last.count(0.0) > 5


@pytest.mark.parametrize(
    "change",
    [
        {"size": 2},
        {"topk": 3},
        {"relu": False},
        {"scale": -0.4},
        {"weights": None},
        {"k": "rolled"},
    ],
    ids=str,
)
def test_a_wrong_selection_of_blocks_is_noticed(change: dict[str, Any]) -> None:
    torch.manual_seed(0)
    arguments = block_arguments(BATCHES["continued"], 3, 2)
    changes = {n: arguments[n].roll(1, 0) if x == "rolled" else x for n, x in change.items()}
    with pytest.raises((AssertionError, RuntimeError)):
        check_blocks(arguments, **changes)


# ---- pools


def pool_arguments(case: Case, size: int, topk: int, relu: bool = True) -> dict[str, Any]:
    """Six index heads of width 5, rows of keys and gates."""
    whole = make(replace(case, kv_heads=1, width=10))
    return {
        "q": torch.randn(*whole["q"].shape[:2], 5).to(case.dtype),
        "rows": whole["k"][:, 0],
        "weights": torch.randn(whole["q"].shape[:2]),
        "bias": torch.randn(size, 5),
        "cache": whole["k_cache"][:, :, 0].contiguous(),
        **{name: whole[name] for name in METADATA},
        "topk": topk,
        "scale": case.scale,
        "relu": relu,
    }


def check_pools(arguments: dict[str, Any], **changes: Any) -> None:
    theirs, mine = owned(arguments), owned(arguments) | changes
    expected = naive.index_pool_topk_naive(**theirs)
    actual = index_pool_topk(**mine)
    assert actual.dtype == torch.int32
    assert torch.equal(actual, expected)
    assert torch.equal(mine["cache"][1:].nan_to_num(7.0), theirs["cache"][1:].nan_to_num(7.0))


@pytest.mark.parametrize(("size", "topk"), [(2, 1), (4, 2), (3, 3), (4, 50)])
@pytest.mark.parametrize("batch", BATCHES)
def test_selects_the_pools_that_naive_selects(batch: str, size: int, topk: int) -> None:
    torch.manual_seed(0)
    for relu in (True, False):
        check_pools(pool_arguments(BATCHES[batch], size, topk, relu))


@pytest.mark.parametrize("limit", [1, 300])
def test_pools_in_blocks(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_ELEMENTS", limit)
    check_pools(pool_arguments(Case((70, 33, 1), (0, 9, 40), page_size=16), 4, 5))


@pytest.mark.parametrize("batch", BATCHES)
def test_pools_without_a_look_at_metadata(batch: str) -> None:
    """The form of other devices, here on the CPU."""
    arguments = pool_arguments(BATCHES[batch], 3, 2)
    expected = naive.index_pool_topk_naive(**owned(arguments))
    cache = arguments["cache"].clone()
    cache.view(-1, cache.shape[2])[arguments["slot_mapping"]] = arguments["rows"]
    chosen = torch.full((len(expected), 2), -1, dtype=torch.int32)
    seq, pos = select.places(*(arguments[n] for n in METADATA[:2]), len(expected))
    pools._by_token(
        chosen, arguments["q"], arguments["weights"], arguments["bias"], cache, arguments["block_table"][seq], pos,
        arguments["scale"], True,
    )  # fmt: skip
    assert torch.equal(pools.tokens_of(chosen, pos, 3), expected)


def test_the_tokens_after_the_last_pool() -> None:
    """Positions 0 to 6 in pools of three, of which one is selected."""
    arguments = pool_arguments(Case((7,), (0,)), 3, 1)
    arguments["weights"] = torch.zeros_like(arguments["weights"])
    none = [-1, -1, -1]
    assert index_pool_topk(**arguments).tolist() == [
        [*none, 0, -1], [*none, 0, 1], [0, 1, 2, -1, -1], [0, 1, 2, 3, -1], [0, 1, 2, 3, 4], [0, 1, 2, -1, -1],
        [0, 1, 2, 6, -1],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"topk": 3},
        {"relu": False},
        {"scale": -0.4},
        {"bias": "reversed"},
        {"weights": "reversed"},
        {"rows": "keys and gates exchanged"},
    ],
    ids=str,
)
def test_a_wrong_pool_is_noticed(change: dict[str, Any]) -> None:
    torch.manual_seed(0)
    arguments = pool_arguments(Case((5, 30), (7, 20)), 3, 2)
    made = {"reversed": lambda x: x.flip(1), "keys and gates exchanged": lambda x: x.roll(5, 1)}
    changes = {n: made[x](arguments[n]) if isinstance(x, str) else x for n, x in change.items()}
    with pytest.raises(AssertionError):
        check_pools(arguments, **changes)


# ---- attention to selected rows


def random_selection(case: Case, topk: int) -> Tensor:
    """[N, topk] int32: distinct earlier positions in any order, -1 anywhere."""
    rows = []
    for new, context in zip(case.news, case.contexts):
        for pos in range(context, context + new):
            chosen = torch.randperm(pos + 1)[:topk]
            chosen = torch.cat([chosen, torch.full((topk - len(chosen),), -1)])
            rows.append(chosen[torch.randperm(topk)])
    rows += [torch.full((topk,), -1)] * case.padding
    return torch.stack(rows).int() if rows else torch.empty(0, topk, dtype=torch.int32)


def attention_arguments(case: Case, topk: int) -> dict[str, Any]:
    whole = {n: x for n, x in make(case).items() if n not in UNSUPPORTED}
    return whole | {"selected": random_selection(case, topk)}


def latent_arguments(case: Case, topk: int) -> dict[str, Any]:
    """A row of 8 + 4 values for six heads with keys of 5 + 4 and values of 7."""
    whole = attention_arguments(replace(case, kv_heads=1, width=12, v_width=1), topk)
    tokens, heads = whole["q"].shape[:2]
    rows = {"rows": whole["k"][:, 0], "cache": whole["k_cache"][:, :, 0].contiguous()}
    maps = {"w_k": torch.randn(heads, 5, 8), "w_v": torch.randn(heads, 7, 8)}
    maps = {name: weight.to(case.dtype) for name, weight in maps.items()}
    for name in ("k", "v", "k_cache", "v_cache"):
        del whole[name]
    query = torch.randn(tokens, heads, 9).to(case.dtype)
    return whole | rows | maps | {"q": query, "latent_start": 4, "shared_start": 0}


FORMS: dict[str, tuple[Callable, Callable, Callable]] = {
    "rows": (attention_arguments, indexed_attention, naive.indexed_attention_naive),
    "latent": (latent_arguments, indexed_latent_attention, naive.indexed_latent_attention_naive),
}


def check_attention(form: str, case: Case, topk: int, **changes: Any) -> None:
    torch.manual_seed(0)
    arguments_of, attend, oracle = FORMS[form]
    arguments = arguments_of(case, topk)
    theirs, mine = owned(arguments), owned(arguments) | changes
    expected = oracle(**theirs)
    with poisoned_memory():
        out = attend(**mine)
    assert out.dtype == case.dtype
    # Absorbed, products are of weights and sums of rows: they round in another order.
    assert_close(out, expected, scale=8.0 if form == "latent" else 1.0)
    for name in (n for n in arguments if "cache" in n):
        assert torch.equal(mine[name][1:].nan_to_num(7.0), theirs[name][1:].nan_to_num(7.0)), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("batch", BATCHES)
def test_attends_as_naive_does(batch: str, scoring: str, form: str) -> None:
    case = replace(BATCHES[batch], **SCORINGS[scoring])
    for topk in (1, 4, 64):
        check_attention(form, case, topk)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_attends_as_naive_does_in_other_dtypes(dtype: torch.dtype, form: str) -> None:
    check_attention(form, replace(BATCHES["mixed"], dtype=dtype, sinks=True), 4)


@pytest.mark.parametrize("form", FORMS)
def test_attention_in_blocks(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_ELEMENTS", 200)
    check_attention(form, Case((70, 33, 1), (0, 9, 40), page_size=16), 5)


def test_all_selected_is_plain_attention() -> None:
    arguments = attention_arguments(BATCHES["mixed"], 40)
    expected = paged_attention(**{n: x for n, x in copied(arguments).items() if n != "selected"})
    assert_close(indexed_attention(**copied(arguments)), expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_row_is_noticed(form: str) -> None:
    case = Case((5, 8, 30), (7, 1, 20))
    torch.manual_seed(0)
    selected = FORMS[form][0](case, 4)["selected"]
    for mutant in (
        selected.clamp(max=8),
        torch.where(selected > 3, selected - 1, selected),
        selected[:, 1:],
    ):
        with pytest.raises(AssertionError, match="max abs error"):
            check_attention(form, case, 4, selected=mutant.contiguous())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selected": torch.zeros(9, 2, dtype=torch.int64)}, "selected: expected int32"),
        ({"selected": torch.zeros(8, 2, dtype=torch.int32)}, "selected: expected int32"),
        ({"k": torch.zeros(9, 2, 7)}, "k .* does not fit q"),
        ({"v": torch.zeros(9, 3, 8)}, "v .* does not fit k"),
        ({"v_cache": torch.zeros(4, 4, 2, 7)}, "do not hold these rows"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    arguments = attention_arguments(Case((9,), (4,)), 2)
    with pytest.raises(ValueError, match=message):
        indexed_attention(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.zeros(9, 7)}, "index keys .* do not fit"),
        ({"weights": torch.zeros(9, 7)}, "weights .* do not fit"),
        ({"cache": torch.zeros(4, 4, 7)}, "cache .* does not hold"),
        ({"topk": 0}, "selects nothing"),
    ],
)
def test_index_arguments_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        index_topk(**(index_arguments(Case((9,), (4,)), 2) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": torch.zeros(9, 8)}, "no keys and gates for bias"),
        ({"bias": torch.zeros(1, 5)}, "no keys and gates for bias"),
        ({"q": torch.zeros(9, 6, 4)}, "index keys .* do not fit"),
        ({"topk": 0}, "selects nothing"),
    ],
)
def test_pool_arguments_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        index_pool_topk(**(pool_arguments(Case((9,), (4,)), 3, 2) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.zeros(9, 7)}, "index keys .* do not fit"),
        ({"weights": torch.zeros(9, 7)}, "weights .* do not fit"),
        ({"size": 1}, "at least two tokens"),
        ({"topk": 0}, "selects nothing"),
    ],
)
def test_block_arguments_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        index_block_topk(**(block_arguments(Case((9,), (4,)), 3, 2) | changes))


def test_operators_say_what_they_write() -> None:
    for operator, arguments in (
        (torch.ops.regraft.index_topk.default, index_arguments(Case((9,), (4,)), 2)),
        (torch.ops.regraft.index_pool_topk.default, pool_arguments(Case((9,), (4,)), 3, 2)),
        (torch.ops.regraft.index_block_topk.default, block_arguments(Case((9,), (4,)), 3, 2)),
        (torch.ops.regraft.indexed_attention.default, attention_arguments(Case((9,), (4,)), 2)),
        (torch.ops.regraft.indexed_latent_attention.default, latent_arguments(Case((9,), (4,)), 2)),
    ):
        values = [arguments[a.name] for a in operator._schema.arguments]
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(operator, tuple(values), test_utils=checks)
