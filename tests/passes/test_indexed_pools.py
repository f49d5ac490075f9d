"""Pools of neighbouring keys selected by an indexer; what is no such selection is declined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regraft.kernels.indexed_attention import pools as pool_kernel
from regraft.passes import indexed_attention
from regraft.rewriter.capture import capture
from regraft.rewriter.pattern import Declined
from regraft.rewriter.pipeline import rewrite
from regraft.rewriter.token_axis import analyse, find_regions
from tests.passes.test_attention import check_served
from tests.passes.toy_attention import ToyLM, repeat_kv

SIZE, TOPK, INDEX_HEADS, INDEX_WIDTH, HIDDEN = 3, 2, 8, 6, 16
MIN = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Steps:
    """The steps of an indexer, each to be replaced by something else."""

    weigh: Callable[[Tensor, Tensor], Tensor] = lambda logits, keys: (
        logits.softmax(2).nan_to_num() * keys
    ).sum(2)
    """Gates and keys [1, pools, SIZE, E] -> keys of pools."""
    visible: Callable[[Tensor, Tensor], Tensor] = lambda at, q: at[..., -1] <= q
    """Token indices of pools [1, pools, SIZE] and queries [1, T, 1] -> [1, T, pools]."""
    hide: Callable[[Tensor, Tensor], Tensor] = lambda scores, seen: scores.masked_fill(~seen, MIN)
    rest: Callable[[Tensor], Tensor] = lambda count: count // SIZE * SIZE
    """The first token after the last whole pool."""
    gate: Callable[[Tensor, Tensor], Tensor] = lambda gates, bias: gates + bias
    join: Callable[[Tensor, Tensor], Tensor] = lambda pools, rest: torch.cat([pools, rest], -1)


def selected(k: Tensor, extra: nn.Module, steps: Steps) -> Tensor:
    """Indices [1, T, n] of the tokens of the best pools and of those after them; -1 for none."""
    hidden = k.transpose(1, 2).flatten(2)
    length = hidden.shape[1]
    query = F.linear(hidden, extra.index_q).unflatten(-1, (INDEX_HEADS, INDEX_WIDTH))
    weights = F.linear(hidden, extra.index_weights)
    at = torch.arange((length + SIZE - 1) // SIZE * SIZE).view(1, -1, SIZE)
    inside, safe = at < length, at.clamp(0, length - 1)
    batch = torch.arange(1)[:, None, None]
    keys = F.layer_norm(F.linear(hidden, extra.index_k), (INDEX_WIDTH,))[batch, safe]
    logits = steps.gate(F.linear(hidden, extra.index_gate)[batch, safe], extra.index_bias)
    logits = logits.masked_fill(~inside[..., None], -torch.inf)
    whole = inside.all(-1).any(0)
    key, at = steps.weigh(logits, keys)[:, whole], at.masked_fill(~inside, -1)[:, whole]
    products = F.relu(query @ key.transpose(-1, -2).unsqueeze(1) * 0.3)
    index = torch.arange(length)[None, :, None]
    seen = steps.visible(at[:, None], index)
    scores = steps.hide((weights.unsqueeze(-2) @ products).squeeze(-2), seen)
    best = scores.topk(min(TOPK, scores.shape[-1]), -1).indices
    tokens = at[batch, best].masked_fill(~seen.gather(-1, best)[..., None], -1).flatten(-2)
    count, offset = index + 1, torch.arange(SIZE - 1)
    rest = (steps.rest(count) + offset).masked_fill(offset >= count % SIZE, -1)
    return steps.join(tokens, rest)


def toy(steps: Steps) -> ToyLM:
    def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
        length, indices = q.shape[2], selected(k, extra, steps)
        valid = (indices >= 0) & (indices < length)
        counts = torch.zeros(1, length, length, dtype=torch.int32)
        counts = counts.scatter_add(-1, indices.clamp(0, length - 1), valid.to(torch.int32))
        mask = (counts != 0).unsqueeze(1)
        return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), mask, scale=0.3)

    torch.manual_seed(1)
    weights = {
        "index_q": torch.randn(INDEX_HEADS * INDEX_WIDTH, HIDDEN),
        "index_k": torch.randn(INDEX_WIDTH, HIDDEN),
        "index_gate": torch.randn(INDEX_WIDTH, HIDDEN),
        "index_bias": torch.randn(SIZE, INDEX_WIDTH),
        "index_weights": torch.randn(INDEX_HEADS, HIDDEN),
    }
    return ToyLM(attend, parameters=weights)


def test_selected_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Served from keys, values and index rows of keys and gates; a mutant of the selection is noticed."""
    model = toy(Steps())
    rewriting = rewrite(capture(model), (indexed_attention.PASS,), fallback="refuse")
    (served,) = rewriting.served
    assert served.operator == "regraft::indexed_attention"
    assert "the 2 best pools of 3 by index score" in served.mask
    assert sorted(spec.shape for spec in served.rows) == [(2, 8), (2, 8), (2 * INDEX_WIDTH,)]
    check_served(model, rewriting)
    right = pool_kernel.pooled
    monkeypatch.setattr(pool_kernel, "pooled", lambda held, bias: right(held, bias.flip(0)))
    with pytest.raises(AssertionError, match="max abs error"):
        check_served(model, rewriting)


STEPS = Steps()
NEAR_MISSES: dict[str, tuple[Steps, str]] = {
    "a plain mean": (
        replace(STEPS, weigh=lambda logits, keys: (logits.sigmoid() * keys).sum(2)),
        "the tokens of a pool are not weighed by a softmax",
    ),
    "the best token": (
        replace(STEPS, weigh=lambda logits, keys: keys.amax(2)),
        "the key of a pool is no sum",
    ),
    "gates without a bias": (
        replace(STEPS, gate=lambda gates, bias: gates * 2.0),
        "the gate of a pool's token is",
    ),
    "pools not whole yet": (
        replace(STEPS, visible=lambda at, q: at[..., 0] <= q),
        "not the tokens of whole pools",
    ),
    "pools that are hidden compete": (
        replace(STEPS, hide=lambda scores, seen: scores + 0.0),
        "pools are scored that are not whole",
    ),
    "the rest from one later": (
        replace(STEPS, rest=lambda count: count // SIZE * SIZE + 1),
        "not the tokens after the last whole pool",
    ),
    "pools alone": (
        replace(STEPS, join=lambda pools, rest: pools),
        "the selected keys are moved",
    ),
    "one more token": (
        replace(STEPS, join=lambda p, rest: torch.cat([p, rest, rest[..., :1] * 0], -1)),
        "the selected keys are 3 sets",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_declined_and_leave_the_graph_alone(name: str) -> None:
    steps, reason = NEAR_MISSES[name]
    captured = capture(toy(steps))
    before = str(captured.graph)
    outcomes = []
    for region in find_regions(analyse(captured.graph)):
        core = indexed_attention.PASS.pattern(region)
        outcomes.append(core if isinstance(core, Declined) else indexed_attention.PASS.check(core))
    assert all(isinstance(outcome, Declined) for outcome in outcomes)
    assert any(reason in outcome.reason for outcome in outcomes), outcomes
    assert str(captured.graph) == before
