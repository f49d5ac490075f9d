"""Half precision, where a model's choices of keys and experts hang on rounding: validation tells that from a fault."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

import regraft
from regraft.kernels.indexed_attention import gather, select
from regraft.rewriter.choices import NEAR, ChoicesUnknown, Choosing, Chosen, Ties, watching
from regraft.rewriter.validate import Validation, reference_logits
from tests.families.models import FAMILIES, build
from tests.families.served import worst, wrap


@functools.cache
def engine() -> regraft.Engine:
    return wrap(build("deepseek_v32", torch.bfloat16))


def test_choices_on_near_scores_pass() -> None:
    found = engine().validate()
    assert found.passed, found
    assert 0 < found.ties.differing < found.ties.chosen / 20
    assert 0 < found.ties.widest <= NEAR[torch.bfloat16]
    assert "fell otherwise, on scores at most" in str(found)
    assert found.mean_kl < 2e-3


@pytest.mark.slow
def test_choices_for_each_query_in_turn() -> None:
    """A model whose indexer is a loop over queries, made to choose what the graph did token by token."""
    model, family = build("qwen4_exp", torch.bfloat16), FAMILIES["qwen4_exp"]
    served, ties = wrap(model), Ties()
    texts = [family.prompt(n, seed=n).tolist() for n in (60, 3, 33, 90)]
    with watching(served.model, texts) as noted:
        logits = served.score(texts, schedule="decode")
    expected = []
    for text in noted:
        with Choosing(text, ties) as choosing:
            expected += reference_logits(model, [text.tokens])
        choosing.finish()
    assert 0 < ties.differing < ties.chosen / 20
    assert 0 < ties.widest <= NEAR[torch.bfloat16]
    alone = worst(logits, reference_logits(model, texts))
    assert worst(logits, expected) < alone / 4


def test_choices_of_an_invariant_graph_are_seen() -> None:
    model, text = build("mixtral"), FAMILIES["mixtral"].prompt(11, seed=1).tolist()
    seen = []
    for options in ({}, {"batch_invariant": True}):
        served = wrap(model, **options)
        with watching(served.model, [text]) as (noted,):
            served.score([text], schedule=4)
        seen.append([torch.cat(pieces) for pieces in noted.choices])
    assert len(seen[0]) == model.config.num_hidden_layers
    assert all(
        torch.equal(a.sort(-1).values, b.sort(-1).values) for a, b in zip(*seen, strict=True)
    )


def check_failed(found: Validation) -> None:
    assert not found.passed, found
    assert found.ties is None, "what is shown is the plain comparison"


def test_a_fault_in_the_scores_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    weigh = select.weigh

    def unlimited(products: Tensor, weights: Tensor, scale: float, relu: bool) -> Tensor:
        return weigh(products, weights, scale, False)

    monkeypatch.setattr(select, "weigh", unlimited)
    check_failed(engine().validate())


def test_the_worst_keys_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    best = select.best
    monkeypatch.setattr(select, "best", lambda scores, allowed, topk: best(-scores, allowed, topk))
    check_failed(engine().validate())


def test_a_fault_beside_the_choices_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    project = gather.project
    monkeypatch.setattr(gather, "project", lambda attended, w_v: 1.2 * project(attended, w_v))
    check_failed(engine().validate())


def chosen(*rows: list[int]) -> Chosen:
    return Chosen([5] * len(rows), choices=[[torch.tensor(rows)]])


SCORES = torch.tensor([[0.0, 4.0, 2.0, 1.9], [1.0, 0.0, 8.0, 2.0]])


def test_what_was_chosen_elsewhere_is_chosen() -> None:
    ties = Ties()
    with Choosing(chosen([1, 3], [3, 2]), ties) as choosing:
        values, indices = SCORES.topk(2, -1)
    choosing.finish()
    assert indices.tolist() == [[1, 3], [3, 2]]
    assert values.tolist() == [[4.0, pytest.approx(1.9)], [2.0, 8.0]]
    assert (ties.chosen, ties.differing) == (2, 1)
    assert ties.widest == pytest.approx(0.1 / 4)


def test_where_less_is_chosen_than_asked_for_the_own_choice_stands() -> None:
    ties = Ties()
    with Choosing(chosen([0, -1], [2, 3]), ties):
        assert SCORES.topk(2, -1).indices.tolist() == [[1, 2], [2, 3]]
    assert ties.differing == 0


def test_choices_in_a_loop_over_queries() -> None:
    """The first query has nothing to choose from, the second less than the others."""
    text, ties = chosen([-1, -1], [0, -1], [0, 2], [2, 3]), Ties()
    with Choosing(text, ties) as choosing:
        found = [SCORES[0, :n].topk(min(2, n), 0).indices.tolist() for n in (1, 3, 4)]
    choosing.finish()
    assert found == [[0], [0, 2], [2, 3]]
    assert (ties.chosen, ties.differing) == (3, 2)
    assert ties.widest == pytest.approx(2.0 / 4)


def test_a_text_without_a_choice() -> None:
    choose_of_beginnings(chosen([-1, -1], [-1, -1]), ())


@pytest.mark.parametrize("lengths", [(1, 3), (1, 3, 4, 4), (2, 3, 4)])
def test_choices_of_other_queries(lengths: tuple[int, ...]) -> None:
    """Fewer queries than in the graph, more, and one that chooses more."""
    with pytest.raises(ChoicesUnknown):
        choose_of_beginnings(chosen([0, -1], [0, 2], [2, 3]), lengths)


def choose_of_beginnings(text: Chosen, lengths: tuple[int, ...]) -> None:
    with Choosing(text, Ties()) as choosing:
        for n in lengths:
            SCORES[0, :n].topk(min(2, n), 0)
    choosing.finish()


@pytest.mark.parametrize(
    ("text", "topks"),
    [(chosen([1, 3], [2, 3]), 2), (chosen([1, 3], [2, 3]), 0), (chosen([1, 3]), 1), (chosen([1], [2]), 1)],
)  # fmt: skip
def test_choices_that_are_not_the_models(text: Chosen, topks: int) -> None:
    """More top-ks than in the graph, or fewer; fewer rows; fewer choices a row."""
    with pytest.raises(ChoicesUnknown):
        choose(text, topks)


def choose(text: Chosen, topks: int) -> None:
    with Choosing(text, Ties()) as choosing:
        for _ in range(topks):
            SCORES.topk(2, -1)
    choosing.finish()
