"""What is found, what is not, and what is computed again: single steps of the prefix cache over the toy model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from regraft.runtime.config import EngineConfig
from regraft.runtime.engine import Engine
from regraft.runtime.errors import RequestError
from regraft.runtime.prefix_cache import PrefixCache
from regraft.runtime.prefix_keys import KeyChain, num_shared
from tests.runtime.engines import assert_idle, make_engine
from tests.runtime.toy import ToyModel

PAGE, CHUNK = 4, 8  # so that checkpoints are at multiples of 8

STORY = [(7 * i + i * i) % 64 for i in range(60)]


def make(model=None, **fields):
    fields = {"prefix_cache": True, "max_batch_tokens": 64, **fields}
    return make_engine(model or ToyModel(), **fields)


def ask(engine, prompt, count=3, **fields):
    """The tokens that one prompt is continued with, and how many tokens were not computed for it."""
    before = engine.stats
    (output,) = engine.generate([prompt], max_new_tokens=count, **fields)
    assert output.finish_reason == "length"
    assert_idle(engine)
    assert engine.stats.prefix_queried_tokens - before.prefix_queried_tokens == len(prompt)
    return output.token_ids, engine.stats.prefix_hit_tokens - before.prefix_hit_tokens


def test_without_it_nothing_is_kept():
    engine = make(prefix_cache=False)
    for _ in range(2):
        engine.generate([STORY], max_new_tokens=3)
        assert engine._loop.scheduler.groups[0].pool.kept == []
    assert engine.stats.prefix_queried_tokens == engine.stats.prefix_hit_tokens == 0
    assert engine.stats.computed_tokens == 2 * (60 + 2)


@pytest.mark.parametrize("length", range(1, 2 * CHUNK + PAGE + 2))
@pytest.mark.parametrize("kind", ["rows", "both", "states"])
def test_a_text_asked_for_again_is_computed_from_its_last_boundary(kind, length):
    """At a boundary exactly, the last page is computed again: there is always a token to get logits from."""
    model = ToyModel(has_rows=kind != "states", has_states=kind != "rows")
    engine = make(model)
    expected = model.continue_greedily(STORY[:length], 3)
    assert ask(engine, STORY[:length]) == (expected, 0)
    unit = PAGE if kind == "rows" else CHUNK
    assert ask(engine, STORY[:length]) == (expected, (length - 1) // unit * unit)
    assert ask(engine, STORY[:length]) == (expected, (length - 1) // unit * unit)


def test_one_token_is_computed_where_all_others_are_there():
    engine = make()
    ask(engine, STORY[: 2 * CHUNK])
    before = engine.stats.computed_tokens
    tokens, hit = ask(engine, STORY[: 2 * CHUNK + 1], count=1)
    assert hit == 2 * CHUNK
    assert engine.stats.computed_tokens - before == 1
    assert tokens == engine.model.continue_greedily(STORY[: 2 * CHUNK + 1], 1)


def test_an_answer_is_part_of_what_is_kept():
    """The next turn of a conversation begins with the last one's answer."""
    engine = make(ToyModel(has_states=False))
    answer, _ = ask(engine, STORY[:10], count=11)
    tokens, hit = ask(engine, STORY[:10] + answer + [1, 2])
    assert (
        hit == 20
    )  # full pages of the 20 tokens that were computed; of the last one no row was made
    assert tokens == engine.model.continue_greedily(STORY[:10] + answer + [1, 2], 3)
    both = make()
    answer, _ = ask(both, STORY[:10], count=11)
    assert ask(both, STORY[:10] + answer + [1, 2])[1] == 16  # passed while it decoded


def test_where_two_texts_part_there_is_a_checkpoint_for_the_third():
    engine = make()
    ask(engine, STORY[:30] + [1] * 10)
    _, second = ask(engine, STORY[:30] + [2] * 10)
    _, third = ask(engine, STORY[:30] + [3] * 10)
    assert (second, third) == (0, 24)


@pytest.mark.parametrize("kind", ["rows", "both", "states"])
def test_of_many_that_arrive_together_one_computes_what_they_share(kind):
    model = ToyModel(has_rows=kind != "states", has_states=kind != "rows")
    engine = make(model, max_batch_tokens=256)
    prompts = [STORY[:40] + [i] * 5 for i in range(8)]
    outputs = engine.generate(prompts, max_new_tokens=2)
    for prompt, output in zip(prompts, outputs):
        assert output.token_ids == model.continue_greedily(prompt, 2)
    assert engine.stats.prefix_hit_tokens == 7 * 40
    assert_idle(engine)


