from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from regraft.kernels.decayed_linear import cpu, decayed_linear
from regraft.kernels.decayed_linear.naive import decayed_linear_naive
from regraft.kernels.recurrent import linear
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
"""Around the operator's own chunk and the models' block."""


class Open(torch.nn.Module):
    """A gate that lets everything through: sigmoid(inf) = 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_full((), torch.inf)


def lightning(heads: int, width: int, layer: int) -> MiniMaxLightningAttention:
    """A layer of the model whose projections, norm and gate are out of the way: [q, k, v] in, scan
    out.
    """
    config = MiniMaxConfig(
        hidden_size=heads * width,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=width,
        block_size=32,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 4,
    )
    module = MiniMaxLightningAttention(config, layer)
    module.act_fn = module.qkv_proj = module.norm = module.out_proj = torch.nn.Identity()
    module.output_gate = Open()
    return module


def linear_case(heads: int = 4, layer: int = 1, *, dtype: torch.dtype = torch.float32) -> Case:
    width = 6
    module = lightning(heads, width, layer)
    decay = -module.slope_rate.flatten()

    def make_rows(n: int) -> Rows:
        q, k, v = torch.randn(3, n, heads, width) * 0.4
        return q.to(dtype), k.to(dtype), v.to(dtype)

    def leaf(rows: Rows) -> torch.Tensor:
        mixed = torch.cat([x.float() for x in rows], dim=-1).flatten(1)[None]
        out = module(mixed, position_embeddings=None, attention_mask=None)[0]
        return out[0].unflatten(-1, (heads, width)).to(dtype)

    return Case(
        op=lambda rows, *sequences: decayed_linear(*rows, decay, *sequences),
        naive=lambda rows, *sequences: decayed_linear_naive(*rows, decay, *sequences),
        leaf=leaf,
        make_rows=make_rows,
        state_shape=(heads, width, width),
        lengths=LENGTHS,
    )


CASES = {
    "first-layer": partial(linear_case, layer=0),
    "last-layer": partial(linear_case, layer=3),
    "many-heads": partial(linear_case, 8, layer=1),
    "bfloat16": partial(linear_case, dtype=torch.bfloat16),
}


class TestDecayedLinear(RecurrentChecks):
    module = cpu

    @pytest.fixture(params=CASES.values(), ids=CASES.keys())
    def case(self, request: pytest.FixtureRequest) -> Case:
        return request.param()


def mutate_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def decay_after_update(q, k, v, decay, state):
        out, state = linear.step_linear(q, k, v, torch.ones_like(decay), state)
        return out, state * decay[..., None, None]

    monkeypatch.setattr(cpu, "step_linear", decay_after_update)


def mutate_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decay too many between a chunk's start and its first token."""

    def early(q, k, v, log_decay, state, steps):
        return linear.scan_linear(
            q, k, v, log_decay, state * log_decay[: len(state), 0].exp()[..., None, None], steps
        )

    monkeypatch.setattr(cpu, "scan_linear", early)


@pytest.mark.parametrize("mutate", [mutate_step, mutate_scan])
def test_mutants_turn_the_comparison_red(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check_equals_naive(CASES["first-layer"]())


def test_gradients_equal_those_of_the_recurrence() -> None:
    check_gradients(CASES["first-layer"](), reference)


def reference(
    rows: Rows, initial_state: torch.Tensor, offsets: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    decay = -torch.linspace(0.01, 1, 4)
    return cpu.decayed_linear_reference(*rows, decay, initial_state, offsets)


def test_schema_and_fake_agree_with_the_operator() -> None:
    packed = pack(CASES["bfloat16"](), [3, 1], [2, 0])
    decay = -torch.rand(4)
    check_operator(decayed_linear, *packed.rows, decay, packed.state, *metadata(packed))


def test_shapes_that_do_not_fit_are_refused() -> None:
    packed = pack(CASES["first-layer"](), [2], [0])
    q, k, v = packed.rows
    decay = -torch.rand(4)
    with pytest.raises(ValueError, match="do not fit"):
        decayed_linear(q, k[..., :2], v, decay, packed.state, *metadata(packed))
    with pytest.raises(ValueError, match="expected decay"):
        decayed_linear(q, k, v, decay[:1], packed.state, *metadata(packed))
    with pytest.raises(ValueError, match="expected a float32 state"):
        decayed_linear(q, k, v, decay, packed.state.half(), *metadata(packed))
