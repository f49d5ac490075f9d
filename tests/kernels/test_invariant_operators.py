"""The invariant form of every operator that mixes tokens: a sequence's outputs are the same bits however it is cut.

The plain operators are the mutants: each must be found to depend on the cut or on the batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regraft.kernels.invariant import attention, products, schema, tiles, tokens
from tests.kernels import paged
from tests.kernels.invariant_cases import LENGTH, cases, differing, on, run
from tests.tolerance import assert_close

CASES = cases()
every_case = pytest.mark.parametrize("name", CASES)
every_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


@every_device
@every_case
def test_a_sequence_has_one_result(name: str, device: str) -> None:
    """Every cut of it, alone and beside others."""
    case = CASES[name]
    assert differing(case, getattr(torch.ops.regraft, f"invariant_{case.name}"), device) == 0


@every_device
@every_case
def test_it_is_the_operator(name: str, device: str) -> None:
    case = CASES[name]
    sequences = [case.rows(n) for n in (70, 1, 33, 2)]
    cuts = [[3, 40], [], list(range(1, 33)), []]
    results = [
        run(case, getattr(torch.ops.regraft, op), sequences, cuts, device)
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


def expert_rows_differ(device: str = "cpu") -> bool:
    """A row through its expert, with neighbours that go to the same one or to others."""
    row = torch.randn(1, 16)
    expert_linear = on(device, torch.ops.regraft.invariant_expert_linear)
    for transposed in (False, True):
        weight = EXPERTS.mT.contiguous() if transposed else EXPERTS
        expected = expert_linear(row, weight, torch.tensor([3]), transposed)[0].cpu()
        assert_close(expected, EXPERTS[3] @ row[0], scale=4)
        for size in (1, 2, 17, 40, 100):
            for place in (0, size // 2, size - 1):
                ids = torch.randint(0, 5, (size,))
                rows = torch.randn(size, 16)
                rows[place], ids[place] = row, 3
                got = expert_linear(rows, weight, ids, transposed).cpu()
                if not torch.equal(got[place], expected):
                    return True
    return False  # fmt: skip


@every_device
def test_a_row_of_an_expert_has_one_result(device: str) -> None:
    assert not expert_rows_differ(device)


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
