"""Random crowds against the toy model, with everything free full of NaN; then the same with faults
put in on purpose, which must be seen."""

from __future__ import annotations

import random

import pytest
import torch

from regraft.runtime import batch as batch_module
from regraft.runtime.scheduler import Scheduler
from regraft.runtime.states import SlotPool
from tests.runtime.engines import assert_idle, make_engine
from tests.runtime.toy import ToyModel

NAN = float("nan")

CROWDS = [
    # model, engine: most of them preempt all the time
    ({}, {"cache_tokens": 60, "page_size": 4}),
    ({}, {"cache_tokens": 40, "page_size": 1, "max_requests": 3, "max_batch_tokens": 8}),
    ({"min_tokens": 7}, {"cache_tokens": 70, "page_size": 5, "max_requests": 20}),
    ({"has_states": False, "switch_lengths": (5, 12, 13)}, {"cache_tokens": 50, "page_size": 3}),
    ({"has_rows": False}, {"max_requests": 4, "max_batch_tokens": 16}),
]


class Crowd:
    """Callers who come, go and ask for the wrong thing, and what each must get in the end."""

    def __init__(self, seed, model, fields):
        self.rng = random.Random(seed)
        self.model = ToyModel(**{"max_positions": 60, **model})
        self.engine = make_engine(self.model, **fields)
        self.longest = min(60, self.engine.max_cached)
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.cancelled: set[str] = set()
        self.tokens: dict[str, list[int]] = {}
        self.outputs = {}
        self.num_wrong = 0

    def poison(self):
        """NaN into every page and slot that nobody owns, the scratch ones too."""
        loop = self.engine._loop
        free = {group.reach: group.pool.free for group in loop.scheduler.groups}
        for row in self.model.rows:
            loop.runner.pools[row.name][[0, *free[row.reach]]] = NAN
        for state in self.model.states:
            loop.runner.pools[state.name][[0, *loop.scheduler.slots._free]] = NAN

    def arrive(self):
        for _ in range(self.rng.choice([1, 1, 6])):
            length = self.rng.randint(1, self.rng.choice([6, self.longest]))
            new = self.rng.randint(1, min(20, self.longest - length + 1))
            prompt = [self.rng.randrange(64) for _ in range(length)]
            name = self.engine.add_request(prompt, max_new_tokens=new)
            self.prompts[name] = (prompt, new)

    def cancel(self):
        live = sorted(self.engine._loop.live)
        if live:
            name = self.rng.choice(live)
            self.engine.cancel(name)
            self.cancelled.add(name)

    def ask_wrongly(self):
        prompt, fields = self.rng.choice(
            [([], {}), ([64], {}), ([1] * 61, {}), ([1], {"max_new_tokens": 0}), ([1], {"x": 1})]
        )
        with pytest.raises(ValueError, match=r"\w"):
            self.engine.add_request(prompt, **fields)
        self.num_wrong += 1

    def score(self):
        sequences = [
            [self.rng.randrange(64) for _ in range(self.rng.randint(1, self.longest))]
            for _ in range(self.rng.randint(1, 3))
        ]
        schedule = self.rng.choice(["prefill", "decode", 3, 7])
        for sequence, logits in zip(sequences, self.engine.score(sequences, schedule)):
            assert torch.equal(logits, self.model.logits_of(sequence))

    def step(self):
        for event in self.engine.step():
            if event.token_id is not None:
                self.tokens.setdefault(event.request_id, []).append(event.token_id)
            if event.output is not None:
                self.outputs[event.request_id] = event.output

    def run(self, steps):
        actions = [self.arrive, self.cancel, self.ask_wrongly, self.score]
        for _ in range(steps):
            self.poison()
            for action in self.rng.choices(actions, [30, 8, 3, 1], k=self.rng.choice([0, 0, 1])):
                action()
            self.step()
        while self.engine.has_unfinished:
            self.poison()
            self.step()

    def check(self):
        assert_idle(self.engine)
        assert set(self.outputs) == set(self.prompts)
        for name, (prompt, new) in self.prompts.items():
            output = self.outputs[name]
            made = output.token_ids
            assert self.tokens.get(name, []) == made
            expected = self.model.continue_greedily(prompt, len(made))
            assert made == expected
            if output.finish_reason == "cancelled":
                assert name in self.cancelled
            else:
                assert output.finish_reason == "length"
                assert len(made) == new


@pytest.mark.parametrize("number", range(len(CROWDS)))
def test_everybody_gets_what_a_run_alone_gives(number):
    crowd = Crowd(number, *CROWDS[number])
    crowd.run(400)
    crowd.check()
    assert len(crowd.outputs) > 50
    assert len(crowd.cancelled) > 10
    assert crowd.num_wrong > 5
    if crowd.model.rows:
        assert crowd.engine._loop.scheduler.num_preemptions > 10


def forgets_to_start_over(monkeypatch):
    """A preempted request goes on from rows that it no longer has."""
    preempt, share = Scheduler._preempt, Scheduler._share

    def mutant(self, request):
        cached = request.num_cached
        preempt(self, request)
        request.num_cached = cached

    def keeps_count(self, request, hit):
        cached = request.num_cached
        share(self, request, hit)
        request.num_cached = max(cached, hit.length)

    monkeypatch.setattr(Scheduler, "_preempt", mutant)
    monkeypatch.setattr(Scheduler, "_share", keeps_count)


def hands_a_slot_out_twice(monkeypatch):
    monkeypatch.setattr(SlotPool, "take", lambda self: self._free[-1])


def writes_one_row_too_far(monkeypatch):
    mapping = batch_module._slot_mapping
    monkeypatch.setattr(batch_module, "_slot_mapping", lambda *a: (mapping(*a) + 1) % 60)


def leaks_the_pages_of_who_leaves(monkeypatch):
    release = Scheduler._release

    def mutant(self, request):
        request.held[0].pages = request.held[0].pages[:-1]
        release(self, request)

    monkeypatch.setattr(Scheduler, "_release", mutant)


def never_grows(monkeypatch):
    monkeypatch.setattr(Scheduler, "_grow_running", lambda self: False)


def ignores_switch_lengths(monkeypatch):
    monkeypatch.setattr(Scheduler, "append", lambda self, request, t: request.tokens.append(t))


def keeps_a_states_old_bytes(monkeypatch):
    """What an operator must not do: it starts from the slot's content where it should from zero."""
    forward = ToyModel.forward

    def mutant(self, inputs):
        inputs = {**inputs, "context_lens": inputs["context_lens"].clamp(min=1)}
        return forward(self, inputs)

    monkeypatch.setattr(ToyModel, "forward", mutant)
    monkeypatch.setattr("tests.runtime.toy.check_inputs", lambda *a: None)


FAULTS = [
    (forgets_to_start_over, 0),
    (hands_a_slot_out_twice, 0),
    (writes_one_row_too_far, 0),
    (leaks_the_pages_of_who_leaves, 0),
    (never_grows, 0),
    (ignores_switch_lengths, 3),
    (keeps_a_states_old_bytes, 4),
]


@pytest.mark.parametrize(
    ("fault", "number"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_fault_is_seen(fault, number, monkeypatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        run_and_check(number)


def run_and_check(number):
    crowd = Crowd(number, *CROWDS[number])
    crowd.run(150)
    crowd.check()
