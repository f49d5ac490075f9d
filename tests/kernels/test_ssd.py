from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

from regraft.kernels.recurrent import linear
from regraft.kernels.ssd import cpu, ssd
from regraft.kernels.ssd.naive import ssd_naive
from tests.kernels.recurrent import (
    Case,
    RecurrentChecks,
    Rows,
    check_equals_leaf,
    check_equals_naive,
    check_gradients,
    check_operator,
    metadata,
    pack,
)

LENGTHS = (31, 32, 33, 63, 64, 65, 130)
"""Around the operator's own chunk and the one handed to the models' function."""

INFINITY = float("inf")


def ssd_case(
    heads: int = 4,
    groups: int = 2,
    *,
    dt_limit: tuple[float, float] = (0.0, INFINITY),
    skip: bool = True,
    bias: bool = True,
    softplus: bool = True,
    decay: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """P = 5, S = 6."""
    A = -decay * torch.rand(heads)
    D = torch.randn(heads) if skip else None
    dt_bias = torch.randn(heads) if bias else None

    def make_rows(n: int) -> Rows:
        x, dt = torch.randn(n, heads, 5), torch.randn(n, heads)
        B, C = torch.randn(2, n, groups, 6) * 0.5
        return x.to(dtype), (dt if softplus else dt.abs()).to(dtype), B.to(dtype), C.to(dtype)

    def call(op: Callable[..., torch.Tensor], rows: Rows, *sequences: torch.Tensor) -> torch.Tensor:
        x, dt, B, C = rows
        return op(x, dt, A, B, C, D, dt_bias, softplus, *dt_limit, *sequences)

    def leaf(rows: Rows) -> torch.Tensor:
        x, dt, B, C = (x[None] for x in rows)
        out = mamba2_chunk_scan(
            x, dt, A, B, C, 32, D=D, dt_bias=dt_bias, dt_softplus=softplus, dt_limit=dt_limit
        )
        return out[0]

    return Case(
        op=lambda *arguments: call(ssd, *arguments),
        naive=lambda *arguments: call(ssd_naive, *arguments),
        leaf=leaf,
        make_rows=make_rows,
        state_shape=(heads, 5, 6),
        lengths=LENGTHS,
    )


CASES = {
    "groups": ssd_case,
    "one-group": partial(ssd_case, 3, 1),
    "dt-limits": partial(ssd_case, dt_limit=(0.4, 0.9)),
    "bare": partial(ssd_case, skip=False, bias=False, softplus=False),
    "slow-decay": partial(ssd_case, decay=0.01),
    "bfloat16": partial(ssd_case, dtype=torch.bfloat16),
}


class TestSsd(RecurrentChecks):
    module = cpu

    @pytest.fixture(params=CASES.values(), ids=CASES.keys())
    def case(self, request: pytest.FixtureRequest) -> Case:
        return request.param()


def test_decays_that_underflow_are_exact_against_the_recurrence() -> None:
    check_equals_naive(ssd_case(decay=100.0))


def test_a_skip_per_channel() -> None:
    case = CASES["groups"]()
    packed = pack(case, [3, 1], [0, 2])
    x, dt, B, C = packed.rows
    A, D = -torch.rand(4), torch.randn(4, 5)
    state = packed.state.clone()
    middle = (None, True, 0.0, INFINITY)
    out = ssd(x, dt, A, B, C, D, *middle, packed.state, *metadata(packed))
    bare = ssd(x, dt, A, B, C, None, *middle, state, *metadata(packed))
    torch.testing.assert_close(out, bare + D * x, rtol=0, atol=1e-6)


def mutate_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    unclamped = cpu.discretised_dt
    monkeypatch.setattr(
        cpu, "discretised_dt", lambda dt, bias, soft, *_: unclamped(dt, bias, soft, 0.0, INFINITY)
    )


def mutate_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decay after the update: a token's own contribution is decayed too."""

    def late(q, k, v, log_decay, state, steps):
        out, state = linear.scan_linear(
            q, k, v * log_decay.exp().unsqueeze(-1), log_decay, state, steps
        )
        return out, state

    monkeypatch.setattr(cpu, "scan_linear", late)


def mutate_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads dealt out to groups in turn instead of in blocks."""

    def dealt(q, k, v, log_decay, state, steps):
        order = torch.arange(v.shape[2]).view(-1, q.shape[2]).mT.flatten()
        out, state = linear.scan_linear(
            q, k, v[:, :, order], log_decay[:, :, order], state[:, order], steps
        )
        back = order.argsort()
        return out[:, :, back], state[:, back]

    monkeypatch.setattr(cpu, "scan_linear", dealt)


@pytest.mark.parametrize("mutate", [mutate_limit, mutate_scan, mutate_groups])
def test_mutants_turn_the_comparison_red(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    for check in (check_equals_naive, check_equals_leaf):
        with pytest.raises(AssertionError):
            check(CASES["dt-limits"]())


def test_gradients_equal_those_of_the_recurrence() -> None:
    check_gradients(CASES["groups"](), reference)


def reference(
    rows: Rows, initial_state: torch.Tensor, offsets: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    x, dt, B, C = rows
    A, D = -torch.linspace(0.1, 1, 4), torch.linspace(-1, 1, 4)
    return cpu.ssd_reference(x, dt.abs(), A, B, C, D, initial_state, offsets)


def test_schema_and_fake_agree_with_the_operator() -> None:
    packed = pack(CASES["bfloat16"](), [3, 1], [2, 0])
    x, dt, B, C = packed.rows
    A, D, dt_bias = torch.randn(3, 4)
    middle = (D, dt_bias, True, 0.0, INFINITY, packed.state)
    check_operator(ssd, x, dt, -A.abs(), B, C, *middle, *metadata(packed))


def test_shapes_that_do_not_fit_are_refused() -> None:
    packed = pack(CASES["groups"](), [2], [0])
    x, dt, B, C = packed.rows
    A = -torch.rand(4)
    rest = (None, True, 0.0, INFINITY, packed.state, *metadata(packed))
    with pytest.raises(ValueError, match="expected dt"):
        ssd(x, dt[:, :1], A, B, C, None, *rest)
    with pytest.raises(ValueError, match="do not fit 4 heads"):
        ssd(x, dt, A, torch.randn(2, 3, 6), torch.randn(2, 3, 6), None, *rest)
    with pytest.raises(ValueError, match="expected D"):
        ssd(x, dt, A, B, C, torch.randn(5), *rest)
    with pytest.raises(ValueError, match="expected a float32 state"):
        ssd(x, dt, A, B, C, None, *rest[:4], packed.state.mT, *metadata(packed))
