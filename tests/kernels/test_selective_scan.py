from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from regraft.kernels.selective_scan import cpu, selective_scan
from regraft.kernels.selective_scan.naive import selective_scan_naive
from tests.kernels.recurrent import (
    Case,
    RecurrentChecks,
    Rows,
    check_equals_naive,
    check_gradients,
    check_operator,
    metadata,
    pack,
)

LENGTHS = (31, 32, 33, 64, 65, 100)


def scan_case(
    *,
    skip: bool = True,
    gate: bool = True,
    bias: bool = True,
    softplus: bool = True,
    decay: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Seven channels, S = 6."""
    A = -decay * torch.rand(7, 6)
    D = torch.randn(7) if skip else None
    dt_bias = torch.randn(7) if bias else None

    def make_rows(n: int) -> Rows:
        x, dt, z = torch.randn(3, n, 7)
        B, C = torch.randn(2, n, 6) * 0.5
        dt = dt if softplus else dt.abs()
        return tuple(t.to(dtype) for t in (x, dt, B, C, *([z] if gate else [])))

    def call(op: Callable[..., torch.Tensor], rows: Rows, *sequences: torch.Tensor) -> torch.Tensor:
        x, dt, B, C, z = (*rows, None)[:5]
        return op(x, dt, A, B, C, D, z, dt_bias, softplus, *sequences)

    def leaf(rows: Rows) -> torch.Tensor:
        x, dt, B, C, *z = (x.mT[None] for x in rows)
        z = z[0] if z else None
        out = mamba_selective_scan(
            x, dt, A, B, C, D=D, z=z, delta_bias=dt_bias, delta_softplus=softplus
        )
        return out[0].mT

    return Case(
        op=lambda *arguments: call(selective_scan, *arguments),
        naive=lambda *arguments: call(selective_scan_naive, *arguments),
        leaf=leaf,
        make_rows=make_rows,
        state_shape=(7, 6),
        lengths=LENGTHS,
        precision=dtype,
    )


CASES = {
    "all": scan_case,
    "bare": partial(scan_case, skip=False, gate=False, bias=False, softplus=False),
    "without-gate": partial(scan_case, gate=False),
    "slow-decay": partial(scan_case, decay=0.01),
    "bfloat16": partial(scan_case, dtype=torch.bfloat16),
    "bfloat16-bare": partial(scan_case, skip=False, gate=False, dtype=torch.bfloat16),
}


class TestSelectiveScan(RecurrentChecks):
    module = cpu

    @pytest.fixture(params=CASES.values(), ids=CASES.keys())
    def case(self, request: pytest.FixtureRequest) -> Case:
        return request.param()


def test_decays_that_underflow_are_exact_against_the_recurrence() -> None:
    check_equals_naive(scan_case(decay=100.0))


def mutate_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decay after the update."""

    def late(A, u, dt, B, state):
        return (A * dt.unsqueeze(-1)).exp() * (state + u.unsqueeze(-1) * B.unsqueeze(-2))

    monkeypatch.setattr(cpu, "advance", late)


def mutate_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that start from where their sequence started."""
    carry = cpu._carry

    def stuck(A, places, dt, state, steps):
        _, final = carry(A, places, dt, state, steps)
        return torch.cat([state[:count] for _, count in steps]), final

    monkeypatch.setattr(cpu, "_carry", stuck)


@pytest.mark.parametrize("mutate", [mutate_advance, mutate_carry])
def test_mutants_turn_the_comparison_red(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check_equals_naive(CASES["all"]())


def test_gradients_equal_those_of_the_recurrence() -> None:
    check_gradients(CASES["without-gate"](), reference)


def reference(
    rows: Rows, initial_state: torch.Tensor, offsets: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    x, dt, B, C = rows
    A = -torch.linspace(0.1, 1, 42).view(7, 6)
    return cpu.selective_scan_reference(x, dt.abs(), A, B, C, initial_state, offsets)


def test_schema_and_fake_agree_with_the_operator() -> None:
    packed = pack(CASES["bfloat16"](), [3, 1], [2, 0])
    x, dt, B, C, z = packed.rows
    A, (D, dt_bias) = -torch.rand(7, 6), torch.randn(2, 7)
    arguments = (x, dt, A, B, C, D, z, dt_bias, True, packed.state, *metadata(packed))
    check_operator(selective_scan, *arguments)


def test_shapes_that_do_not_fit_are_refused() -> None:
    packed = pack(CASES["without-gate"](), [2], [0])
    x, dt, B, C = packed.rows
    A = -torch.rand(7, 6)
    rest = (None, None, True, packed.state, *metadata(packed))
    with pytest.raises(ValueError, match=r"expected dt \[N, 7\]"):
        selective_scan(x, dt[:, :1], A, B, C, None, *rest)
    with pytest.raises(ValueError, match="expected B and C"):
        selective_scan(x, dt, A, B[:, :5], C, None, *rest)
    with pytest.raises(ValueError, match="expected D"):
        selective_scan(x, dt, A, B, C, torch.randn(6), *rest)
    with pytest.raises(ValueError, match="expected a float32 state"):
        selective_scan(x, dt, A[:, :5], B[:, :5], C[:, :5], None, *rest)