def test_several_answers_to_one_prompt_share_it():
    engine = make()
    outputs = engine.generate([STORY[:41]], max_new_tokens=2, num_return_sequences=4)
    expected = engine.model.continue_greedily(STORY[:41], 2)
    assert [output.token_ids for output in outputs] == [expected] * 4
    assert engine.stats.prefix_hit_tokens == 3 * 40


def test_two_tenants_share_nothing():
    engine = make()
    for salt in ("a", "b", None):
        assert ask(engine, STORY, cache_salt=salt)[1] == 0
        assert ask(engine, STORY, cache_salt=salt)[1] == 56
    outputs = engine.generate([STORY] * 3, max_new_tokens=1, cache_salt=["a", "c", "d"])
    assert len(outputs) == 3
    assert engine.stats.prefix_hit_tokens == 4 * 56


@pytest.mark.parametrize("salt", ["", 3, b"a"])
def test_a_salt_is_a_text(salt):
    with pytest.raises(RequestError, match="cache_salt"):
        make().generate([STORY], cache_salt=salt)


def test_what_other_weights_computed_is_not_found():
    engine = make()
    old, _ = ask(engine, STORY)
    engine.model.weight = 5
    new, hit = ask(engine, STORY)
    assert hit == 0
    assert new != old
    assert new == engine.model.continue_greedily(STORY, 3)
    assert ask(engine, STORY) == (new, 56)
    engine.model.weight = 0  # and back: what was there is gone
    assert ask(engine, STORY) == (old, 0)


def test_weights_whose_change_no_counter_shows(monkeypatch):
    """Writes through `.data`: the engine has to be told."""
    engine = make()
    monkeypatch.setattr(type(engine.model), "weights_version", lambda self: 0)
    ask(engine, STORY)
    engine.model.weight = 5
    engine.weights_changed()
    new, hit = ask(engine, STORY)
    assert hit == 0
    assert new == engine.model.continue_greedily(STORY, 3)
    assert ask(engine, STORY) == (new, 56)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("kind", ["rows", "both", "states"])
def test_weights_that_change_between_steps(kind, overlaps):
    """Requests that share pages start over, each in pages of its own; tokens made before stay."""
    model = ToyModel(has_rows=kind != "states", has_states=kind != "rows")
    engine = make(model, overlaps=overlaps)
    ask(engine, STORY[:40])
    prompts = [[*STORY[:40], i] for i in range(3)]
    names = [engine.add_request(prompt, max_new_tokens=12) for prompt in prompts]
    for _ in range(5):
        engine.step()
    known = {name: list(engine._loop.live[name].tokens) for name in names}
    model.weight = 9
    outputs = {}
    while engine.has_unfinished:
        for event in engine.step():
            if event.output is not None:
                outputs[event.request_id] = event.output
    for name, prompt in zip(names, prompts):
        before = [token for token in known[name] if token >= 0]
        made = outputs[name].token_ids
        told = len(prompt) + len(made)
        more = model.continue_greedily(before, told - len(before))
        if overlaps:  # a token that was chosen already is the old weights'
            before = prompt + made[: len(before) - len(prompt) + 1]
            more = model.continue_greedily(before, told - len(before))
        assert prompt + made == before + more
    assert_idle(engine)


def test_a_model_without_room_for_checkpoints_says_so():
    notes = []
    report = SimpleNamespace(notes=notes)
    config = EngineConfig(prefix_cache=True, prefix_checkpoints=0, cache_tokens=400)
    Engine(ToyModel(), config, report=report)
    assert notes == ["prefix cache: no room for a copy of recurrent states, so nothing is reused"]
    Engine(ToyModel(has_states=False), config, report=report)
    assert len(notes) == 1


def test_scores_are_computed_whatever_is_there():
    engine = make()
    ask(engine, STORY)
    (logits,) = engine.score([STORY])
    assert (logits == engine.model.logits_of(STORY)).all()
    assert ask(engine, STORY)[1] == 56


def test_room_is_made_by_who_was_not_asked_for_longest():
    engine = make(ToyModel(has_states=False), cache_tokens=80)
    others = [[i] * 21 for i in (1, 2, 3)]
    for prompt in others:
        ask(engine, prompt)
    ask(engine, others[0])
    ask(engine, [9] * 25)  # 7 of 20 pages: those of the second prompt
    assert engine.stats.prefix_evictions > 0
    assert ask(engine, others[0], count=1)[1] == 20
    assert ask(engine, others[1], count=1)[1] < 20


