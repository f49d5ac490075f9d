"""Blocks selected by a module that loops over queries; what is no such selection is declined, and replayed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regraft.kernels.causal_conv import schema
from regraft.kernels.causal_conv.cpu import causal_window_cpu
from regraft.kernels.indexed_attention import blocks as block_kernel
from regraft.passes import block_leaf, indexed_attention, positions
from regraft.rewriter.capture import capture
from regraft.rewriter.graph import CapturedGraph
from regraft.rewriter.pattern import Declined
from regraft.rewriter.pipeline import Rewriting, rewrite
from regraft.rewriter.token_axis import analyse, find_regions
from tests.passes.serve import serve
from tests.passes.test_attention import check_served
from tests.passes.toy_attention import ToyLM, causal, repeat_kv
from tests.tolerance import assert_close

SIZE, TOPK, HEADS, WIDTH, ROTATED, HIDDEN = 3, 2, 5, 6, 4, 16
PASSES = (indexed_attention.PASS, positions.PASS)


class Selector(nn.Module):
    """Weighed heads, keys that are normed and turned by the angles of a block's first token. A method is a step."""

    def __init__(self) -> None:
        super().__init__()
        self.to_query = nn.Linear(HIDDEN, HEADS * WIDTH)
        self.to_key = nn.Linear(HIDDEN, WIDTH)
        self.to_weights = nn.Linear(HIDDEN, HEADS)
        self.norm = nn.LayerNorm(WIDTH)

    def pool(self, keys: Tensor) -> Tensor:
        """[n, SIZE, WIDTH] -> [n, WIDTH]."""
        return self.norm(keys.mean(1))

    def members(self, seen: Tensor) -> Tensor:
        """The tokens of whole blocks [n, SIZE], of those that a query sees."""
        return seen[: len(seen) // SIZE * SIZE].view(-1, SIZE)

    def blocks(self, keys: Tensor, cos: Tensor, sin: Tensor, at: Tensor) -> Tensor:
        """The keys [n, WIDTH] of blocks of tokens `at` [n, SIZE]."""
        return turned(self.pool(keys[at]), cos[at[:, 0]], sin[at[:, 0]])

    def score(self, query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("h,hn->n", weights, F.relu(query @ keys.t() * 0.3)) * 0.7

    def choose(self, scores: Tensor) -> Tensor:
        return scores.topk(min(TOPK, len(scores))).indices

    def rest(self, seen: Tensor) -> Tensor:
        return seen[len(seen) // SIZE * SIZE :]

    def query_of(self, query: Tensor, seen: Tensor) -> Tensor:
        return query

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        query = self.to_query(x).unflatten(-1, (HEADS, WIDTH))
        query = turned(query, cos.unsqueeze(2), sin.unsqueeze(2))
        keys, weights = self.to_key(x), self.to_weights(x).sigmoid()
        found = torch.zeros(mask.shape, dtype=torch.bool)
        for q in range(x.shape[1]):
            seen = torch.where(mask[0, 0, q])[0]
            at = self.members(seen)
            if len(at):
                made = self.blocks(keys[0], cos[0], sin[0], at)
                scores = self.score(self.query_of(query[0, q], seen), made, weights[0, q])
                found[0, 0, q, at[self.choose(scores)].flatten()] = True
            found[0, 0, q, self.rest(seen)] = True
        return found


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second, rest = x.split((ROTATED // 2, ROTATED // 2, x.shape[-1] - ROTATED), -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def toy(
    selector: nn.Module, combine: Callable[[Tensor, Tensor], Tensor] = torch.logical_and
) -> ToyLM:
    """Attention to the keys that the selector selects. `combine` makes the mask of the causal one and the selected."""

    def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
        angles = positions[..., None].float() * torch.tensor([1.0, 0.2])
        mask = causal(q.shape[2])[None, None]
        hidden = k.transpose(1, 2).flatten(2)
        selected = extra.selector(hidden, angles.cos(), angles.sin(), mask)
        mask = combine(mask, selected)
        return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), mask, scale=0.3)

    model = ToyLM(attend)
    torch.manual_seed(1)
    model.extra.selector = selector.eval()
    for parameter in selector.parameters():
        nn.init.normal_(parameter)
    return model


def grafted(model: nn.Module) -> Rewriting:
    return rewrite(capture(model), PASSES, fallback="refuse")


@functools.cache
def served_toy() -> tuple[ToyLM, Rewriting]:
    model = toy(Selector())
    return model, grafted(model)


def test_selected_blocks() -> None:
    """Served from keys, values, a key a block in the row of its last token, and a state of the open block's rows."""
    model, rewriting = served_toy()
    (served,) = rewriting.served
    assert served.operator == "regraft::indexed_attention"
    assert "the 2 best blocks of 3 by index score" in served.mask
    assert served.notes == [
        "how the module scores and selects blocks was measured on its own runs, not proven"
    ]
    assert sorted(spec.shape for spec in served.rows) == [(2, 8), (2, 8), (WIDTH,)]
    assert sorted(spec.shape for spec in served.states) == [(2, 2), (2, 2), (WIDTH, 2)]
    check_served(model, rewriting)
    assert not [node for node in rewriting.graph.nodes if "module_leaf" in str(node.target)]


class Plain(nn.Module):
    """Other names and idioms: a mask of numbers, blocks of five, neither relu nor weights, queries before keys."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(HIDDEN, 3 * 4, bias=False)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, rows: Tensor, bias: Tensor) -> Tensor:
        length = rows.shape[1]
        q, k = self.both(rows).split((8, 4), dim=-1)
        allowed = (bias == 0)[0, 0]
        picked = []
        for i in range(length):
            visible = allowed[i].nonzero().squeeze(1)
            count = visible.numel() // 5
            row = torch.zeros(length)
            row[visible[count * 5 :]] = 1.0
            if count > 0:
                inside = visible[: count * 5]
                made = k[0].index_select(0, inside).reshape(count, 5, 4)
                made = F.rms_norm(made.double().sum(dim=1).float(), (4,), self.gain)
                scores = torch.matmul(made, q[0, i].view(2, 4).t()).sum(-1) / 2.0
                best = torch.topk(scores, min(3, count), dim=0)[1]
                row[inside.view(count, 5).index_select(0, best).flatten()] = 1.0
            picked.append(row)
        return torch.stack(picked)[None, None] > 0


def plain() -> ToyLM:
    def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
        low = torch.finfo(torch.float32).min
        bias = torch.where(causal(q.shape[2]), 0.0, low)[None, None]
        selected = extra.pick(k.transpose(1, 2).flatten(2), bias)
        bias = bias.masked_fill(~selected, low)
        scores = q @ repeat_kv(k, 2).transpose(-1, -2) * 0.3 + bias
        return scores.softmax(-1) @ repeat_kv(v, 2)

    model = ToyLM(attend)
    torch.manual_seed(3)
    model.extra.pick = Plain().eval()
    return model


def test_a_selector_of_other_sizes_names_and_spellings() -> None:
    model = plain()
    rewriting = grafted(model)
    (served,) = rewriting.served
    assert "the 3 best blocks of 5 by index score" in served.mask
    check_served(model, rewriting)
    (text,) = serve(
        rewriting,
        [torch.arange(40) * 11 % 32],
        [[(0, at, min(40, at + 7))] for at in range(0, 40, 7)],
    )
    assert_close(text, model(torch.arange(40)[None] * 11 % 32).logits[0].detach())


def first_rows(cache: Tensor, pages: Tensor, count: int, size: int) -> Tensor:
    at = torch.arange(count) * size
    return cache[pages[..., at // cache.shape[1]].long(), at % cache.shape[1]]


def of_this_step(*arguments: Tensor) -> Tensor:
    """A window that forgets what came in earlier steps."""
    *others, contexts, slots = arguments
    return causal_window_cpu(*others, torch.zeros_like(contexts), slots)


def test_mutants_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of other rows than the last of each block, blocks one too few, the worst of them, no relu, no open block."""
    model, rewriting = served_toy()
    with monkeypatch.context() as patch:
        patch.setattr(block_kernel, "_keys", first_rows)
        with pytest.raises(AssertionError):
            check_served(model, rewriting)
    with monkeypatch.context() as patch:
        patch.setattr(schema, "causal_window_cpu", of_this_step)
        with pytest.raises(AssertionError):
            check_served(model, rewriting)
    operator = torch.ops.regraft.index_block_topk.default
    (select,) = (node for node in rewriting.graph.nodes if node.target is operator)
    right = select.args
    for at, wrong in ((9, TOPK - 1), (10, -0.21), (11, False)):
        select.args = (*right[:at], wrong, *right[at + 1 :])
        with pytest.raises(AssertionError):
            check_served(model, rewriting)
    select.args = right
    check_served(model, rewriting)


# ---- near misses


class WithoutRest(Selector):
    def rest(self, seen: Tensor) -> Tensor:
        return seen[:0]


class FirstTokenToo(Selector):
    def rest(self, seen: Tensor) -> Tensor:
        return torch.cat([seen[:1], super().rest(seen)])


class Worst(Selector):
    def choose(self, scores: Tensor) -> Tensor:
        return scores.topk(min(TOPK, len(scores)), largest=False).indices


class OneMore(Selector):
    """The newest block, beside the best."""

    def choose(self, scores: Tensor) -> Tensor:
        return torch.cat([super().choose(scores), torch.tensor([len(scores) - 1])])


class Sorted(Selector):
    def choose(self, scores: Tensor) -> Tensor:
        return scores.argsort(descending=True)[:TOPK]


class Half(Selector):
    def choose(self, scores: Tensor) -> Tensor:
        return scores.topk((len(scores) + 1) // 2).indices


class Everything(Selector):
    """More than a text is long."""

    def choose(self, scores: Tensor) -> Tensor:
        return scores.topk(len(scores)).indices


class Overlapping(Selector):
    def members(self, seen: Tensor) -> Tensor:
        return seen.unfold(0, SIZE, 1) if len(seen) >= SIZE else seen[:0].view(0, SIZE)


class Single(Selector):
    def members(self, seen: Tensor) -> Tensor:
        return seen.view(-1, 1)

    def rest(self, seen: Tensor) -> Tensor:
        return seen[:0]


class Sigmoid(Selector):
    def score(self, query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        return weights @ (query @ keys.t()).sigmoid()


class Largest(Selector):
    """Of the heads, instead of their sum."""

    def score(self, query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        return (weights[:, None] * (query @ keys.t())).amax(0)


class Newer(Selector):
    """Later blocks are better."""

    def score(self, query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        return super().score(query, keys, weights) + 0.5 * torch.arange(len(keys))


class Longer(Selector):
    """A query that knows how much it sees."""

    def query_of(self, query: Tensor, seen: Tensor) -> Tensor:
        return query * query.new_tensor([1.0, len(seen), 1, 1, 1, 1])


class FromTheFirst(Selector):
    """Keys relative to the text's first."""

    def blocks(self, keys: Tensor, cos: Tensor, sin: Tensor, at: Tensor) -> Tensor:
        return super().blocks(keys - keys[at[0, :1]], cos, sin, at)


class Backwards(Selector):
    def blocks(self, keys: Tensor, cos: Tensor, sin: Tensor, at: Tensor) -> Tensor:
        return super().blocks(keys, cos, sin, at.flip(1))


class Centred(Selector):
    """Keys relative to the other blocks'."""

    def blocks(self, keys: Tensor, cos: Tensor, sin: Tensor, at: Tensor) -> Tensor:
        made = super().blocks(keys, cos, sin, at)
        return made - made.mean(0)


class Written(Selector):
    def pool(self, keys: Tensor) -> Tensor:
        return super().pool(keys).mul_(keys.new_tensor([1.0, -1, 1, 1, 2, 1]))


SELECTS_OTHER = "selects other than whole blocks and the tokens after them"
NEAR_MISSES: dict[type[Selector], str] = {
    WithoutRest: SELECTS_OTHER,
    FirstTokenToo: SELECTS_OTHER,
    Worst: "does not select the best blocks",
    OneMore: "does not select 2 blocks wherever there are as many",
    Sorted: "chooses with no top-k",
    Half: "does not select",
    Everything: "how many it may is not known",
    Overlapping: "its top-ks are not of each query's whole blocks",
    Single: "selects single tokens",
    Sigmoid: "scores are no scaled sum of products",
    Largest: "scores are no scaled sum of products",
    Newer: "scores are no scaled sum of products",
    Longer: "what scores read of the query is computed for it alone",
    FromTheFirst: "what scores read of the blocks is no key of each",
    Backwards: "keys are made of other tokens than each block's",
    Centred: "what scores read of the blocks is no key of each",
    Written: "what makes the keys is written into",
}


@functools.cache
def captured_toy() -> tuple[ToyLM, CapturedGraph]:
    model = toy(Selector())
    return model, capture(model)


def outcomes(captured: CapturedGraph) -> list[Any]:
    found = []
    for region in find_regions(analyse(captured.graph)):
        core = indexed_attention.PASS.pattern(region)
        found.append(core if isinstance(core, Declined) else indexed_attention.PASS.check(core))
    return found


def check_declined(captured: CapturedGraph, reason: str) -> None:
    before = str(captured.graph)
    found = outcomes(captured)
    assert all(isinstance(outcome, Declined) for outcome in found), found
    assert any(reason in outcome.reason for outcome in found), found
    assert str(captured.graph) == before


@pytest.mark.parametrize("kind", NEAR_MISSES)
def test_near_misses_are_declined_and_leave_the_graph_alone(
    kind: type[Selector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To capture the module is a box: all of them are looked at in one graph."""
    model, captured = captured_toy()
    monkeypatch.setattr(block_leaf, "LONG_TEXTS", (576,))
    monkeypatch.setattr(model.extra.selector, "__class__", kind)
    check_declined(captured, NEAR_MISSES[kind])


def test_what_is_looked_at_is_accepted() -> None:
    assert not any(isinstance(outcome, Declined) for outcome in outcomes(captured_toy()[1]))


def test_more_blocks_than_short_texts_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many are selected shows over a longer text, in which the last query alone sees keys."""
    monkeypatch.setitem(globals(), "TOPK", 30)
    (outcome,) = outcomes(captured_toy()[1])
    assert outcome.indexer.blocks.count == 30


def in_window(mask: Tensor, selected: Tensor) -> Tensor:
    index = torch.arange(mask.shape[-1])
    return mask & selected & (index[:, None] - index < 6)


def discouraged(mask: Tensor, selected: Tensor) -> Tensor:
    return torch.where(mask, torch.where(selected, 0.0, -3.0), -torch.inf)


@pytest.mark.parametrize(
    ("combine", "reason"),
    [
        (in_window, "keys are selected where k <= q, attended to where k <= q & q - k < 6"),
        (discouraged, "keys that are not selected have scores"),
        (torch.logical_or, "keys that are not selected have scores"),
    ],
)
def test_masks_that_are_combined_otherwise(
    combine: Callable[[Tensor, Tensor], Tensor], reason: str
) -> None:
    check_declined(capture(toy(Selector(), combine)), reason)


@pytest.mark.parametrize("kind", [WithoutRest, Newer])
def test_near_misses_are_replayed(kind: type[Selector]) -> None:
    model = toy(kind())
    rewriting = rewrite(capture(model), PASSES)
    (served,) = rewriting.served
    assert served.served == "replayed"
    assert NEAR_MISSES[kind] in served.reason
    check_served(model, rewriting)


def test_without_weights() -> None:
    """Nothing fills in this module's weights, so nothing can be measured."""
    model = toy(Selector())
    captured = capture(model)
    model.extra.selector.to("meta")
    (outcome,) = outcomes(captured)
    assert outcome.reason == "what the module selects is measured: weights needed"
