"""Latent attention: absorbed, expanded and naive are the same function, in float64 to 1e-10."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regraft.kernels.latent_attention import absorbed, latent_attention
from regraft.kernels.latent_attention.naive import latent_attention_naive
from tests.kernels.paged import Case, make, poisoned_memory
from tests.tolerance import assert_close

RANK, WIDTH, SHARED, V_WIDTH = 16, 5, 4, 7
EXACT = 1e-10
BATCHES = {
    "decode": Case((1, 1, 1, 1), (0, 3, 11, 20)),
    "prefill": Case((3, 9, 4), (0, 0, 0)),
    "long prefill": Case((30, 11), (0, 6)),
    "mixed": Case((3, 1, 0, 17, 1), (0, 9, 4, 5, 0), padding=2),
    "nothing": Case((0, 0), (3, 0), padding=1),
}
SCORINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "chunk": {"chunk": 6},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all": {"sinks": True, "window": 6, "softcap": 2.0},
}


def arguments(case: Case, latent_first: bool = True) -> dict[str, Any]:
    torch.manual_seed(0)
    whole = make(replace(case, kv_heads=1, width=RANK + SHARED, v_width=1))
    tokens, heads = whole["q"].shape[:2]
    keep = ("cu_seqlens", "context_lens", "block_table", "slot_mapping", "scale", "sinks")
    starts = (0, WIDTH) if latent_first else (SHARED, 0)
    return {
        "q": torch.randn(tokens, heads, WIDTH + SHARED).to(case.dtype),
        "rows": whole["k"][:, 0],
        "w_k": torch.randn(heads, WIDTH, RANK).to(case.dtype),
        "w_v": torch.randn(heads, V_WIDTH, RANK).to(case.dtype),
        "cache": whole["k_cache"][:, :, 0].contiguous(),
        **{name: whole[name] for name in keep},
        **case.scoring,
        "latent_start": starts[0],
        "shared_start": starts[1],
    }


def own_cache(given: dict[str, Any]) -> dict[str, Any]:
    return given | {"cache": given["cache"].clone()}


def difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference; a NaN is infinite."""
    error = (actual - expected).abs().nan_to_num(nan=torch.inf)
    return float(error.max()) if error.numel() else 0.0


def error_of(given: dict[str, Any], **changes: Any) -> float:
    """Of the operator, changed, against the naive form."""
    expected = latent_attention_naive(**own_cache(given))
    with poisoned_memory():
        return difference(latent_attention(**own_cache(given) | changes), expected)


@pytest.mark.parametrize("latent_first", [True, False])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_naive_in_float64(batch: str, scoring: str, latent_first: bool) -> None:
    case = replace(BATCHES[batch], dtype=torch.float64, **SCORINGS[scoring])
    assert error_of(arguments(case, latent_first)) <= EXACT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_naive_in_other_dtypes(batch: str, dtype: torch.dtype) -> None:
    given = arguments(replace(BATCHES[batch], dtype=dtype))
    whole = {
        n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for n, x in given.items()
    }
    expected = latent_attention_naive(**own_cache(whole))
    # Values are sums of 16 products of the latent's, rounded once more on their way through it.
    assert_close(latent_attention(**own_cache(given)), expected.to(dtype), scale=16.0)


def test_absorption_is_the_same_algebra() -> None:
    """q . (W_k c) = (W_k^T q) . c, and W_v of a weighted sum is the weighted sum of W_v."""
    torch.manual_seed(0)
    heads, keys = 3, 50
    q = torch.randn(2, heads, WIDTH, dtype=torch.float64)
    w_k = torch.randn(heads, WIDTH, RANK, dtype=torch.float64)
    w_v = torch.randn(heads, V_WIDTH, RANK, dtype=torch.float64)
    latents = torch.randn(keys, RANK, dtype=torch.float64)
    scores = torch.einsum("nhk,lhk->nhl", q, torch.einsum("hkr,lr->lhk", w_k, latents))
    inside = torch.einsum("nhr,lr->nhl", absorbed.absorb(q, w_k), latents)
    assert difference(inside, scores) <= EXACT
    shares = scores.softmax(-1)
    values = torch.einsum("nhl,lhv->nhv", shares, torch.einsum("hvr,lr->lhv", w_v, latents))
    outside = absorbed.project(torch.einsum("nhl,lr->nhr", shares, latents), w_v)
    assert difference(outside, values) <= EXACT


@pytest.mark.parametrize(
    ("new", "context", "expands"), [(1, 0, True), (5, 4, False), (6, 4, True), (8, 90, False), (10, 90, True)]
)  # fmt: skip
def test_the_cheaper_form_is_chosen(
    new: int, context: int, expands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just below and just above the number of tokens from which expanding costs less; both are exact."""
    given = arguments(Case((new, 1), (context, 7), dtype=torch.float64))
    pairs = new * context + new * (new + 1) / 2
    both = RANK * (WIDTH + V_WIDTH)
    absorbing = new * both + pairs * (2 * RANK + SHARED)
    expanding = (new + context) * both + pairs * (WIDTH + SHARED + V_WIDTH)
    assert (expanding < absorbing) == expands
    expanded: list[list[int]] = []
    mixed = absorbed._mixed

    def counted(*args: Any) -> Tensor:
        expanded.append(args[-1])
        return mixed(*args)

    monkeypatch.setattr(absorbed, "_mixed", counted)
    assert error_of(given) <= EXACT
    assert expanded == ([[0]] if expands else [])


MUTANTS: dict[str, Any] = {
    "another part of the query meets the latent": {"latent_start": 1},
    "another part meets the shared key": {"shared_start": 0},
    "another scale": {"scale": 0.41},
    "heads exchanged in the key map": {"w_k": lambda w: w.flip(0)},
    "heads exchanged in the value map": {"w_v": lambda w: w.flip(0)},
    "key map used for another latent order": {"w_k": lambda w: w.flip(2)},
    "rows turned around": {"rows": lambda x: x.flip(1)},
    "a window": {"window": 3},
}


@pytest.mark.parametrize("batch", ["decode", "mixed"])
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(name: str, batch: str) -> None:
    given = arguments(replace(BATCHES[batch], dtype=torch.float64))
    changes = {n: x(given[n]) if callable(x) else x for n, x in MUTANTS[name].items()}
    assert error_of(given, **changes) > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(9, 6, 8)}, "q .* does not fit rows"),
        ({"w_v": torch.zeros(6, 7, 15)}, "w_v .* does not fit w_k"),
        ({"cache": torch.zeros(4, 4, 19)}, "cache .* does not hold rows"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        latent_attention(**(arguments(Case((9,), (4,))) | changes))


def test_the_operator_says_what_it_writes() -> None:
    given = arguments(Case((9,), (4,)))
    operator = torch.ops.regraft.latent_attention.default
    values = tuple(given[a.name] for a in operator._schema.arguments)
    torch.library.opcheck(operator, values, test_utils=("test_schema", "test_faketensor"))
