"""Attention spelled in many ways is grafted and gives the model's own logits; what is no such attention is declined."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regraft.kernels.paged_attention  # noqa: F401  (registers the operator)
from regraft.passes import attention, positions, token_sinks
from regraft.rewriter.capture import capture
from regraft.rewriter.errors import RewriteError
from regraft.rewriter.graph import TOKENS, CapturedGraph, is_aten
from regraft.rewriter.pattern import Declined, Region
from regraft.rewriter.pipeline import Rewriting, rewrite
from tests.passes.serve import one_by_one, serve
from tests.passes.toy_attention import Attend, ToyLM, causal, eager, repeat_kv
from tests.tolerance import assert_close

MIN = torch.finfo(torch.float32).min
SLOPES = 2.0 ** -torch.arange(1.0, 5.0)
STEPS = [[(0, 0, 5)], [(0, 5, 6), (1, 0, 3)], [(1, 3, 7), (0, 6, 17)]]


def grafted(model: nn.Module) -> Rewriting:
    return rewrite(capture(model), (attention.PASS, positions.PASS), fallback="refuse")


def check_served(model: nn.Module, rewriting: Rewriting, scale: float = 1.0) -> None:
    """Two requests in one row, cut into pieces, and one token by token: the logits of the model itself."""
    sequences = [torch.arange(17) * 7 % 32, torch.arange(7) * 5 % 32]
    with torch.no_grad():
        expected = [model(ids[None]).logits[0] for ids in sequences]
    for result, reference in zip(serve(rewriting, sequences, STEPS), expected, strict=True):
        assert_close(result, reference, scale=scale)
    (result,) = serve(rewriting, sequences[1:], one_by_one(7))
    assert_close(result, expected[1], scale=scale)


# ---- attention in other words


def fused(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), is_causal=True)


def fused_grouped(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    mask = causal(q.shape[2])[None, None]
    return F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)


def fused_additive(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    mask = torch.where(causal(q.shape[2]), 0.0, MIN).expand(1, 1, -1, -1)
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    return F.scaled_dot_product_attention(q * 0.5, k, v, mask, scale=1.0)


def one_kv_head(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    scores = scores + (1.0 - causal(q.shape[2]).float()) * MIN
    return scores.softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    """Groups of heads as a dimension of their own, nothing repeated."""
    _, heads, length, width = q.shape
    q = q.view(1, k.shape[1], -1, length, width)
    scores = torch.einsum("bgrqd,bgkd->bgrqk", q, k) * 0.25
    scores = torch.where(causal(length), scores, -torch.inf)
    return torch.einsum("bgrqk,bgkd->bgrqd", scores.softmax(-1), v).reshape(1, heads, length, -1)


def merged_with_batch(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module
) -> Tensor:
    """Heads in the place of the batch, the bias an operand of the product."""
    heads, length = q.shape[1:3]
    q, k, v = (x.reshape(heads, length, -1) for x in (q, k, v))
    slopes = 2.0 ** -torch.arange(1, heads + 1)
    alibi = slopes[:, None, None] * torch.arange(length)
    scores = alibi.baddbmm(q, k.transpose(-1, -2), beta=0.5, alpha=0.2)
    scores = scores.view(1, heads, length, length).masked_fill(~causal(length), MIN)
    return torch.bmm(scores.softmax(-1).view(heads, length, length), v).view(1, heads, length, -1)


def heads_after_tokens(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module
) -> Tensor:
    """Einsum over the layout of the projections, [1, T, H, D] throughout."""
    q, k, v = (x.transpose(1, 2) for x in (q, repeat_kv(k, 2), repeat_kv(v, 2)))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).masked_fill(~causal(q.shape[1]), MIN)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).transpose(1, 2)


def transposed(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    """Keys as rows, queries as columns."""
    scores = (repeat_kv(k, 2) @ q.mT).masked_fill(~causal(q.shape[2]).T, MIN)
    return (repeat_kv(v, 2).mT @ scores.softmax(-2)).mT


def by_hand(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    """Softmax as exponentials over their sum, shifted by the maximum."""
    scores = (q @ repeat_kv(k, 2).transpose(-1, -2) * 0.3).masked_fill(~causal(q.shape[2]), MIN)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ repeat_kv(v, 2)


def with_sink(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    """A learned column beside the keys, dropped after the softmax."""
    scores = (q @ repeat_kv(k, 2).transpose(-1, -2) * 0.3).masked_fill(~causal(q.shape[2]), MIN)
    sink = extra.sinks.reshape(1, -1, 1, 1).expand(1, -1, q.shape[2], 1)
    scores = torch.cat([scores, sink], -1)
    weights = (scores - scores.max(-1, keepdim=True).values).softmax(-1)
    return weights[..., :-1] @ repeat_kv(v, 2)


def with_sink_first(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    scores = (q @ repeat_kv(k, 2).transpose(-1, -2) * 0.3).masked_fill(~causal(q.shape[2]), MIN)
    sink = (2 * extra.sinks)[None, :, None, None].expand(1, -1, q.shape[2], 1)
    return torch.cat([sink, scores], -1).softmax(-1)[..., 1:] @ repeat_kv(v, 2)


def by_distance(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    """A bias per query, head and distance up to 4, grown with the position."""
    length = q.shape[2]
    table = q @ extra.table
    index = torch.arange(length)
    distance = index[:, None] - index
    bias = table.gather(-1, distance.clamp(0, 4).expand(1, q.shape[1], -1, -1))
    bias = bias.masked_fill((distance < 0) | (distance > 4), 0.0)
    bias = bias * torch.log(2.0 + index.float())[:, None]
    mask = torch.where(causal(length), bias, MIN)
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), mask)


def turned_after_repeating(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module
) -> Tensor:
    """Rotary embedding on keys whose heads are repeated already."""

    def turn(x: Tensor) -> Tensor:
        angle = positions[0, :, None] * 0.1 ** torch.arange(x.shape[-1] // 2)
        angle = torch.cat([angle, angle], -1)
        one, two = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-two, one], -1) * angle.sin()

    k, v = repeat_kv(k, 2), repeat_kv(v, 2)
    return F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)


def tiled(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    """Key head h % 2 for query head h: the operator has no such grouping, so all four heads are kept."""
    k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def one_query_for_all(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module
) -> Tensor:
    """Heads that differ in their keys and values only."""
    q = q[:, :1].expand(-1, 4, -1, -1)
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), is_causal=True)


def stored_band(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    """A window stored as a boolean matrix."""
    length = q.shape[2]
    scores = torch.matmul(q, repeat_kv(k, 2).mT) / 3
    scores = torch.where(extra.band[:, :, :length, :length], scores, torch.tensor(MIN))
    return scores.softmax(-1) @ repeat_kv(v, 2)


def slopes_from_a_weight(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module
) -> Tensor:
    index = torch.arange(q.shape[2])
    behind = -(index[:, None] - index).abs()
    mask = torch.where(causal(q.shape[2]), extra.slopes[:, None, None] * behind * 0.5, -torch.inf)
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), mask[None])


def packed_window(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    """Segments and a window on position ids, chunks on top."""
    p = positions[0]
    segment = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)[0]
    allowed = (segment[:, None] == segment) & (p <= p[:, None]) & (p > p[:, None] - 6)
    allowed = allowed & (p // 8 == (p // 8)[:, None])
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), allowed[None, None])


def capped(scores: Tensor) -> Tensor:
    return 5.0 * torch.tanh(scores / 5.0)


def sparse(size: int = 64, window: int = 5) -> Tensor:
    rows, columns = torch.arange(size)[:, None], torch.arange(size)
    return ((columns <= rows) & (rows - columns < window))[None, None]


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.1])

SPELLINGS: dict[str, tuple[Attend, dict[str, Any], str]] = {
    "eager": (eager(), {}, "k <= q"),
    "eager, wider values": (eager(), {"v_width": 12}, "k <= q"),
    "eager, window": (eager(lambda i, j: (j <= i) & (i - j < 4)), {}, "k <= q & q - k < 4"),
    "eager, chunk": (
        eager(lambda i, j: (j <= i) & (i // 4 == j // 4)),
        {},
        "k <= q & floor(k/4) == floor(q/4)",
    ),
    "eager, softcap": (eager(score=capped), {}, "k <= q; softcap 5"),
    "eager, no repeats": (eager(), {"kv_heads": 4}, "k <= q"),
    "eager, one head": (eager(), {"heads": 1, "kv_heads": 1}, "k <= q"),
    "eager, lower limit": (eager(score=lambda s: s.clamp(min=MIN)), {}, "k <= q"),
    "fused": (fused, {}, "k <= q"),
    "fused, grouped": (fused_grouped, {}, "k <= q"),
    "fused, additive": (fused_additive, {}, "k <= q"),
    "fused, packed": (packed_window, {}, "k <= q & q - k < 6 & floor(k/8) == floor(q/8)"),
    "one kv head": (one_kv_head, {"kv_heads": 1}, "k <= q"),
    "grouped": (grouped, {}, "k <= q"),
    "merged with the batch": (merged_with_batch, {"kv_heads": 4}, "k <= q; + slope[h]*k"),
    "heads after tokens": (heads_after_tokens, {}, "k <= q"),
    "transposed": (transposed, {}, "k <= q"),
    "by hand": (by_hand, {}, "k <= q"),
    "sink": (with_sink, {"parameters": {"sinks": SINKS}}, "k <= q; sink[h]"),
    "sink first": (with_sink_first, {"parameters": {"sinks": SINKS}}, "k <= q; sink[h]"),
    "bias by distance": (
        by_distance,
        {"parameters": {"table": torch.linspace(-1, 1, 40).view(8, 5)}},
        "k <= q; + bias[q, h, q - k]",
    ),
    "turned after repeating": (turned_after_repeating, {}, "k <= q"),
    "tiled": (tiled, {}, "k <= q"),
    "one query for all": (one_query_for_all, {}, "k <= q"),
    "stored band": (stored_band, {"buffers": {"band": sparse()}}, "k <= q & q - k < 5"),
    "slopes from a weight": (
        slopes_from_a_weight,
        {"parameters": {"slopes": SLOPES}},
        "k <= q; + slope[h]*k",
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_of_attention_is_grafted_and_exact(name: str) -> None:
    attend, options, mask = SPELLINGS[name]
    model = ToyLM(attend, **options)
    rewriting = grafted(model)
    (served,) = [s for s in rewriting.served if s.kind == "attention"]
    assert served.mask == mask
    assert {spec.name.rpartition(":")[2] for spec in served.rows} == {"k", "v"}
    kv_heads = 4 if name == "tiled" else model.kv_heads
    assert [spec.shape[0] for spec in served.rows] == [kv_heads, kv_heads]
    assert sum(is_aten(node, "softmax", "matmul", "bmm") for node in rewriting.graph.nodes) == (
        name == "bias by distance"
    )
    check_served(model, rewriting)


def call_of(rewriting: Rewriting) -> dict[str, Any]:
    """The arguments of the one operator call."""
    (node,) = [n for n in rewriting.graph.nodes if "paged_attention" in str(n.target)]
    names = [arg.name for arg in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False))


def test_the_parameters_reach_the_operator() -> None:
    rewriting = grafted(ToyLM(eager(lambda i, j: (j <= i) & (i - j < 4), capped, scale=0.2)))
    call = call_of(rewriting)
    assert (call["window"], call["chunk"], call["softcap"]) == (4, 0, 5.0)
    assert call["scale"] == pytest.approx(0.2)
    assert call["sinks"] is None
    assert call["alibi_slopes"] is None
    for name, heads in (("q", 4), ("k", 2), ("v", 2)):
        assert call[name].meta["shape"] == (TOKENS, heads, 8)


def test_slopes_that_are_computed_become_a_constant() -> None:
    rewriting = grafted(ToyLM(merged_with_batch, kv_heads=4))
    node = call_of(rewriting)["alibi_slopes"]
    assert node.op == "get_attr"
    assert_close(getattr(rewriting.captured.module, node.target), SLOPES * 0.5)


def test_learned_sinks_stay_live() -> None:
    """The operator reads the parameter itself: a changed weight changes the next result."""
    model = ToyLM(with_sink, parameters={"sinks": SINKS})
    rewriting = grafted(model)
    with torch.no_grad():
        model.extra.sinks.add_(1.0)
    check_served(model, rewriting)


def test_layers_that_read_the_same_rows_share_their_pools() -> None:
    def twice(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
        return eager()(q, k, v, positions, extra) + fused_grouped(q * 2, k, v, positions, extra)

    model = ToyLM(twice)
    rewriting = grafted(model)
    one, two = (s for s in rewriting.served if s.kind == "attention")
    assert len(one.rows) == 2
    assert two.rows == []
    check_served(model, rewriting)


def test_two_attentions_of_one_module_have_pools_of_their_own() -> None:
    def twice(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
        return fused(q, k, v, positions, extra) - fused(q, k.cos(), v, positions, extra)

    model = ToyLM(twice)
    rewriting = grafted(model)
    names = [spec.name for served in rewriting.served for spec in served.rows]
    assert len(names) == len(set(names)) == 3
    check_served(model, rewriting)


def test_half_precision_with_a_softmax_in_float32() -> None:
    def upcast(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
        scores = q.float() @ repeat_kv(k, 2).float().transpose(-1, -2) * 0.3
        scores = scores.masked_fill(~causal(q.shape[2]), MIN)
        return (scores.softmax(-1, dtype=torch.float32) @ repeat_kv(v, 2).float()).to(q.dtype)

    model = ToyLM(upcast).to(torch.bfloat16)
    rewriting = grafted(model)
    (served,) = rewriting.served
    assert {spec.dtype for spec in served.rows} == {torch.bfloat16}
    check_served(model, rewriting)


def test_half_precision_masks_with_its_own_lowest_number() -> None:
    def half(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
        mask = torch.where(causal(q.shape[2]), 0.0, torch.finfo(torch.float16).min).half()
        return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), mask[None, None])

    rewriting = grafted(ToyLM(half).half())
    assert rewriting.served[0].mask == "k <= q"


# ---- near misses


def closers(graph: CapturedGraph) -> list[Region]:
    """A region for each operation that mixes values."""
    found = [
        node
        for node in graph.graph.nodes
        if is_aten(node, "scaled_dot_product_attention", "matmul", "bmm")
        and (TOKENS not in node.meta["shape"][-1:])
    ]
    return [Region(node, (), (), "attention", node.meta["path"]) for node in found]


def declined(model: nn.Module) -> Declined:
    (region,) = closers(capture(model))
    captures = attention.PASS.pattern(region)
    outcome = captures if isinstance(captures, Declined) else attention.PASS.check(captures)
    assert isinstance(outcome, Declined), outcome
    return outcome


def times_length(scores: Tensor) -> Tensor:
    return scores * scores.shape[-1]


def plus_strangers(scores: Tensor) -> Tensor:
    return scores + scores.roll(1, -1)


def dropout(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    return F.scaled_dot_product_attention(
        q, repeat_kv(k, 2), repeat_kv(v, 2), dropout_p=0.1, is_causal=True
    )


def dropout_on_weights(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module
) -> Tensor:
    scores = (q @ repeat_kv(k, 2).mT).masked_fill(~causal(q.shape[2]), MIN)
    return F.dropout(scores.softmax(-1), 0.1, True) @ repeat_kv(v, 2)


def different_heads(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    """One key head for all, a value head for each two."""
    scores = (q @ k[:, :1].mT).masked_fill(~causal(q.shape[2]), MIN)
    return scores.softmax(-1) @ repeat_kv(v, 2)


def selected_keys(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    scores = q @ repeat_kv(k, 2).mT
    scores = scores.masked_fill(~causal(q.shape[2]), MIN)
    best = scores.topk(2)[1]
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    return F.scaled_dot_product_attention(
        q, repeat_kv(k, 2), repeat_kv(v, 2), kept & causal(q.shape[2])
    )


def sigmoid_weights(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    return (q @ repeat_kv(k, 2).mT).tril().sigmoid() @ repeat_kv(v, 2)


def divided_by_another_sum(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module
) -> Tensor:
    weights = (q @ repeat_kv(k, 2).mT).masked_fill(~causal(q.shape[2]), MIN).exp()
    return (weights / (weights * 2).sum(-1, keepdim=True)) @ repeat_kv(v, 2)


def softmax_over_queries(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module
) -> Tensor:
    scores = (q @ repeat_kv(k, 2).mT).masked_fill(~causal(q.shape[2]), MIN)
    return scores.softmax(-2) @ repeat_kv(v, 2)


def own_sinks(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    """A column beside the keys in which each token and head has a number of its own."""
    scores = (q @ repeat_kv(k, 2).mT * 0.3).masked_fill(~causal(q.shape[2]), MIN)
    sinks = F.linear(k.transpose(1, 2).flatten(2), extra.sinks) * 0.5
    scores = torch.cat([scores, sinks.transpose(1, 2).unsqueeze(-1)], -1)
    return scores.softmax(-1)[..., :-1] @ repeat_kv(v, 2)


def own_sinks_capped(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module
) -> Tensor:
    scores = 2.0 * torch.tanh(q @ repeat_kv(k, 2).mT * 0.3 / 2.0)
    sinks = F.linear(k.transpose(1, 2).flatten(2), extra.sinks).transpose(1, 2).unsqueeze(-1)
    scores = torch.cat([scores.masked_fill(~causal(q.shape[2]), MIN), sinks], -1)
    return scores.softmax(-1)[..., :-1] @ repeat_kv(v, 2)


def sinks_toy(attend: Attend) -> ToyLM:
    torch.manual_seed(3)
    return ToyLM(attend, parameters={"sinks": torch.randn(4, 16)})


def test_a_sink_of_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more feature of queries and keys; with another factor on it, the result is another."""
    model = sinks_toy(own_sinks)
    rewriting = grafted(model)
    (served,) = rewriting.served
    assert served.mask == "k <= q; sink[q, h]"
    assert [spec.shape for spec in served.rows] == [(2, 9), (2, 8)]
    check_served(model, rewriting)
    right = token_sinks.lower_scores
    monkeypatch.setattr(
        attention, "lower_scores", lambda s, scale, *rest: right(s, scale * 1.1, *rest)
    )
    with pytest.raises(AssertionError, match="max abs error"):
        check_served(model, grafted(model))


