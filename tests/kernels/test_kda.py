from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn.functional import softplus
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

from regraft.kernels.kda import cpu, kda
from regraft.kernels.kda.naive import kda_naive
from regraft.kernels.recurrent import delta
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

LENGTHS = (15, 16, 17, 63, 64, 65)
"""Around the operator's own chunk and the models'."""


def kda_case(
    *, l2norm: bool = True, decay: float = 1.0, dtype: torch.dtype = torch.float32
) -> Case:
    """H = 3, K = 6, V = 5; `decay` scales the log decay."""
    scale = 6**-0.5

    def make_rows(n: int) -> Rows:
        q, k = (torch.randn(n, 3, 6) * (1.0 if l2norm else 0.3) for _ in range(2))
        g, beta = -decay * softplus(torch.randn(n, 3, 6)), torch.rand(n, 3)
        return q.to(dtype), k.to(dtype), torch.randn(n, 3, 5).to(dtype), g, beta.to(dtype)

    def leaf(rows: Rows) -> torch.Tensor:
        q, k, v, g, b = (x[None] for x in rows)
        out, _ = chunk_kimi_delta_attention(q, k, v, g, b, use_qk_l2norm_in_kernel=l2norm)
        return out[0]

    return Case(
        op=lambda rows, *sequences: kda(*rows, *sequences, scale, l2norm),
        naive=lambda rows, *sequences: kda_naive(*rows, *sequences, scale, l2norm),
        leaf=leaf,
        make_rows=make_rows,
        state_shape=(3, 6, 5),
        lengths=LENGTHS,
    )


CASES = {
    "l2norm": kda_case,
    "without-l2norm": partial(kda_case, l2norm=False),
    "slow-decay": partial(kda_case, decay=0.01),
    "bfloat16": partial(kda_case, dtype=torch.bfloat16),
}


class TestKda(RecurrentChecks):
    module = cpu

    @pytest.fixture(params=CASES.values(), ids=CASES.keys())
    def case(self, request: pytest.FixtureRequest) -> Case:
        return request.param()


def test_decays_that_underflow_are_exact_against_the_recurrence() -> None:
    check_equals_naive(kda_case(decay=20.0))


def mutate_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def decay_after_update(q, k, v, beta, decay, state):
        out, state = delta.step_delta(q, k, v, beta, torch.ones_like(decay), state)
        return out, state * decay.unsqueeze(-1)

    monkeypatch.setattr(cpu, "step_delta", decay_after_update)


def mutate_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decay shared by all channels."""

    def mean_decay(q, k, decay):
        return decayed_scores(q, k, decay.mean(-1, keepdim=True).expand_as(decay))

    decayed_scores = cpu.decayed_scores
    monkeypatch.setattr(cpu, "decayed_scores", mean_decay)


@pytest.mark.parametrize("mutate", [mutate_step, mutate_scan])
def test_mutants_turn_the_comparison_red(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check_equals_naive(CASES["l2norm"]())


def test_gradients_equal_those_of_the_recurrence() -> None:
    check_gradients(CASES["l2norm"](), reference)


def reference(
    rows: Rows, initial_state: torch.Tensor, offsets: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    return cpu.kda_reference(*rows, initial_state, offsets, 6**-0.5, qk_l2norm=True)


def test_schema_and_fake_agree_with_the_operator() -> None:
    packed = pack(CASES["bfloat16"](), [3, 1], [2, 0])
    check_operator(kda, *packed.rows, packed.state, *metadata(packed), 6**-0.5, True)


def test_shapes_that_do_not_fit_are_refused() -> None:
    packed = pack(CASES["l2norm"](), [2], [0])
    q, k, v, g, beta = packed.rows
    sequences = (*metadata(packed), 1.0, True)
    with pytest.raises(ValueError, match="do not fit"):
        kda(q, k[:, :1], v, g, beta, packed.state, *sequences)
    with pytest.raises(ValueError, match="expected g"):
        kda(q, k, v, g[..., 0], beta, packed.state, *sequences)
    with pytest.raises(ValueError, match="expected a float32 state"):
        kda(q, k, v, g, beta, packed.state[:, :, :1], *sequences)
