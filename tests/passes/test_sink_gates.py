"""A sink spelled as a factor behind the softmax is grafted as a sink; a factor that is none is left as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from regraft.passes import attention
from regraft.rewriter.capture import capture
from regraft.rewriter.graph import is_aten
from regraft.rewriter.pipeline import rewrite
from tests.passes.test_attention import MIN, check_served, grafted
from tests.passes.toy_attention import Attend, ToyLM, causal, repeat_kv

SINKS = torch.tensor([-1.0, 0.5, 2.0, 0.0])


def attended(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Scores, and what a softmax without a sink gives."""
    scores = (q @ repeat_kv(k, 2).transpose(-1, -2) * 0.3).masked_fill(~causal(q.shape[2]), MIN)
    return scores, scores.softmax(-1) @ repeat_kv(v, 2)


def by_head(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    scores, out = attended(q, k, v)
    gate = (scores.logsumexp(-1) - extra.sinks.view(1, -1, 1)).sigmoid()
    return out * gate.unsqueeze(-1)


def keeping_dims(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    scores, out = attended(q, k, v)
    gate = scores.logsumexp(-1, keepdim=True) - 2 * extra.sinks[:, None, None]
    return gate.double().sigmoid().float() * out


def colder(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    """The total of other scores."""
    scores, out = attended(q, k, v)
    gate = ((scores * 0.5).logsumexp(-1) - extra.sinks.view(1, -1, 1)).sigmoid()
    return out * gate.unsqueeze(-1)


def weighed(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    """Twice the sink taken off, in a spelling that a factor hides in."""
    scores, out = attended(q, k, v)
    gate = torch.sub(scores.logsumexp(-1), extra.sinks.view(1, -1, 1), alpha=2).sigmoid()
    return out * gate.unsqueeze(-1)


def by_feature(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    """A factor for each feature of a row, not for the row."""
    scores, out = attended(q, k, v)
    gate = scores.logsumexp(-1, keepdim=True) - extra.sinks[None, :, None, None].repeat(1, 1, 1, 8)
    return out * gate.sigmoid()


def toy(attend: Attend) -> ToyLM:
    return ToyLM(attend, parameters={"sinks": SINKS})


@pytest.mark.parametrize("attend", [by_head, keeping_dims])
def test_a_gate_is_a_sink(attend: Attend) -> None:
    model = toy(attend)
    rewriting = grafted(model)
    (served,) = [s for s in rewriting.served if s.kind == "attention"]
    assert served.mask == "k <= q; sink[h]"
    assert not any(is_aten(node, "logsumexp", "softmax") for node in rewriting.graph.nodes)
    check_served(model, rewriting)


@pytest.mark.parametrize("attend", [colder, weighed, by_feature])
def test_another_factor_is_left_alone(attend: Attend) -> None:
    model = toy(attend)
    captured = capture(model)
    assert any(is_aten(node, "logsumexp") for node in captured.graph.nodes)
    assert not any(is_aten(node, "cat") for node in captured.graph.nodes)
    rewriting = rewrite(captured, (attention.PASS,))
    assert "replayed" in {served.served for served in rewriting.served}
    check_served(model, rewriting)
