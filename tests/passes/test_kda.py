from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

from regraft.passes.kda import PASS
from regraft.passes.leaf_rows import as_rows
from regraft.rewriter.declare import StateSpec
from tests.passes.recurrent import MixerLM, check_declined, check_grafted, check_mutant_is_caught

HEADS, K, V = 3, 6, 5
STATE = StateSpec(":state", (HEADS, K, V), torch.float32)


class KdaLM(MixerLM):
    def __init__(self) -> None:
        super().__init__(8)
        widths = (HEADS * K, HEADS * K, HEADS * V, HEADS * K, HEADS)
        self.projections = nn.ModuleList(nn.Linear(8, width) for width in widths)
        self.out = nn.Linear(HEADS * V, 8)

    def arguments(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v, g, beta = (project(x) for project in self.projections)
        q, k, g = (y.unflatten(-1, (HEADS, K)) for y in (q, k, -nn.functional.softplus(g)))
        return q, k, v.unflatten(-1, (HEADS, V)), g, beta.sigmoid()

    def mix(self, x: Tensor) -> Tensor:
        q, k, v, g, beta = self.arguments(x)
        out, _ = chunk_kimi_delta_attention(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        return self.out(out.flatten(2))


def test_grafts_the_rule_with_a_state_per_request() -> None:
    check_grafted(KdaLM(), PASS, [STATE])


class FromAState(KdaLM):
    def mix(self, x: Tensor) -> Tensor:
        q, k, v, g, beta = self.arguments(x)
        start = torch.ones(1, HEADS, K, V)
        out, _ = chunk_kimi_delta_attention(q, k, v, g, beta, initial_state=start)
        return self.out(out.flatten(2))


class OneDecayForAll(KdaLM):
    """A decay per head, broadcast by the function: not its documented layout."""

    def mix(self, x: Tensor) -> Tensor:
        q, k, v, g, beta = self.arguments(x)
        out, _ = chunk_kimi_delta_attention(q, k, v, g[..., :1], beta, use_qk_l2norm_in_kernel=True)
        return self.out(out.flatten(2))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (FromAState(), "starts from a given state"),
        (OneDecayForAll(), "expected g as [1, T, H, K]"),
    ],
)
def test_declines(model: KdaLM, reason: str) -> None:
    check_declined(model, PASS, reason)


def test_mutant_decays_a_little_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def smaller(call, name, layout, grafting):
        rows = as_rows(call, name, layout, grafting)
        if name != "g":
            return rows
        mul = torch.ops.aten.mul.Tensor
        return grafting.call(mul, rows, 0.999, shape=rows.meta["shape"], dtype=rows.meta["dtype"])

    where = "regraft.passes.kda.as_rows"
    check_mutant_is_caught(KdaLM(), PASS, [STATE], monkeypatch, where, smaller)