def test_what_is_in_use_is_never_evicted():
    engine = make(ToyModel(has_states=False), cache_tokens=100)
    ask(engine, STORY[:40])
    name = engine.add_request(STORY[:41], max_new_tokens=15)
    engine.step()
    used = list(engine._loop.live[name].held[0].pages)
    engine.generate([[i] * 30 for i in range(4)], max_new_tokens=2)
    assert engine._loop.live[name].held[0].pages[: len(used)] == used
    while engine.has_unfinished:
        last = engine.step()[-1]
    assert last.output.token_ids == engine.model.continue_greedily(STORY[:41], 15)


def test_what_led_to_nan_is_not_found_again():
    class Broken(ToyModel):
        is_broken = True

        def forward(self, inputs):
            logits = super().forward(inputs)
            return logits * float("nan") if self.is_broken else logits

    engine = make(Broken())
    (output,) = engine.generate([STORY], max_new_tokens=3)
    assert output.finish_reason == "error"
    engine.model.is_broken = False
    assert engine.stats.cached_pages == engine.stats.checkpoints == 0
    assert ask(engine, STORY) == (engine.model.continue_greedily(STORY, 3), 0)


def test_a_callers_processor_that_raises_costs_others_nothing():
    def broken(tokens, scores):
        raise ZeroDivisionError

    engine = make()
    ask(engine, STORY)
    (output,) = engine.generate([STORY], max_new_tokens=3, logits_processor=[broken])
    assert output.finish_reason == "error"
    assert ask(engine, STORY)[1] == 56


def test_after_a_step_that_failed_nothing_is_found():
    engine = make()
    ask(engine, STORY)
    engine.model.fails_in = 1
    with pytest.raises(ArithmeticError):
        engine.generate([[1, 2, 3]], max_new_tokens=3)
    assert engine.stats.cached_pages == engine.stats.checkpoints == 0
    assert_idle(engine)
    assert ask(engine, STORY)[1] == 0


def test_a_preempted_request_finds_its_own_pages():
    engine = make(ToyModel(has_states=False))
    name = engine.add_request(STORY[:40], max_new_tokens=4)
    engine.step()
    scheduler = engine._loop.scheduler
    scheduler._preempt(scheduler.running[-1])
    engine.step()
    assert engine.stats.prefix_hit_tokens == 40
    while engine.has_unfinished:
        last = engine.step()[-1]
    assert last.request_id == name
    assert last.output.token_ids == engine.model.continue_greedily(STORY[:40], 4)


def test_a_request_that_grows_too_long_for_its_rows_finds_those_of_its_length():
    model = ToyModel(has_states=False, switch_lengths=(42,))
    engine = make(model)
    ask(engine, STORY[:50])
    before = engine.stats
    (output,) = engine.generate([STORY[:40]], max_new_tokens=8)
    assert output.token_ids == model.continue_greedily(STORY[:40], 8)
    # Its own rows are those of a short text until it is longer than 42; then it asks again.
    assert engine.stats.prefix_queried_tokens - before.prefix_queried_tokens == 40 + 43
    assert engine.stats.prefix_hit_tokens - before.prefix_hit_tokens == 40
    assert ask(engine, STORY[:40], count=1)[1] == 36


def test_chains_tell_where_texts_part():
    one, two = KeyChain(), KeyChain()
    root = (0, 0, None)
    a = one.upto(root, STORY, 60, 4)
    assert len(a) == 15
    for parts_at in range(60):
        text = [*STORY[:parts_at], 99, *STORY[parts_at + 1 :]]
        assert num_shared(a, KeyChain().upto(root, text, 60, 4)) == parts_at // 4
    assert num_shared(a, two.upto(root, STORY, 30, 4)) == 7
    assert num_shared(a, two.upto((1, 0, None), STORY, 60, 4)) == 0
    assert num_shared(a, two.upto((0, 0, "a"), STORY, 60, 4)) == 0
    assert [block.key for block in a] == [block.key for block in two.upto(root, STORY, 60, 4)]


def ignores_the_salt(monkeypatch):
    upto = KeyChain.upto
    monkeypatch.setattr(
        KeyChain, "upto", lambda self, root, *rest: upto(self, (*root[:2], None), *rest)
    )


def ignores_the_weights(monkeypatch):
    monkeypatch.setattr(PrefixCache, "clear", lambda self, version=None: None)


def trusts_everybody(monkeypatch):
    monkeypatch.setattr(PrefixCache, "forget", lambda self, request: None)


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        (ignores_the_salt, test_two_tenants_share_nothing),
        (ignores_the_weights, test_what_other_weights_computed_is_not_found),
        (ignores_the_weights, test_after_a_step_that_failed_nothing_is_found),
        (trusts_everybody, test_what_led_to_nan_is_not_found_again),
    ],
    ids=lambda value: value.__name__,
)
def test_a_fault_is_seen(fault, test, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test()
