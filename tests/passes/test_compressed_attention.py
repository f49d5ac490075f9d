"""Attention to a window of rows and to entries of earlier windows; what is no such thing is declined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regraft.kernels.compressed_attention import attend, pages, pool, select
from regraft.passes import attention, compressed_attention
from regraft.rewriter.capture import capture
from regraft.rewriter.pattern import Declined
from regraft.rewriter.pipeline import Rewriting, rewrite
from regraft.rewriter.report import make_report
from regraft.rewriter.token_axis import analyse, find_regions
from tests.passes.test_attention import check_served
from tests.passes.toy_attention import ToyLM

RATE, TOPK, INDEX_HEADS, INDEX_WIDTH, HIDDEN, WIDTH, WINDOW = 3, 2, 8, 6, 32, 8, 4
PASSES = (compressed_attention.PASS, attention.PASS)


def normed(pooled: Tensor, number: Tensor) -> Tensor:
    """A function of each window by itself, and of its number."""
    return F.layer_norm(pooled, pooled.shape[-1:]) * torch.cos(0.3 * number)[None, :, None]


def earlier_choice(best: Tensor, limit: Tensor, count: int) -> Tensor:
    """That of the query before, which is a whole window at this one too."""
    before = torch.cat([best[:, :1], best], 1)[:, : best.shape[1]]
    return torch.where(before >= limit, count, before)


@dataclass(frozen=True)
class Steps:
    """The steps of a layer, each to be replaced by something else. Windows before the first are `early`."""

    value: Callable[[Tensor, Tensor], Tensor] = lambda k, v: k
    weigh: Callable[[Tensor, Tensor], Tensor] = lambda logits, rows: (logits.softmax(2) * rows).sum(
        2
    )
    gate: Callable[[Tensor, Tensor], Tensor] = lambda gates, bias: gates + bias
    entry: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda pooled, number, positions: normed(
        pooled, number
    )
    hidden: Callable[[Tensor, Tensor], Tensor] = lambda w, q: w >= (q + 1) // RATE
    score: Callable[[Tensor], Tensor] = lambda scores: scores
    early: float = -torch.inf
    spans: int = 1
    selects: bool = False
    compete: Callable[[Tensor, Tensor], Tensor] = lambda scores, hidden: scores.masked_fill(
        hidden, -torch.inf
    )
    chosen: Callable[[Tensor, Tensor, int], Tensor] = lambda best, limit, count: torch.where(
        best >= limit, count, best
    )
    largest: bool = True


def in_windows(x: Tensor) -> Tensor:
    """[1, T, D] -> [1, windows, RATE, D]."""
    count = x.shape[1] // RATE
    return x[:, : count * RATE].view(1, count, RATE, -1)


def with_earlier(chunk: Tensor, early: float, spans: int) -> Tensor:
    """[1, windows, spans * RATE, D]: beside the last part of a window's rows, the first part of those before."""
    if spans == 1:
        return chunk
    one, two = chunk.chunk(2, -1)
    before = torch.cat([torch.full_like(one[:, :1], early), one[:, :-1]], 1)
    return torch.cat([before, two], 2)


def entries(x: Tensor, positions: Tensor, extra: nn.Module, name: str, steps: Steps) -> Tensor:
    """[1, windows, D]."""
    rows, gates = (in_windows(F.linear(x, getattr(extra, f"{name}_{n}"))) for n in ("row", "gate"))
    gates = steps.gate(gates, getattr(extra, f"{name}_bias"))
    logits = with_earlier(gates, steps.early, steps.spans)
    pooled = steps.weigh(logits, with_earlier(rows, 0.0, steps.spans))
    return steps.entry(pooled, torch.arange(pooled.shape[1]), positions)


