"""Sequences that go through an operator in pieces, alone and beside others: the cases of its bits, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

PAGE = 4
LENGTH = 150
"""Of the sequence that is looked at: three tiles of keys."""


@dataclass(frozen=True)
class Case:
    """An operator: rows of `n` tokens, the shapes of its pools, and how it is called."""

    name: str
    rows: Callable[[int], tuple[Tensor, ...]]
    pools: Callable[[int, int], tuple[Tensor, ...]]
    """Of a number of pages, and of slots."""
    call: Callable[..., Tensor]
    """(operator, rows, pools, metadata)"""


def pages(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[int], Tensor]:
    return lambda num: torch.full((num, PAGE, *shape), torch.nan, dtype=dtype)


def attention_case(
    heads: int, kv_heads: int, width: int, v_width: int, dtype: torch.dtype = torch.float32,
    alibi: bool = False, sinks: bool = False, bias: int = 0, **masks: Any,
) -> Case:  # fmt: skip
    if alibi:
        masks["alibi_slopes"] = torch.rand(heads)
    if sinks:
        masks["sinks"] = torch.randn(heads)

    def rows(n: int) -> tuple[Tensor, ...]:
        q, k = torch.randn(n, heads, width), torch.randn(n, kv_heads, width)
        own = q, k, torch.randn(n, kv_heads, v_width)
        extra = (torch.randn(n, heads, bias),) if bias else ()
        return tuple(x.to(dtype) for x in own) + extra

    def call(op: Any, rows: Any, pools: Any, m: dict[str, Tensor]) -> Tensor:
        q, k, v, *extra = rows
        given = dict(masks, rel_bias=extra[0]) if extra else masks
        return op(
            q, k, v, *pools, m["cu_seqlens"], m["context_lens"], m["block_table"], m["slot_mapping"], width**-0.5,
            **given,
        )  # fmt: skip

    def pools(num_pages: int, _: int) -> tuple[Tensor, ...]:
        shapes = (kv_heads, width), (kv_heads, v_width)
        return tuple(pages(*shape, dtype=dtype)(num_pages) for shape in shapes)

    return Case("paged_attention", rows, pools, call)


def latent_case() -> Case:
    w_k, w_v = torch.randn(4, 8, 16), torch.randn(4, 12, 16)

    def call(op: Any, rows: Any, pools: Any, m: dict[str, Tensor]) -> Tensor:
        names = ("cu_seqlens", "context_lens", "block_table", "slot_mapping")
        return op(rows[0], rows[1], w_k, w_v, *pools, *(m[n] for n in names), 0, 8, 0.3)

    return Case(
        "latent_attention",
        lambda n: (torch.randn(n, 4, 12), torch.randn(n, 20)),
        lambda num_pages, _: (pages(20)(num_pages),),
        call,
    )


def recurrent_case(
    name: str,
    rows: Callable[[int], tuple[Tensor, ...]],
    state: Sequence[int],
    arguments: Callable[[tuple[Tensor, ...]], tuple[Any, ...]],
    behind: tuple[Any, ...] = (),
) -> Case:
    def call(op: Any, rows: Any, pools: Any, m: dict[str, Tensor]) -> Tensor:
        metadata = m["cu_seqlens"], m["context_lens"], m["state_slots"]
        return op(*arguments(rows), *pools, *metadata, *behind)

    return Case(
        name, rows, lambda _, num_slots: (torch.full((num_slots, *state), torch.nan),), call
    )


def delta_rows(n: int, heads: int, key_heads: int, wide_gate: bool) -> tuple[Tensor, ...]:
    q, k = torch.randn(2, n, key_heads, 16).unbind()
    gate = -torch.rand(n, heads, 16) if wide_gate else -torch.rand(n, heads)
    return q, k, torch.randn(n, heads, 12), gate, torch.rand(n, heads)


def cases() -> dict[str, Case]:
    torch.manual_seed(0)
    ssd = torch.rand(4).neg(), torch.randn(4), torch.randn(4)
    scan = -torch.rand(12, 5), torch.randn(12), torch.randn(12)
    weight, bias, decay = torch.randn(12, 4), torch.randn(12), -torch.rand(4)
    return {
        "attention": attention_case(6, 2, 16, 16),
        "attention bfloat16": attention_case(4, 4, 64, 32, torch.bfloat16),
        "window": attention_case(4, 2, 16, 16, window=33),
        "chunk": attention_case(4, 2, 16, 16, chunk=48, softcap=5.0),
        "sinks": attention_case(4, 2, 16, 16, sinks=True, window=70),
        "alibi": attention_case(4, 1, 20, 16, alibi=True),
        "heads of their own": attention_case(4, 4, 64, 32),
        "bias by distance": attention_case(4, 2, 16, 16, bias=40),
        "latent": latent_case(),
        "gated delta": recurrent_case(
            "gated_delta_rule", lambda n: delta_rows(n, 4, 2, False), (4, 16, 12), lambda r: r, (0.25, True)
        ),
        "kda": recurrent_case(
            "kda", lambda n: delta_rows(n, 4, 4, True), (4, 16, 12), lambda r: r, (0.25, True)
        ),
        "ssd": recurrent_case(
            "ssd",
            lambda n: (torch.randn(n, 4, 6), torch.randn(n, 4), *torch.randn(2, n, 2, 8).unbind()),
            (4, 6, 8),
            lambda r: (*r[:2], ssd[0], *r[2:], ssd[1], ssd[2], True, 0.0, 10.0),
        ),
        "selective scan": recurrent_case(
            "selective_scan",
            lambda n: (*torch.randn(3, n, 12).unbind(), *torch.randn(2, n, 5).unbind()),
            (12, 5),
            lambda r: (r[0], r[1], scan[0], r[3], r[4], scan[1], r[2], scan[2], True),
        ),
        "lightning": recurrent_case(
            "decayed_linear", lambda n: torch.randn(3, n, 4, 8).unbind(), (4, 8, 8), lambda r: (*r, decay)
        ),
        "convolution": recurrent_case(
            "causal_conv", lambda n: (torch.randn(n, 12),), (12, 3), lambda r: (*r, weight, bias, "silu", 1)
        ),
    }  # fmt: skip


def on(device: str, op: Any) -> Any:
    """`op`, given its tensors on a device."""

    def call(*args: Any, **kwargs: Any) -> Tensor:
        args, kwargs = tree_map(
            lambda x: x.to(device) if isinstance(x, Tensor) else x, (args, kwargs)
        )
        return op(*args, **kwargs)

    return call


def run(
    case: Case,
    op: Any,
    sequences: Sequence[tuple[Tensor, ...]],
    cuts: Sequence[Sequence[int]],
    device: str = "cpu",
) -> list[Tensor]:
    """Outputs of all sequences, each cut at its points; pieces with the same number share a packed row."""
    lengths = [len(rows[0]) for rows in sequences]
    counts = [-(-length // PAGE) for length in lengths]
    tables, first = [], 1
    for count in counts:
        tables.append(list(range(first, first + count)))
        first += count
    pools = tuple(pool.to(device) for pool in case.pools(first, len(sequences) + 1))
    pieces = [list(pairwise([0, *points, n])) for points, n in zip(cuts, lengths)]
    outputs: list[list[Tensor]] = [[] for _ in sequences]
    for step in range(max(map(len, pieces))):
        now = [(seq, *parts[step]) for seq, parts in enumerate(pieces) if step < len(parts)]
        rows = tuple(
            torch.cat([sequences[seq][i][start:end] for seq, start, end in now])
            for i in range(len(sequences[0]))
        )
        widest = max(len(tables[seq]) for seq, _, _ in now)
        metadata = {
            "cu_seqlens": torch.tensor([0, *(e - s for _, s, e in now)]).cumsum(0).int(),
            "context_lens": torch.tensor([s for _, s, _ in now], dtype=torch.int32),
            "block_table": torch.tensor([tables[q] + [0] * (widest - len(tables[q])) for q, _, _ in now]).int(),
            "slot_mapping": torch.tensor(
                [tables[q][p // PAGE] * PAGE + p % PAGE for q, s, e in now for p in range(s, e)]
            ),
            "state_slots": torch.tensor([seq + 1 for seq, _, _ in now]),
        }  # fmt: skip
        out = case.call(on(device, op), rows, pools, metadata).cpu()
        for (seq, _, _), part in zip(now, out.split([e - s for _, s, e in now])):
            outputs[seq].append(part)
    return [torch.cat(parts) for parts in outputs]


CUTS = ([], [64], [1, 2, 3], [63, 65, 130], list(range(1, LENGTH)), list(range(7, LENGTH, 7)))


CROWDS = ([], [5], [1, 70, 3, 1, 2], [1] * 40)
"""Lengths of other sequences."""


def differing(
    case: Case,
    op: Any,
    device: str = "cpu",
    length: int = LENGTH,
    all_cuts: Sequence[Sequence[int]] = CUTS,
    crowds: Sequence[Sequence[int]] = CROWDS,
) -> int:
    """Over all cuts, alone and beside others, the outputs that have other bits than those of the sequence in one."""
    needle = case.rows(length)
    (expected,) = run(case, op, [needle], [[]], device)
    count = 0
    for others in crowds:
        around = [case.rows(n) for n in others]
        place = len(others) // 2
        for cuts in all_cuts:
            every: list[Sequence[int]] = [[] for _ in others]
            every.insert(place, cuts)
            got = run(case, op, [*around[:place], needle, *around[place:]], every, device)[place]
            count += int((got != expected).sum())
    return count
