"""The invariant form of every operator that mixes tokens: a sequence's outputs are the same bits however it is cut.

The plain operators are the mutants: each must be found to depend on the cut or on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from regraft.kernels.invariant import attention, products, schema, tiles, tokens
from tests.kernels import paged
from tests.tolerance import assert_close

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


CASES = cases()
every_case = pytest.mark.parametrize("name", CASES)


def run(
    case: Case, op: Any, sequences: Sequence[tuple[Tensor, ...]], cuts: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Outputs of all sequences, each cut at its points; pieces with the same number share a packed row."""
    lengths = [len(rows[0]) for rows in sequences]
    counts = [-(-length // PAGE) for length in lengths]
    tables, first = [], 1
    for count in counts:
        tables.append(list(range(first, first + count)))
        first += count
    pools = case.pools(first, len(sequences) + 1)
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
        out = case.call(op, rows, pools, metadata)
        for (seq, _, _), part in zip(now, out.split([e - s for _, s, e in now])):
            outputs[seq].append(part)
    return [torch.cat(parts) for parts in outputs]


CUTS = ([], [64], [1, 2, 3], [63, 65, 130], list(range(1, LENGTH)), list(range(7, LENGTH, 7)))


def differing(case: Case, op: Any) -> int:
    """Over all cuts, alone and beside others, the outputs that have other bits than those of the sequence in one."""
    needle = case.rows(LENGTH)
    (expected,) = run(case, op, [needle], [[]])
    count = 0
    for others in ([], [5], [1, 70, 3, 1, 2], [1] * 40):
        around = [case.rows(n) for n in others]
        place = len(others) // 2
        for cuts in CUTS:
            every: list[Sequence[int]] = [[] for _ in others]
            every.insert(place, cuts)
            got = run(case, op, [*around[:place], needle, *around[place:]], every)[place]
            count += int((got != expected).sum())
    return count


@every_case
def test_a_sequence_has_one_result(name: str) -> None:
    """Every cut of it, alone and beside others."""
    case = CASES[name]
    assert differing(case, getattr(torch.ops.regraft, f"invariant_{case.name}")) == 0


@every_case
def test_it_is_the_operator(name: str) -> None:
    case = CASES[name]
    sequences = [case.rows(n) for n in (70, 1, 33, 2)]
    cuts = [[3, 40], [], list(range(1, 33)), []]
    results = [
        run(case, getattr(torch.ops.regraft, op), sequences, cuts)
        for op in (f"invariant_{case.name}", case.name)
    ]
    for got, expected in zip(*results):
        assert got.dtype == expected.dtype and got.is_contiguous()
        assert_close(got, expected, scale=4)  # other orders of the same sums


# The plain convolution happens to have one order.
@pytest.mark.parametrize("name", [name for name in CASES if name != "convolution"])
def test_the_plain_operator_is_found_out(name: str) -> None:
    """A mutant of each: tiles by the number of queries, chunks from where a step begins, a form chosen by length."""
    case = CASES[name]
    assert differing(case, getattr(torch.ops.regraft, case.name)) > 0


def test_key_tiles_that_begin_with_the_step_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: the history is divided by how much of it is new."""
    plain = tiles.QueryTiles.keys

    def from_the_step(self: tiles.QueryTiles, step: int, page_size: int) -> Any:
        position, slots, is_own = plain(self, step, page_size)
        order = torch.arange(tiles.KEYS).roll(int(self.rows[0, 0]) + 1)
        return position[:, order], slots[:, order], is_own[:, order]

    monkeypatch.setattr(tiles.QueryTiles, "keys", from_the_step)
    assert differing(CASES["attention"], torch.ops.regraft.invariant_paged_attention) > 0


def test_convolution_taps_that_are_fused_in_a_decode_step_are_found_out() -> None:
    def fused(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        out = tokens.causal_conv(x, weight, *rest)
        return out if len(x) > 1 else torch.nextafter(out, out + 1)

    assert differing(CASES["convolution"], fused) > 0


EXPERTS = torch.randn(5, 24, 16, generator=torch.Generator().manual_seed(0))


def expert_rows_differ() -> bool:
    """A row through its expert, with neighbours that go to the same one or to others."""
    row = torch.randn(1, 16)
    for transposed in (False, True):
        weight = EXPERTS.mT.contiguous() if transposed else EXPERTS
        (expected,) = torch.ops.regraft.invariant_expert_linear(
            row, weight, torch.tensor([3]), transposed
        )
        assert_close(expected, EXPERTS[3] @ row[0], scale=4)
        for size in (1, 2, 17, 40, 100):
            for place in (0, size // 2, size - 1):
                ids = torch.randint(0, 5, (size,))
                rows = torch.randn(size, 16)
                rows[place], ids[place] = row, 3
                got = torch.ops.regraft.invariant_expert_linear(rows, weight, ids, transposed)
                if not torch.equal(got[place], expected):
                    return True
    return False  # fmt: skip


def test_a_row_of_an_expert_has_one_result() -> None:
    assert not expert_rows_differ()


def test_experts_divided_by_their_rows_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: an expert with many rows sums in halves."""

    def by_rows(x: Tensor, weight: Tensor) -> Tensor:
        half = weight.shape[1] // 2 if len(x) > 2 else weight.shape[1]
        return x[:, :half] @ weight[:, :half].t() + x[:, half:] @ weight[:, half:].t()

    monkeypatch.setattr(products, "tiled_product", by_rows)
    assert expert_rows_differ()


def test_every_grafted_operator_has_a_case() -> None:
    assert {case.name for case in CASES.values()} | {"expert_linear"} == set(schema.GRAFTED)
    assert attention.KEYS == 64 and LENGTH > 2 * attention.KEYS


@pytest.mark.parametrize(
    "mask", [{"window": 3}, {"window": 70}, {"chunk": 5}, {"chunk": 66}], ids=str
)
def test_pages_out_of_reach_are_not_read(mask: dict[str, int]) -> None:
    """They are another's by then, or full of NaN."""
    torch.manual_seed(0)
    paged.check(paged.Case((1, 7, 2, 5), (150, 90, 3, 0), **mask), attention.paged_attention)