def selected(x: Tensor, positions: Tensor, extra: nn.Module, steps: Steps) -> Tensor:
    """The mask [1, 1, T, windows] that lets the best entries through."""
    query = F.linear(x, extra.index_q).unflatten(-1, (INDEX_HEADS, INDEX_WIDTH))
    weights = F.linear(x, extra.index_weights)
    keys = entries(x, positions, extra, "index", steps)
    count = keys.shape[1]
    products = F.relu(query @ keys.transpose(-1, -2).unsqueeze(1)) * 0.3
    scores = (products * weights.unsqueeze(-1)).sum(2)
    limit = ((positions + 1) // RATE).unsqueeze(-1)
    scores = steps.compete(scores, torch.arange(count) >= limit)
    best = scores.topk(min(TOPK, count), -1, largest=steps.largest).indices
    chosen = steps.chosen(best, limit, count)
    mask = x.new_full((1, 1, x.shape[1], count + 1), -torch.inf)
    return mask.scatter(-1, chosen.unsqueeze(1), 0.0)[..., :count]


def toy(steps: Steps) -> ToyLM:
    def attend_to_both(
        q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module
    ) -> Tensor:
        length, x = q.shape[2], q.transpose(1, 2).flatten(2)
        index = torch.arange(length)
        near = index[None] - index[:, None]
        mask = torch.where((near <= 0) & (near > -WINDOW), 0.0, -torch.inf)[None, None]
        entry = entries(x, positions, extra, "main", steps)
        if steps.selects:
            far = selected(x, positions, extra, steps)
        else:
            hidden = steps.hidden(torch.arange(entry.shape[1]), positions[:, None, :, None])
            far = entry.new_zeros(1, 1, length, entry.shape[1]).masked_fill(hidden, -torch.inf)
        keys = torch.cat([k, entry.unsqueeze(1)], 2)
        values = torch.cat([steps.value(k, v), entry.unsqueeze(1)], 2)
        scores = q @ keys.transpose(-1, -2) * 0.3 + torch.cat([mask, far], -1)
        scores = torch.cat([scores[..., :length], steps.score(scores[..., length:])], -1)
        sinks = extra.sinks.view(1, -1, 1, 1).expand(1, -1, length, 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ values

    torch.manual_seed(1)
    widths = {"main": WIDTH * steps.spans, "index": INDEX_WIDTH * steps.spans}
    weights = {
        f"{name}_{part}": torch.randn(RATE if part == "bias" else width, width if part == "bias" else HIDDEN)
        for name, width in widths.items()
        for part in ("row", "gate", "bias")
    }  # fmt: skip
    weights |= {
        "index_q": torch.randn(INDEX_HEADS * INDEX_WIDTH, HIDDEN),
        "index_weights": torch.randn(INDEX_HEADS, HIDDEN),
        "sinks": torch.randn(4),
    }
    return ToyLM(attend_to_both, kv_heads=1, parameters=weights)


ALL, BEST = Steps(), Steps(spans=2, selects=True)
FORMS = {
    "all entries": ALL,
    "all entries of two windows each": replace(ALL, spans=2),
    "the best of one window each": replace(BEST, spans=1),
    "the best of two windows each": BEST,
}


def grafted(steps: Steps) -> tuple[ToyLM, Rewriting]:
    model = toy(steps)
    return model, rewrite(capture(model), PASSES, fallback="refuse")


@pytest.mark.parametrize("form", FORMS)
def test_grafted(form: str) -> None:
    """Served from open windows, entries and a window of rows."""
    steps = FORMS[form]
    model, rewriting = grafted(steps)
    (served,) = rewriting.served
    assert served.operator == "regraft::compressed_attention"
    seen = "the 2 best entries" if steps.selects else "all entries"
    assert served.mask == f"k <= q & q - k < 4; sink[h]; {seen} of whole windows of 3"
    open_rows = [(WIDTH * steps.spans,)] * 2
    kept = {str(spec.reach): spec for spec in served.rows if spec.every == 1}
    assert set(kept) == {"window 4", f"window {steps.spans * RATE}"}
    names = {spec.name.split(":")[1]: spec for spec in served.rows}
    assert [names[n].shape for n in ("value", "gate")] == open_rows
    assert {n for n, spec in names.items() if spec.every == RATE} == (
        {"entry", "index_entry"} if steps.selects else {"entry"}
    )
    check_served(model, rewriting)
    report = make_report(rewriting, "toy", None, None, 0.0)
    assert "row entry 8 float32 of 3 tokens" in str(report)
    # nothing is left of the way that only texts with a whole window take
    assert rewriting.shortest_row == 2 < rewriting.captured.min_tokens


MUTANTS: dict[str, tuple[Steps, object, str, Callable]] = {
    "a weight too few": (ALL, pool, "weighed", lambda right: lambda v, g, w, b: right(v, g, w, b * 0)),
    "an entry too early": (
        ALL, pages.Entries, "places", lambda right: lambda self, seq, w: right(self, seq, (w - 1).clamp(min=0)),
    ),
    "entries hidden": (
        ALL, attend, "attend", lambda right: lambda q, k, seen, *how: right(q, k[:1], seen[:, :1], *how),
    ),
    "the first": (
        BEST, select, "best", lambda right: lambda scores, seen, topk: right(scores * 0, seen, topk),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, owner, attribute, made = MUTANTS[name]
    model, rewriting = grafted(steps)
    monkeypatch.setattr(owner, attribute, made(getattr(owner, attribute)))
    with pytest.raises(AssertionError, match="error"):
        check_served(model, rewriting)


NEAR_MISSES: dict[str, tuple[Steps, str]] = {
    "values of their own": (
        replace(ALL, value=lambda k, v: v),
        "whose rows are not keys and values at once",
    ),
    "a plain mean": (
        replace(ALL, weigh=lambda logits, rows: (logits.sigmoid() * rows).sum(2)),
        "entries are made of 0 weighed sums",
    ),
    "the softmax over features": (
        replace(ALL, weigh=lambda logits, rows: (logits.softmax(-1) * rows).sum(2)),
        "the tokens of a window are not weighed by a softmax over them",
    ),
    "gates without a bias": (
        replace(ALL, gate=lambda gates, bias: gates * 2.0),
        "a token of a window is weighed by",
    ),
    "entries that add up": (
        replace(ALL, entry=lambda pooled, number, positions: pooled.cumsum(1)),
        "an entry is no function of its own window",
    ),
    "entries that read positions": (
        replace(ALL, entry=lambda pooled, number, positions: pooled + positions[0, -1]),
        "entries depend on position_ids beside their windows",
    ),
    "windows not whole yet": (
        replace(ALL, hidden=lambda w, q: w > q // RATE),
        "not of whole windows",
    ),
    "entries that count twice": (
        replace(ALL, score=lambda scores: scores * 2.0),
        "rows and entries are scored differently",
    ),
    "something before the first window": (
        replace(ALL, spans=2, early=0.0),
        "what is before the first window counts",
    ),
    "the worst entries": (
        replace(BEST, largest=False),
        "the top-k is not of a constant number of largest scores",
    ),
    "windows that are not whole compete": (
        replace(BEST, compete=lambda scores, hidden: scores + 0.0),
        "entries are scored of windows not whole",
    ),
    "windows that are not whole are chosen": (
        replace(BEST, chosen=lambda best, limit, count: best),
        "not the entries of whole windows",
    ),
    "what was selected for the query before": (
        replace(BEST, chosen=lambda best, limit, count: earlier_choice(best, limit, count)),
        "a query sees what was selected for another",
    ),
    "the first entry for none": (
        replace(BEST, chosen=lambda best, limit, count: torch.where(best >= limit, 0, best)),
        "not the entries of whole windows",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_declined_and_leave_the_graph_alone(name: str) -> None:
    steps, reason = NEAR_MISSES[name]
    captured = capture(toy(steps))
    before = str(captured.graph)
    outcomes = []
    for region in find_regions(analyse(captured.graph)):
        halves = compressed_attention.PASS.pattern(region)
        outcomes.append(
            halves if isinstance(halves, Declined) else compressed_attention.PASS.check(halves)
        )
    assert all(isinstance(outcome, Declined) for outcome in outcomes)
    assert any(reason in outcome.reason for outcome in outcomes), outcomes
    assert str(captured.graph) == before


@pytest.mark.parametrize("name", ["values of their own", "windows that are not whole are chosen"])
def test_near_misses_are_replayed(name: str) -> None:
    model = toy(NEAR_MISSES[name][0])
    rewriting = rewrite(capture(model), PASSES)
    assert [served.served for served in rewriting.served] == ["replayed"]
    assert NEAR_MISSES[name][1] in rewriting.served[0].reason
    assert rewriting.shortest_row == rewriting.captured.min_tokens > 2


def test_a_second_run_finds_nothing() -> None:
    _, rewriting = grafted(BEST)
    again = rewrite(rewriting.captured, PASSES)
    assert again.served == []
