"""Keys selected by an indexer, in many spellings; what is no such selection is declined, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regraft.kernels.indexed_attention import select
from regraft.passes import attention, indexed_attention, positions
from regraft.rewriter.capture import capture
from regraft.rewriter.pattern import Declined
from regraft.rewriter.pipeline import Rewriting, rewrite
from regraft.rewriter.token_axis import analyse, find_regions
from tests.passes.test_attention import check_served
from tests.passes.toy_attention import Attend, ToyLM, causal, repeat_kv

TOPK, INDEX_HEADS, INDEX_WIDTH, HIDDEN = 4, 8, 6, 16
MIN = torch.finfo(torch.float32).min
PASSES = (indexed_attention.PASS, attention.PASS, positions.PASS)


@dataclass(frozen=True)
class Rows:
    """What an indexer is made of: queries [1, T, I, E], keys [1, T, E] and weights [1, T, I]."""

    query: Tensor
    key: Tensor
    weights: Tensor


def index_rows(k: Tensor, extra: nn.Module) -> Rows:
    hidden = k.transpose(1, 2).flatten(2)
    query = F.linear(hidden, extra.index_q).unflatten(-1, (INDEX_HEADS, INDEX_WIDTH))
    key = F.layer_norm(F.linear(hidden, extra.index_k), (INDEX_WIDTH,))
    return Rows(query, key, F.linear(hidden, extra.index_weights))


def toy(attend: Attend) -> ToyLM:
    torch.manual_seed(1)
    weights = {
        "index_q": torch.randn(INDEX_HEADS * INDEX_WIDTH, HIDDEN),
        "index_k": torch.randn(INDEX_WIDTH, HIDDEN),
        "index_weights": torch.randn(INDEX_HEADS, HIDDEN),
    }
    return ToyLM(attend, parameters=weights)


def weighed(rows: Rows) -> Tensor:
    """Index scores [1, T, T]."""
    products = rows.query @ rows.key.transpose(-1, -2).unsqueeze(1) * 0.3
    return ((rows.weights * 0.5).unsqueeze(-2) @ F.relu(products)).squeeze(-2)


def summed_by_einsum(rows: Rows) -> Tensor:
    products = F.relu(torch.einsum("bqie,bke->bqik", rows.query, rows.key)) * 0.15
    return torch.einsum("bqi,bqik->bqk", rows.weights, products)


def heads_first(rows: Rows) -> Tensor:
    """[1, T, I] x [1, I, T, T] with the heads in front, and a clamp in place of relu."""
    products = rows.query.transpose(1, 2) @ rows.key[:, None].transpose(-1, -2)
    products = products.clamp(min=0).permute(0, 2, 3, 1)
    return (products @ rows.weights.unsqueeze(-1)).squeeze(-1) * 0.15


def without_relu(rows: Rows) -> Tensor:
    products = rows.query @ rows.key.transpose(-1, -2).unsqueeze(1)
    return (rows.weights.unsqueeze(-2) @ products).squeeze(-2) * 0.1


def best(scores: Tensor) -> Tensor:
    """Indices of the best keys in sight, [1, T, at most TOPK]."""
    scores = scores.masked_fill(~causal(scores.shape[-1]), -torch.inf)
    return scores.topk(min(TOPK, scores.shape[-1]), -1).indices


def boolean(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
    """A mask of what is left out, for fused attention."""
    length = q.shape[2]
    left_out = torch.ones(1, length, length, dtype=torch.bool).scatter(-1, indices, False)
    mask = causal(length) & ~left_out.unsqueeze(1)
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), mask, scale=0.3)


def spelled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q @ repeat_kv(k, 2).transpose(-1, -2) * 0.3 + bias
    return scores.softmax(-1) @ repeat_kv(v, 2)


def additive(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
    """Minus infinity but for the selected keys, added to the scores under a causal mask."""
    length = q.shape[2]
    bias = torch.full((1, 1, length, length), -torch.inf).scatter(-1, indices[:, None], 0.0)
    return spelled(q, k, v, bias + torch.where(causal(length), 0.0, MIN))


def cast_indices(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
    return boolean(q, k, v, indices.to(torch.int32).long())


Scores = Callable[[Rows], Tensor]
Attending = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def indexed(
    scores: Scores, attending: Attending, select: Callable[[Tensor], Tensor] = best
) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
        return attending(q, k, v, select(scores(index_rows(k, extra))))

    return attend


def grafted(model: nn.Module) -> Rewriting:
    return rewrite(capture(model), PASSES, fallback="refuse")


@pytest.mark.parametrize("attending", [boolean, additive, cast_indices])
@pytest.mark.parametrize("scores", [weighed, summed_by_einsum, heads_first, without_relu])
def test_selected_keys(scores: Scores, attending: Attending) -> None:
    model = toy(indexed(scores, attending))
    rewriting = grafted(model)
    (served,) = rewriting.served
    assert served.operator == "regraft::indexed_attention"
    assert served.mask == "k <= q; the 4 best by index score"
    assert sorted(spec.shape for spec in served.rows) == [(2, 8), (2, 8), (INDEX_WIDTH,)]
    check_served(model, rewriting)


def in_window(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
    """Of the selected keys those that are near, by numbers in place of truth values."""
    length = q.shape[2]
    index = torch.arange(length)
    seen = causal(length) & (index[:, None] - index < 6)
    chosen = torch.zeros(1, length, length).scatter(-1, indices, 1.0) != 0
    return spelled(q, k, v, torch.where(seen & chosen, 0.0, MIN))


def near_only(scores: Tensor) -> Tensor:
    index = torch.arange(scores.shape[-1])
    near = causal(scores.shape[-1]) & (index[:, None] - index < 6)
    return scores.masked_fill(~near, -torch.inf).topk(min(TOPK, scores.shape[-1]), -1).indices


def test_selected_in_a_window() -> None:
    model = toy(indexed(weighed, in_window, near_only))
    rewriting = grafted(model)
    assert rewriting.served[0].mask == "k <= q & q - k < 6; the 4 best by index score"
    check_served(model, rewriting)


def test_two_layers_share_a_selection() -> None:
    """One index row and one selection for both; the second attends to the same positions."""

    def twice(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
        indices = best(weighed(index_rows(k, extra)))
        first = boolean(q, k, v, indices)
        return boolean(torch.tanh(first), k, v * 2, indices)

    model = toy(twice)
    rewriting = grafted(model)
    one, two = rewriting.served
    assert {spec.shape for spec in one.rows} == {(2, 8), (INDEX_WIDTH,)}
    assert {spec.shape for spec in two.rows} == {(2, 8)}
    assert any(note.startswith("selection shared") for note in two.notes)
    calls = [n for n in rewriting.graph.nodes if n.target is torch.ops.regraft.index_topk.default]
    assert len(calls) == 1
    check_served(model, rewriting)


def test_a_mutant_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A selection that is off by one key does not go unseen by the checks of this file."""
    model = toy(indexed(weighed, boolean))
    rewriting = grafted(model)
    right = select.best
    monkeypatch.setattr(select, "best", lambda s, allowed, topk: right(-s, allowed, topk))
    with pytest.raises(AssertionError, match="max abs error"):
        check_served(model, rewriting)


