"""Tokens read a step late, as on a GPU, are the same tokens: beside the step-by-step loop, and with planted faults."""

from __future__ import annotations

import pytest

from regraft.runtime.request import Request
from regraft.runtime.runner import Runner
from tests.runtime.engines import assert_idle, make_engine, make_prompts
from tests.runtime.test_fuzz import CROWDS, Crowd
from tests.runtime.toy import ToyModel

EOS = [7, 19, 33, 40, 51, 62]


def ends(outputs):
    return [(o.token_ids, o.finish_reason, o.logprobs) for o in outputs]


@pytest.mark.parametrize("number", range(len(CROWDS)))
def test_a_crowd_gets_what_a_run_alone_gives(number):
    model, fields = CROWDS[number]
    crowd = Crowd(number, model, {**fields, "overlaps": True})
    crowd.run(200)
    crowd.check()
    if crowd.model.rows:
        assert crowd.engine._loop.scheduler.num_preemptions > 10


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"eos_token_id": EOS},  # nobody knows beforehand when a request ends
        {"eos_token_id": EOS, "logprobs": True},
        {"do_sample": True, "temperature": 400.0, "top_k": 20, "seed": 5, "eos_token_id": EOS},
        {"repetition_penalty": 1.5},  # reads the tokens before
    ],
    ids=lambda settings: ", ".join(settings) or "greedy",
)
def test_every_kind_of_request_ends_alike(settings):
    prompts = make_prompts(20)
    results = []
    for overlaps in (False, True):
        engine = make_engine(overlaps=overlaps, cache_tokens=300)
        results.append(ends(engine.generate(prompts, max_new_tokens=[1, 2, 9, 30] * 5, **settings)))
        assert_idle(engine)
    assert results[0] == results[1]
    if "eos_token_id" in settings:
        assert {reason for _, reason, _ in results[0]} == {"stop", "length"}


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read():
    engine = make_engine(overlaps=True)
    engine.add_request([1, 2, 3], max_new_tokens=3)
    events = [engine.step() for _ in range(4)]
    assert [len(tokens) for tokens in events] == [0, 1, 1, 1]
    assert engine.model.num_steps == 3  # a last token that is known to be the last costs no step
    assert_idle(engine)


def test_a_stop_token_costs_one_step_of_which_nothing_is_kept():
    model = ToyModel()
    prompt = [1, 2, 3]
    made = model.continue_greedily(prompt, 30)
    stop = next(token for token in made if token not in made[:4])
    engine = make_engine(model, overlaps=True)
    (output,) = engine.generate([prompt], max_new_tokens=30, eos_token_id=stop)
    assert output.token_ids == made[: made.index(stop) + 1]
    assert model.num_steps == len(output.token_ids) + 1
    assert_idle(engine)


def test_new_weights_in_the_middle_meet_no_old_row():
    outputs = []
    for overlaps in (False, True):
        engine = make_engine(overlaps=overlaps)
        name = engine.add_request([1, 2, 3], max_new_tokens=8)
        while len(engine._loop.live[name].tokens) < 6:
            engine.step()
        engine.model.weight = 5
        events = []
        while engine.has_unfinished:
            events += engine.step()
        outputs.append(events[-1].output.token_ids)
    assert outputs[0] == outputs[1]
    assert outputs[0] != ToyModel().continue_greedily([1, 2, 3], 8)


def test_a_step_that_fails_leaves_what_was_chosen_before():
    engine = make_engine(overlaps=True)
    engine.add_request([1, 2, 3], max_new_tokens=8)
    engine.step()
    engine.step()
    engine.model.fails_in = 1
    with pytest.raises(ArithmeticError, match="the toy broke"):
        engine.step()
    *_, last = engine.step()
    assert last.output.finish_reason == "error"
    assert last.output.token_ids == ToyModel().continue_greedily([1, 2, 3], 2)
    assert_idle(engine)


def test_cancelled_and_closed_requests_have_no_token_that_was_not_read():
    engine = make_engine(overlaps=True)
    names = [engine.add_request([1, 2, 3], max_new_tokens=8) for _ in range(2)]
    engine.step()
    engine.step()
    requests = [engine._loop.live[name] for name in names]
    engine.cancel(names[0])
    engine.close()
    for request in requests:
        assert request.output.token_ids == ToyModel().continue_greedily([1, 2, 3], 1)
        assert request.output.finish_reason == "cancelled"


def keeps_no_token(monkeypatch):
    monkeypatch.setattr(Runner, "keep_tokens", lambda self, tokens, slots: None)


def never_knows_that_a_request_is_full(monkeypatch):
    monkeypatch.setattr(Request, "is_full", False)


def reads_processed_tokens_late(monkeypatch):
    monkeypatch.setattr("regraft.runtime.pending.Pending.needs_host", False)


@pytest.mark.parametrize(
    ("fault", "settings"),
    [
        (keeps_no_token, {}),
        (never_knows_that_a_request_is_full, {}),
        (reads_processed_tokens_late, {"repetition_penalty": 1.5}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_is_seen(fault, settings, monkeypatch):
    expected = ends(make_engine().generate(make_prompts(3), max_new_tokens=9, **settings))
    fault(monkeypatch)
    model = ToyModel()
    engine = make_engine(model, overlaps=True)
    try:
        outputs = ends(engine.generate(make_prompts(3), max_new_tokens=9, **settings))
    except (IndexError, RuntimeError, AssertionError):
        return
    assert outputs != expected or model.num_steps > 9
