"""Packed rows over paged caches in which everything that nobody may read is NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regraft.kernels.paged_attention.naive import paged_attention_naive
from tests.tolerance import assert_close

Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """A ragged batch and the operator's arguments. `news` are new tokens, `contexts` those cached before."""

    news: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: int = 6
    kv_heads: int = 2
    width: int = 8
    v_width: int = 8
    page_size: int = 4
    padding: int = 0
    """Rows after the last sequence."""
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    reach: int = 0
    """Width W of rel_bias."""
    scale: float = 0.4
    consecutive: bool = False
    dtype: torch.dtype = torch.float32
    shared: bool = False
    """Whether a value is the first part of its key, in this step's rows and in the cache."""

    @property
    def scoring(self) -> dict[str, Any]:
        return {"window": self.window, "chunk": self.chunk, "softcap": self.softcap}


def make(case: Case, device: str = "cpu") -> dict[str, Any]:
    """The operator's arguments by name."""
    pages = _pages(case)
    tokens = sum(case.news) + case.padding
    num_pages = 3 + sum(len(own) for own in pages)
    k_cache, v_cache = (
        torch.full((num_pages, case.page_size, case.kv_heads, width), torch.nan, dtype=case.dtype)
        for width in (case.width, case.v_width)
    )
    block_table = torch.zeros(len(pages), 1 + max(map(len, pages), default=0), dtype=torch.int32)
    slots: list[int] = []
    for seq, (own, new, context) in enumerate(zip(pages, case.news, case.contexts)):
        first = first_seen(case, context)
        for pos in range(first, context):
            k_cache[own[pos // case.page_size], pos % case.page_size] = torch.randn(
                case.kv_heads, case.width
            )
            v_cache[own[pos // case.page_size], pos % case.page_size] = torch.randn(
                case.kv_heads, case.v_width
            )
        # Pages that no query sees any more have been given back.
        kept = [page if i >= first // case.page_size else 0 for i, page in enumerate(own)]
        block_table[seq, : len(own)] = torch.tensor(kept, dtype=torch.int32)
        slots += [
            own[pos // case.page_size] * case.page_size + pos % case.page_size
            for pos in range(context, context + new)
        ]
    slots += [i % case.page_size for i in range(case.padding)]
    widths = [case.heads * case.width, case.kv_heads * case.width, case.kv_heads * case.v_width]
    # Views into one projection's output, as merged weights make them.
    q, k, v = torch.randn(tokens, sum(widths)).to(case.dtype).split(widths, -1)
    arguments = {
        "q": q.view(tokens, case.heads, case.width),
        "k": k.view(tokens, case.kv_heads, case.width),
        "v": v.view(tokens, case.kv_heads, case.v_width),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "cu_seqlens": torch.tensor([0, *case.news]).cumsum(0).int(),
        "context_lens": torch.tensor(case.contexts, dtype=torch.int32),
        "block_table": block_table,
        "slot_mapping": torch.tensor(slots, dtype=torch.int64),
        "scale": case.scale,
        **case.scoring,
        "sinks": _column(torch.randn(case.heads)) if case.sinks else None,
        "alibi_slopes": _column(torch.rand(case.heads)) if case.alibi else None,
        "rel_bias": torch.randn(tokens, case.heads, case.reach).to(case.dtype)
        if case.reach
        else None,
    }
    arguments = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in arguments.items()}
    if case.shared:
        arguments["v"] = arguments["k"][..., : case.v_width]
        arguments["v_cache"] = arguments["k_cache"][..., : case.v_width]
    return arguments


def _column(x: Tensor) -> Tensor:
    """The same numbers as a column of a table that is NaN elsewhere, as a model may hold one for all its layers."""
    table = torch.full((len(x), 3), torch.nan)
    table[:, 1] = x
    return table[:, 1]


def first_seen(case: Case, pos: int) -> int:
    """The first position that a query at `pos` sees."""
    by_window = pos - case.window + 1 if case.window else 0
    by_chunk = pos - pos % case.chunk if case.chunk else 0
    return max(0, by_window, by_chunk)


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with caches of their own."""
    k_cache, v_cache = arguments["k_cache"].clone(), arguments["v_cache"]
    is_shared = v_cache.data_ptr() == arguments["k_cache"].data_ptr()
    v_cache = k_cache[..., : v_cache.shape[3]] if is_shared else v_cache.clone()
    return arguments | {"k_cache": k_cache, "v_cache": v_cache}


def check(case: Case, attention: Attention, device: str = "cpu", **changes: Any) -> None:
    """`attention` against the naive form, in output and in what it leaves in the pages.

    `changes` replace arguments of `attention` alone: a mutant, which the check must notice.
    """
    arguments = make(case, device)
    theirs = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in copied(arguments).items()}
    expected = paged_attention_naive(**theirs)
    mine = copied(arguments) | {
        n: x(arguments[n]) if callable(x) else x for n, x in changes.items()
    }
    with poisoned_memory():
        out = attention(**mine)
    assert out.dtype == case.dtype
    assert out.is_contiguous()
    assert_close(out, expected, name="output")
    for name in ("k_cache", "v_cache"):  # bit by bit, but for the scratch page
        actual, wanted = mine[name][1:].cpu(), theirs[name][1:]
        same = (actual == wanted) | (actual.isnan() & wanted.isnan())
        assert same.all(), f"{name}: {int((~same).sum())} elements differ"


class poisoned_memory:
    """While it lasts, `torch.empty` gives NaN: an output that nobody wrote shows."""

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


def _pages(case: Case) -> list[list[int]]:
    counts = [-(-(n + c) // case.page_size) for n, c in zip(case.news, case.contexts)]
    order = torch.arange(sum(counts)) if case.consecutive else torch.randperm(sum(counts))
    return [own.tolist() for own in (order + 1).split(counts)]
