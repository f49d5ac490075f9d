from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.functional import softplus
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import torch_chunk_gated_delta_rule

from regraft.kernels.delta_rule import cpu, gated_delta_rule
from regraft.kernels.delta_rule.naive import gated_delta_rule_naive
from regraft.kernels.recurrent import delta, linear
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

LENGTHS = (31, 32, 33, 63, 64, 65, 130)
"""Around the operator's own chunk and the models'."""


def delta_case(
    key_heads: int = 2,
    heads: int = 4,
    *,
    l2norm: bool = True,
    beta: float = 1.0,
    decay: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """K = 6, V = 5; `beta` is its upper bound, `decay` scales the log decay."""
    scale = 6**-0.5

    def make_rows(n: int) -> Rows:
        q, k = (torch.randn(n, key_heads, 6) * (1.0 if l2norm else 0.3) for _ in range(2))
        g = -decay * softplus(torch.randn(n, heads))
        rates = beta * torch.rand(n, heads)
        return q.to(dtype), k.to(dtype), torch.randn(n, heads, 5).to(dtype), g, rates.to(dtype)

    def leaf(rows: Rows) -> torch.Tensor:
        q, k, v, g, b = (x[None] for x in rows)
        return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=b, use_qk_l2norm_in_kernel=l2norm)[
            0
        ][0]

    return Case(
        op=lambda rows, *sequences: gated_delta_rule(*rows, *sequences, scale, l2norm),
        naive=lambda rows, *sequences: gated_delta_rule_naive(*rows, *sequences, scale, l2norm),
        leaf=leaf,
        make_rows=make_rows,
        state_shape=(heads, 6, 5),
        lengths=LENGTHS,
    )


CASES = {
    "grouped-heads": delta_case,
    "equal-heads": partial(delta_case, 3, 3),
    "without-l2norm": partial(delta_case, 1, 2, l2norm=False),
    "negative-eigenvalues": partial(delta_case, beta=2.0),
    "slow-decay": partial(delta_case, decay=0.01),
    "bfloat16": partial(delta_case, dtype=torch.bfloat16),
}


class TestGatedDeltaRule(RecurrentChecks):
    module = cpu

    @pytest.fixture(params=CASES.values(), ids=CASES.keys())
    def case(self, request: pytest.FixtureRequest) -> Case:
        return request.param()


def test_decays_that_underflow_are_exact_against_the_recurrence() -> None:
    check_equals_naive(delta_case(decay=20.0))


def mutate_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def decay_after_update(q, k, v, beta, decay, state):
        out, state = delta.step_delta(q, k, v, beta, torch.ones_like(decay), state)
        return out, state * decay.unsqueeze(-1)

    monkeypatch.setattr(cpu, "step_delta", decay_after_update)


def mutate_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    def undecayed_scores(log_decay):
        total, pairs = linear.chunk_decays(log_decay)
        return total, torch.ones_like(pairs).tril()

    monkeypatch.setattr(cpu, "chunk_decays", undecayed_scores)


def mutate_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that does not see its own update."""

    def strictly_earlier(chunks, state, steps):
        scores = chunks.query_scores.tril(-1)
        return delta.scan_delta(replace(chunks, query_scores=scores), state, steps)

    monkeypatch.setattr(cpu, "scan_delta", strictly_earlier)


@pytest.mark.parametrize("mutate", [mutate_step, mutate_scan, mutate_diagonal])
def test_mutants_turn_the_comparison_red(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check_equals_naive(CASES["grouped-heads"]())


def test_gradients_equal_those_of_the_recurrence() -> None:
    check_gradients(CASES["grouped-heads"](), reference)


def reference(
    rows: Rows, initial_state: torch.Tensor, offsets: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    return cpu.gated_delta_rule_reference(*rows, initial_state, offsets, 6**-0.5, qk_l2norm=True)


def test_schema_and_fake_agree_with_the_operator() -> None:
    packed = pack(CASES["bfloat16"](), [3, 1], [2, 0])
    check_operator(gated_delta_rule, *packed.rows, packed.state, *metadata(packed), 6**-0.5, True)


def test_shapes_that_do_not_fit_are_refused() -> None:
    packed = pack(CASES["grouped-heads"](), [2], [0])
    q, k, v, g, beta = packed.rows
    sequences = (*metadata(packed), 1.0, True)
    with pytest.raises(ValueError, match="do not fit"):
        gated_delta_rule(q, k[:, :1], v, g, beta, packed.state, *sequences)
    with pytest.raises(ValueError, match="expected g and beta"):
        gated_delta_rule(q, k, v, g[:, :1], beta, packed.state, *sequences)
    with pytest.raises(ValueError, match="expected a float32 state"):
        gated_delta_rule(q, k, v, g, beta, packed.state.double(), *sequences)
