from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from regraft.passes.delta_rule import PASS
from regraft.passes.leaf_rows import as_rows
from regraft.rewriter.declare import StateSpec
from tests.passes.recurrent import MixerLM, check_declined, check_grafted, check_mutant_is_caught

KEY_HEADS, HEADS, K, V = 2, 4, 6, 5
STATE = StateSpec(":state", (HEADS, K, V), torch.float32)


class DeltaLM(MixerLM):
    """Every argument projected from the row; `beta` up to 2 gives negative eigenvalues."""

    def __init__(self, key_heads: int = KEY_HEADS, *, l2norm: bool = True) -> None:
        super().__init__(8)
        self.key_heads, self.l2norm = key_heads, l2norm
        widths = (key_heads * K, key_heads * K, HEADS * V, HEADS, HEADS)
        self.projections = nn.ModuleList(nn.Linear(8, width) for width in widths)
        self.out = nn.Linear(HEADS * V, 8)

    def arguments(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v, g, beta = (project(x) for project in self.projections)
        q, k = (0.3 * y.unflatten(-1, (self.key_heads, K)) for y in (q, k))
        g, beta = -nn.functional.softplus(g), 2 * beta.sigmoid()
        return q, k, v.unflatten(-1, (HEADS, V)), g, beta

    def mix(self, x: Tensor) -> Tensor:
        q, k, v, g, beta = self.arguments(x)
        out, _ = torch_chunk_gated_delta_rule(
            q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=self.l2norm
        )
        return self.out(out.flatten(2))


@pytest.mark.parametrize("key_heads", [KEY_HEADS, HEADS])
@pytest.mark.parametrize("l2norm", [True, False])
def test_grafts_the_rule_with_a_state_per_request(key_heads: int, l2norm: bool) -> None:
    check_grafted(DeltaLM(key_heads, l2norm=l2norm), PASS, [STATE])


class FromAState(DeltaLM):
    def mix(self, x: Tensor) -> Tensor:
        q, k, v, g, beta = self.arguments(x)
        start = torch.ones(1, HEADS, K, V)
        out, _ = torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, initial_state=start)
        return self.out(out.flatten(2))


class TokensFolded(DeltaLM):
    """Heads taken for the tokens' batch: another layout of the same sizes."""

    def mix(self, x: Tensor) -> Tensor:
        q, k, v, g, beta = self.arguments(x)
        q, k, v = (y.transpose(0, 2) for y in (q, k, v))
        out, _ = torch_chunk_gated_delta_rule(
            q, k, v, g=g.transpose(0, 2)[:, :, :1], beta=beta.transpose(0, 2)[:, :, :1]
        )
        return self.out(out.transpose(0, 2).flatten(2))


class Turned(DeltaLM):
    """Keys turned round and back: the analysis does not see that they are rows again."""

    def mix(self, x: Tensor) -> Tensor:
        q, k, v, g, beta = self.arguments(x)
        out, _ = torch_chunk_gated_delta_rule(q, k.flip(1).flip(1), v, g=g, beta=beta)
        return self.out(out.flatten(2))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (FromAState(), "starts from a given state"),
        (TokensFolded(HEADS), "expected query as [1, T, Hk, K]"),
        (Turned(), "key is not one row per token"),
    ],
)
def test_declines(model: DeltaLM, reason: str) -> None:
    check_declined(model, PASS, reason)


def test_mutant_queries_a_little_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    def larger(call, name, layout, grafting):
        rows = as_rows(call, name, layout, grafting)
        if name != "query":
            return rows
        mul = torch.ops.aten.mul.Tensor
        return grafting.call(mul, rows, 1.001, shape=rows.meta["shape"], dtype=rows.meta["dtype"])

    where = "regraft.passes.delta_rule.as_rows"
    check_mutant_is_caught(DeltaLM(l2norm=False), PASS, [STATE], monkeypatch, where, larger)
