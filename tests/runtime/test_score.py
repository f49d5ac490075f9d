"""Scored sequences: however they are cut and packed, the logits of the whole."""

from __future__ import annotations

import random

import pytest
import torch

from regraft.runtime.errors import RequestError
from regraft.runtime.schedules import chunk_ends
from tests.runtime.engines import assert_idle, make_engine, make_prompts
from tests.runtime.toy import ToyModel


def random_cuts(sequences, seed):
    rng = random.Random(seed)
    cuts = []
    for sequence in sequences:
        ends, at = [], 0
        while at < len(sequence):
            at = min(at + rng.randint(1, 20), len(sequence))
            ends.append(at)
        cuts.append(ends if rng.random() < 0.5 else ends[:-1])  # the end may go without saying
    return cuts


@pytest.mark.parametrize("schedule", ["prefill", "decode", 1, 3, 7, 16, "random"])
@pytest.mark.parametrize("model", [{}, {"switch_lengths": (9, 40)}, {"min_tokens": 20}], ids=str)
def test_equals_the_whole_sequence(schedule, model):
    engine = make_engine(ToyModel(**model), cache_tokens=150)
    sequences = make_prompts(8, longest=70)
    if schedule == "random":
        schedule = random_cuts(sequences, 3)
    for sequence, logits in zip(sequences, engine.score(sequences, schedule), strict=True):
        assert logits.dtype == torch.float32
        assert logits.shape == (len(sequence), 64)
        assert torch.equal(logits, engine.model.logits_of(sequence))
    assert_idle(engine)


def test_sequences_are_packed_and_cut_as_asked():
    engine = make_engine()
    engine.model.keeps_steps = True
    engine.score([[1] * 7, [2] * 5, [3]], [[2, 6], [5], []])
    counts = [torch.tensor(step["cu_seqlens"]).diff().tolist() for step in engine.model.steps]
    assert counts == [[2, 5, 1], [4], [1]]
    assert [step["extents"] for step in engine.model.steps] == [[7, 5, 1], [7], [7]]


def test_others_go_on_during_a_score_and_a_score_survives_being_preempted():
    engine = make_engine(cache_tokens=128, page_size=4)
    stream = engine.stream([5] * 60, max_new_tokens=60)
    next(stream)
    sequences = [[1] * 30, [2] * 30]
    scored = engine.score(sequences, "decode")
    assert engine._loop.scheduler.num_preemptions > 0
    for sequence, logits in zip(sequences, scored):
        assert torch.equal(logits, engine.model.logits_of(sequence))
    tokens = [token.token_id for token in stream]
    assert tokens == engine.model.continue_greedily([5] * 60, 60)[1:]


def test_logits_may_be_used_in_training():
    engine = make_engine()
    (logits,) = engine.score([[1, 2, 3]])
    weight = torch.ones(64, requires_grad=True)
    (logits * weight).sum().backward()
    assert not logits.is_inference()


def test_regular_schedules():
    assert chunk_ends("prefill", [3, 70], 32) == [[3], [32, 64, 70]]
    assert chunk_ends("decode", [3], 32) == [[1, 2, 3]]
    assert chunk_ends(3, [7, 3], 32) == [[3, 6, 7], [3]]
    assert chunk_ends([[2], [3]], [7, 3], 32) == [[2, 7], [3]]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("whole", "schedule='whole': give 'prefill', 'decode'"),
        (0, "schedule=0: a chunk has 1 token or more"),
        (True, "schedule=True"),
        (33, "a chunk of 33 tokens is more than max_batch_tokens=32: cut it, or raise"),
        ([[1]], "schedule has 1 lists of cut points for 2 sequences"),
        ([[5, 5], []], r"cut points \[5, 5\] of a sequence of 40 tokens do not increase"),
        ([[41], []], r"cut points \[41\] of"),
        ([[0, 10], []], r"cut points \[0, 10\] of"),
        ([[20], [2.5]], r"cut points \[2.5\] of"),
        ([["a"], []], r"cut points \['a'\] of"),
        ([3, 1], "cut points 3 are no list"),
        (1.5, "schedule=1.5: give 'prefill'"),
        (None, "schedule=None: give 'prefill'"),
        ([[], []], "a chunk of 40 tokens is more than max_batch_tokens=32"),
    ],
)
def test_a_wrong_schedule_is_named(schedule, message):
    engine = make_engine()
    with pytest.raises(RequestError, match=message):
        engine.score([[1] * 40, [2] * 3], schedule)
    assert_idle(engine)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [([], "empty"), ([64], "token 64"), ([1] * 401, "401 tokens are more than the 400 tokens of")],
)
def test_a_wrong_sequence_is_named(sequence, message):
    engine = make_engine()
    with pytest.raises(RequestError, match=message):
        engine.score([[1], sequence])
    assert_idle(engine)