# ---- near misses


def of_sigmoid(rows: Rows) -> Tensor:
    products = rows.query @ rows.key.transpose(-1, -2).unsqueeze(1)
    return (rows.weights.unsqueeze(-2) @ products.sigmoid()).squeeze(-2)


def keys_by_head(rows: Rows) -> Tensor:
    keys = torch.stack([rows.key * (i + 1) for i in range(INDEX_HEADS)], 1)
    products = F.relu(torch.einsum("bqie,bike->bqik", rows.query, keys))
    return (rows.weights.unsqueeze(-2) @ products).squeeze(-2)


def one_more_term(rows: Rows) -> Tensor:
    """A bonus for later keys."""
    return weighed(rows) + 0.1 * torch.arange(rows.key.shape[1])


def of_everything(scores: Tensor) -> Tensor:
    return scores.topk(min(TOPK, scores.shape[-1]), -1).indices


def the_worst(scores: Tensor) -> Tensor:
    scores = scores.masked_fill(~causal(scores.shape[-1]), torch.inf)
    return scores.topk(min(TOPK, scores.shape[-1]), -1, largest=False).indices


def moved(scores: Tensor) -> Tensor:
    return (best(scores) - 1).clamp(min=0)


def half(scores: Tensor) -> Tensor:
    scores = scores.masked_fill(~causal(scores.shape[-1]), -torch.inf)
    return scores.topk((scores.shape[-1] + 1) // 2, -1).indices


def discouraged(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
    """What is not selected counts less, but it counts."""
    length = q.shape[2]
    bias = torch.full((1, 1, length, length), -1.0).scatter(-1, indices[:, None], 0.0)
    return spelled(q, k, v, bias + torch.where(causal(length), 0.0, MIN))


NEAR_MISSES: dict[str, tuple[Attend, str]] = {
    "another activation": (
        indexed(of_sigmoid, boolean),
        "index scores weigh no products: sigmoid",
    ),
    "index keys by head": (indexed(keys_by_head, boolean), "index keys are not laid out as rows"),
    "a further term": (
        indexed(one_more_term, boolean),
        "index scores are no scaled sum of products",
    ),
    "later keys compete": (indexed(weighed, boolean, of_everything), "index scores: not causal"),
    "the smallest": (indexed(weighed, boolean, the_worst), "not of the largest scores"),
    "indices moved": (indexed(weighed, boolean, moved), "not the indices of a top-k"),
    "half of all keys": (indexed(weighed, boolean, half), "selected keys is no constant"),
    "selected in a window": (
        indexed(weighed, boolean, near_only),
        "keys are selected where k <= q & q - k < 6, attended to where k <= q",
    ),
    "attended to in a window": (
        indexed(weighed, in_window),
        "keys are selected where k <= q, attended to where k <= q & q - k < 6",
    ),
    "a bias only": (indexed(weighed, discouraged), "keys that are not selected have scores"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_declined_and_leave_the_graph_alone(name: str) -> None:
    attend, reason = NEAR_MISSES[name]
    captured = capture(toy(attend))
    before = str(captured.graph)
    outcomes = []
    for region in find_regions(analyse(captured.graph)):
        core = indexed_attention.PASS.pattern(region)
        outcomes.append(core if isinstance(core, Declined) else indexed_attention.PASS.check(core))
    assert all(isinstance(outcome, Declined) for outcome in outcomes)
    assert any(reason in outcome.reason for outcome in outcomes), outcomes
    assert str(captured.graph) == before


@pytest.mark.parametrize("name", ["another activation", "a further term", "index keys by head"])
def test_near_misses_are_replayed(name: str) -> None:
    model = toy(NEAR_MISSES[name][0])
    rewriting = rewrite(capture(model), PASSES)
    (served,) = rewriting.served
    assert served.served == "replayed"
    assert NEAR_MISSES[name][1] in served.reason
    check_served(model, rewriting)