def test_a_sink_of_each_token_beside_a_softcap() -> None:
    outcome = declined(sinks_toy(own_sinks_capped))
    assert outcome.reason == "a sink of each token beside scores with a softcap"


def sink_of_the_token(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module
) -> Tensor:
    scores = (q @ repeat_kv(k, 2).mT).masked_fill(~causal(q.shape[2]), MIN)
    return torch.cat([scores, q[..., :1]], -1).softmax(-1)[..., :-1] @ repeat_kv(v, 2)


def shifted_keys(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
    """The value of the next token: sliced off one place later than the key."""
    k, v = repeat_kv(k, 2), F.pad(repeat_kv(v, 2), (0, 0, 0, 1))[:, :, 1:]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def heads_in_another_order(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module
) -> Tensor:
    """Query head h reads key head h % 2, and no key is repeated."""
    _, heads, length, width = q.shape
    scores = q.view(1, -1, k.shape[1], length, width) @ k[:, None].mT
    scores = scores.masked_fill(~causal(length), MIN)
    return (scores.softmax(-1) @ v[:, None]).reshape(1, heads, length, -1)


def one_query_broadcast(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module
) -> Tensor:
    scores = (q[:, :1] @ repeat_kv(k, 2).mT).masked_fill(~causal(q.shape[2]), MIN)
    return scores.softmax(-1) @ repeat_kv(v, 2)


NEAR_MISSES: dict[str, tuple[Attend, str]] = {
    "no mask": (eager(lambda i, j: j >= 0), "not causal: a query also attends to all later keys"),
    "window on the wrong side": (
        eager(lambda i, j: j - i < 4),
        "not causal: a query also attends to 3 later keys",
    ),
    "window on both sides": (
        eager(lambda i, j: ((i - j) < 4) & ((j - i) < 4)),
        "not causal: a query also attends to 3 later keys",
    ),
    "strictly earlier keys": (
        eager(lambda i, j: j < i),
        "a query does not attend to its own key: the mask is k <= q - 1",
    ),
    "an extra term in the mask": (
        eager(lambda i, j: (j <= i) & (j % 3 != 1)),
        "the mask is no relation of positions: Ne(",
    ),
    "first tokens kept": (
        eager(lambda i, j: (j <= i) & ((i - j < 4) | (j < 2))),
        "the mask is no relation of positions: k < 2",
    ),
    "scale by the row's length": (
        eager(score=times_length),
        "the scale of the scores is no constant: ",
    ),
    "a bias of other scores": (
        eager(score=plus_strangers),
        "the score has a further term: roll[0, h, q, k]",
    ),
    "a bias quadratic in the distance": (
        eager(score=lambda s: s - torch.arange(s.shape[-1]) ** 2),
        "the score has a further term: -k**2",
    ),
    "no function of the product": (
        eager(score=torch.abs),
        "the score is no known function of the product",
    ),
    "weakly masked": (
        eager(lambda i, j: j >= 0, lambda s: s + (1.0 - causal(s.shape[-1]).float()) * -100.0),
        "not causal: a query also attends to all later keys",
    ),
    "dropout": (dropout, "attention dropout is active"),
    "dropout on the weights": (
        dropout_on_weights,
        "no attention: the weights of the values are no softmax",
    ),
    "k and v with different heads": (different_heads, "k has 1 heads and v has "),
    "selected keys": (
        selected_keys,
        "the mask is no relation of positions: Ne(scatter[0, h, q, k], 0)",
    ),
    "sigmoid instead of softmax": (sigmoid_weights, "no attention: the weights of the values are "),
    "divided by another sum": (
        divided_by_another_sum,
        "no attention: the weights are not divided by their own sum",
    ),
    "softmax over queries": (softmax_over_queries, "no attention: the softmax is not over keys"),
    "a sink beside others in its row": (
        sink_of_the_token,
        "the sinks are not laid out as one number per token and head",
    ),
    "one query for all heads": (one_query_broadcast, "query head h reads head 0 of q"),
    "heads in another order": (
        heads_in_another_order,
        "query head h reads head h - 2*floor(h/2) of k",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_is_declined_with_its_reason(name: str) -> None:
    attend, reason = NEAR_MISSES[name]
    outcome = declined(ToyLM(attend))
    assert outcome.reason.startswith(reason)
    assert outcome.node is not None


def test_a_refusal_names_the_operation_and_its_line() -> None:
    outcome = declined(ToyLM(selected_keys))
    assert is_aten(outcome.node, "scatter")
    assert "scatter" in str(outcome)
    assert f"{outcome.node.meta['source']}" in str(outcome)


def test_values_of_the_next_token_are_not_hidden_by_the_graft() -> None:
    """The shift is outside the softmax: it stays in the graph, where the proof finds it."""
    with pytest.raises(RewriteError, match="no pass takes this") as caught:
        grafted(ToyLM(shifted_keys))
    assert "constant_pad_nd" in str(caught.value) or "slice" in str(caught.value)


def test_what_mixes_in_another_way_is_no_attention() -> None:
    graph = capture(ToyLM(eager()))
    (closer,) = (region.closer for region in closers(graph))
    softmax = next(node for node in graph.graph.nodes if is_aten(node, "softmax"))
    for node in (softmax, graph.logits):
        outcome = attention.PASS.pattern(Region(node, (), (), "mixing", ""))
        assert isinstance(outcome, Declined)
        assert outcome.reason == "no attention: tokens are not mixed by a product with values"
        assert outcome.progress == 0.0
    assert not isinstance(attention.PASS.pattern(Region(closer, (), (), "", "")), Declined)
