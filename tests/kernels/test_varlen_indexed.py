"""Selections without a cache: those of the operators with pages, and no gradient through them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regraft.kernels.compressed_attention.naive import index_entries_naive
from regraft.kernels.indexed_attention import naive
from regraft.kernels.varlen import STATELESS

N, R = 41, 5
BOUNDS = torch.tensor([0, 17, 18, 20, 38, N], dtype=torch.int32)
HOW: dict[str, dict[str, Any]] = {
    "best": {},
    "more than there are": {"topk": 64},
    "without relu": {"relu": False},
    "window": {"window": 5},
    "chunk": {"chunk": 7},
}


def arguments(**changed: Any) -> dict[str, Any]:
    rows = {"q": torch.randn(N, 3, 4), "weights": torch.randn(N, 3), "cu_seqlens": BOUNDS}
    return rows | {"topk": 3, "scale": 0.5, "relu": True} | changed


def call(name: str, given: dict[str, Any]) -> Tensor:
    operator = STATELESS[f"regraft::{name}"].operator
    return operator(*(given[argument.name] for argument in operator._schema.arguments))


def by_definition(name: str, given: dict[str, Any], width: int) -> Tensor:
    pages = torch.arange(R * N).view(R, N)
    lengths = BOUNDS.diff().tolist()
    slots = torch.cat([pages[r, :n] for r, n in enumerate(lengths)])
    metadata = {"context_lens": torch.zeros(R, dtype=torch.int32), "block_table": pages.int()}
    cache = torch.full((R * N, 1, width), torch.nan)
    oracle = getattr(naive, f"{name}_naive")
    return oracle(**given, cache=cache, slot_mapping=slots, **metadata)


@pytest.mark.parametrize("how", HOW)
def test_keys(how: str) -> None:
    torch.manual_seed(1)
    given = arguments(k=torch.randn(N, 4), **{"window": 0, "chunk": 0} | HOW[how])
    assert torch.equal(call("index_topk", given), by_definition("index_topk", given, 4))


@pytest.mark.parametrize("how", ["best", "more than there are", "without relu"])
def test_pools(how: str) -> None:
    torch.manual_seed(1)
    given = arguments(rows=torch.randn(N, 8), bias=torch.randn(3, 4), **HOW[how])
    found = call("index_pool_topk", given)
    assert torch.equal(found, by_definition("index_pool_topk", given, 8))


@pytest.mark.parametrize("how", ["best", "more than there are", "without relu"])
@pytest.mark.parametrize("weighed", [True, False])
def test_blocks(how: str, weighed: bool) -> None:
    torch.manual_seed(1)
    given = arguments(k=torch.randn(N, 4), size=3, **HOW[how])
    given |= {} if weighed else {"weights": None}
    found = call("index_block_topk", given)
    assert torch.equal(found, by_definition("index_block_topk", given, 4))


@pytest.mark.parametrize("how", ["best", "more than there are", "without relu"])
def test_entries(how: str) -> None:
    torch.manual_seed(1)
    given = arguments(entries=torch.randn(N, 4), rate=3, **HOW[how])
    cache = torch.full((R * N, 1, 4), torch.nan)
    pages = torch.arange(R * N).view(R, N).int()
    expected = index_entries_naive(
        **given, cache=cache, paged=cache, context_lens=torch.zeros(R, dtype=torch.int32), block_table=pages
    )  # fmt: skip
    assert torch.equal(call("index_entries", given), expected)


def test_of_equal_scores_the_first() -> None:
    given = arguments(k=torch.zeros(N, 4), window=0, chunk=0)
    found = call("index_topk", given)
    assert found[16].tolist() == [0, 1, 2]
    assert found[18].tolist() == [0, -1, -1]


def test_a_choice_has_no_gradient() -> None:
    given = arguments(k=torch.randn(N, 4, requires_grad=True), window=0, chunk=0)
    given["q"].requires_grad_()
    assert not call("index_topk", given).requires_grad


def test_fakes() -> None:
    keys = arguments(k=torch.randn(N, 4), window=0, chunk=0)
    pools = arguments(rows=torch.randn(N, 8), bias=torch.randn(3, 4))
    blocks = arguments(k=torch.randn(N, 4), size=3)
    entries = arguments(entries=torch.randn(N, 4), rate=3)
    each = {
        "index_topk": keys, "index_pool_topk": pools, "index_block_topk": blocks, "index_entries": entries,
    }  # fmt: skip
    for name, given in each.items():
        operator = STATELESS[f"regraft::{name}"].operator
        torch.library.opcheck(operator, tuple(given[a.name] for a in operator._schema.arguments))
