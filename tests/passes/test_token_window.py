from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from regraft.passes import token_window
from regraft.passes.token_window import PASS
from regraft.rewriter.capture import capture
from regraft.rewriter.declare import StateSpec
from regraft.rewriter.token_axis import analyse, find_regions
from tests.passes.recurrent import (
    CHUNKED,
    LENGTHS,
    WHOLE,
    MixerLM,
    check_declined,
    enliven,
    graft,
    serve,
)
from tests.tolerance import assert_close

CHANNELS, VOCAB, TABLE, SEPARATOR = 6, 16, 97, 3


class NGramLM(MixerLM):
    """Beside each token's embedding, one of its last three ids, none of which is from before a separator."""

    def __init__(self) -> None:
        super().__init__(CHANNELS, VOCAB)
        self.grams = nn.Embedding(TABLE, CHANNELS)
        self.factors = nn.Buffer(torch.tensor([5, 7, 11]))

    def gram(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1], device=ids.device)
        last = torch.where(ids == SEPARATOR, at, -1).cummax(1).values
        before = torch.cat([last.new_full((1, 1), -1), last[:, :-1]], 1)
        total = ids * self.factors[0]
        for shift in (1, 2):
            moved = ids.gather(1, (at - shift).clamp_min(0)[None].expand(1, -1))
            inside = (at - before - 1 >= shift) & (at - shift >= 0)
            total = total ^ (torch.where(inside, moved, SEPARATOR) * self.factors[shift])
        return total % TABLE

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = False
    ) -> SimpleNamespace:
        history = torch.cat([input_ids.new_full((1, 2), SEPARATOR), input_ids], 1)
        grams = self.grams(self.gram(history)[:, -input_ids.shape[1] :])
        return SimpleNamespace(logits=self.head(self.embed(input_ids) + grams))


STATE = StateSpec(":ids", (1, 2), torch.int64)


def check_grafted(model: NGramLM) -> None:
    enliven(model)
    state = graft(model, PASS)
    (served,) = state.served
    assert served.operator == PASS.operator
    assert served.states == [STATE]
    texts = [torch.randint(VOCAB, (length,)) for length in LENGTHS]
    texts = [torch.where(torch.rand(len(ids)) < 0.2, SEPARATOR, ids) for ids in texts]
    for steps in (WHOLE, CHUNKED):
        for logits, ids in zip(serve(state, texts, steps), texts):
            with torch.no_grad():
                assert_close(logits, model(ids[None]).logits[0])


def test_grafts_the_last_ids_as_state() -> None:
    check_grafted(NGramLM())


class Counting(NGramLM):
    def gram(self, ids: Tensor) -> Tensor:
        return ids.cumsum(1) % TABLE


class SinceSeparator(NGramLM):
    """How far away the last separator is, without a limit."""

    def gram(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1], device=ids.device)
        return (at - torch.where(ids == SEPARATOR, at, -1).cummax(1).values) % TABLE


class Positions(NGramLM):
    def gram(self, ids: Tensor) -> Tensor:
        return (super().gram(ids) + torch.arange(ids.shape[1], device=ids.device)) % TABLE


class SinceStored(NGramLM):
    """Whether an id that only a buffer names, or one beyond a threshold, was ever seen."""

    def __init__(self) -> None:
        super().__init__()
        self.marks = nn.Buffer(torch.tensor([12]))

    def gram(self, ids: Tensor) -> Tensor:
        seen = ((ids == self.marks) | (ids > 13)).long().cummax(1).values
        return (super().gram(ids) + seen) % TABLE


class Rows(NGramLM):
    """Of embeddings, not of ids."""

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = False
    ) -> SimpleNamespace:
        x = self.embed(input_ids)
        return SimpleNamespace(logits=self.head(x + nn.functional.pad(x, (0, 0, 1, -1))))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Counting, "more than the last 16 tokens count"),
        (SinceSeparator, "more than the last 16 tokens count"),
        (Positions, "more than the last 16 tokens count"),
        (SinceStored, "more than the last 16 tokens count"),
    ],
)
def test_declines(kind: type[NGramLM], reason: str) -> None:
    model = kind()
    enliven(model)
    check_declined(model, PASS, reason)


def test_declines_other_rows() -> None:
    (region,) = find_regions(analyse(capture(Rows()).graph))
    assert str(PASS.pattern(region)).startswith("not a function of token ids alone")


def test_declines_without_weights() -> None:
    with torch.device("meta"):
        model = NGramLM()
    check_declined(model, PASS, "weights needed")


@pytest.mark.parametrize("mutant", [(1, SEPARATOR), (2, SEPARATOR + 1)])
def test_mutant_reach_or_filler(mutant: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_window, "_reach", lambda found: mutant)
    with pytest.raises(AssertionError):
        check_grafted(NGramLM())
