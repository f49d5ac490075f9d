"""Order, cuts, admission and preemption, without a model."""

from __future__ import annotations

import random

import pytest
import torch

from regraft.rewriter.declare import Reach
from regraft.runtime.capacity import Capacity
from regraft.runtime.config import EngineConfig
from regraft.runtime.request import Request, ScoreRequest, Status
from regraft.runtime.sampling_params import SamplingParams
from regraft.runtime.scheduler import Scheduler


def make_scheduler(
    *, budget=32, chunk=8, requests=8, pages=100, page_size=4, switch=(), has_states=False
):
    config = EngineConfig(
        max_batch_tokens=budget, chunk_size=chunk, max_requests=requests, page_size=page_size
    )
    capacity = Capacity({Reach(): 1 + pages}, page_size, 1 + requests)
    return Scheduler(config, capacity, switch, has_states=has_states)


def make_request(number, length, new=4):
    return Request(f"r{number}", number, [1] * length, SamplingParams(max_new_tokens=new))


def run_step(scheduler):
    """One step in which every finished prompt makes a token; the planned (id, start, end)."""
    spans = scheduler.schedule()
    plan = [(span.request.request_id, span.start, span.end) for span in spans]
    for span in spans:
        scheduler.commit(span)
        if span.num_logits and not isinstance(span.request, ScoreRequest):
            scheduler.append(span.request, 1)
            if span.request.finish_reason_at(len(span.request.tokens) - 1):
                scheduler.remove(span.request)
        elif not span.request.num_remaining:
            scheduler.remove(span.request)
    return plan


def test_an_idle_scheduler_plans_nothing():
    assert make_scheduler().schedule() == []


def test_prompts_are_packed_with_decodes_and_cut_at_multiples_of_the_chunk():
    scheduler = make_scheduler(budget=32, chunk=8)
    for number, length in enumerate([5, 50, 3]):
        scheduler.add(make_request(number, length))
    # 27 tokens are left for the second prompt: cut at 24, a multiple of 8 from its own start.
    assert run_step(scheduler) == [("r0", 0, 5), ("r1", 0, 24), ("r2", 0, 3)]
    assert run_step(scheduler) == [("r0", 5, 6), ("r2", 3, 4), ("r1", 24, 50)]
    assert run_step(scheduler) == [("r0", 6, 7), ("r1", 50, 51), ("r2", 4, 5)]


def test_prompts_of_a_model_with_states_take_turns(monkeypatch):
    monkeypatch.setattr("regraft.runtime.scheduler.TURN", 16)
    scheduler = make_scheduler(budget=64, chunk=8, has_states=True)
    for number, length in enumerate([100, 41, 3, 30]):
        scheduler.add(make_request(number, length))
    # Each 16 at first; the 13 that are left then go to the oldest, in whole chunks.
    assert run_step(scheduler) == [("r0", 0, 24), ("r1", 0, 16), ("r2", 0, 3), ("r3", 0, 16)]
    assert run_step(scheduler) == [("r2", 3, 4), ("r0", 24, 56), ("r1", 16, 32), ("r3", 16, 30)]
    # Alone, or beside those that need little, a prompt has the whole step.
    assert run_step(scheduler) == [
        ("r2", 4, 5), ("r3", 30, 31), ("r0", 56, 100), ("r1", 32, 41)
    ]  # fmt: skip


def test_what_a_step_has_left_goes_round_in_turns(monkeypatch):
    monkeypatch.setattr("regraft.runtime.scheduler.TURN", 8)
    scheduler = make_scheduler(budget=64, chunk=8, has_states=True)
    for number in range(3):
        scheduler.add(make_request(number, 50))
    assert run_step(scheduler) == [("r0", 0, 24), ("r1", 0, 24), ("r2", 0, 16)]
    assert run_step(scheduler) == [("r0", 24, 48), ("r1", 24, 48), ("r2", 16, 32)]
    assert run_step(scheduler) == [("r0", 48, 50), ("r1", 48, 50), ("r2", 32, 50)]


def test_a_chunk_that_may_not_be_cut_is_longer_than_a_turn(monkeypatch):
    monkeypatch.setattr("regraft.runtime.scheduler.TURN", 4)
    scheduler = make_scheduler(budget=32, chunk=8, has_states=True)
    scheduler.add(ScoreRequest("s", 0, [1] * 40, [20, 40], torch.empty(40, 2)))
    scheduler.add(make_request(1, 30))
    assert run_step(scheduler) == [("s", 0, 20), ("r1", 0, 8)]
    assert run_step(scheduler) == [("s", 20, 40), ("r1", 8, 16)]


def test_the_oldest_prompt_gets_on_however_many_requests_decode():
    scheduler = make_scheduler(budget=8, chunk=8, requests=20)
    for number in range(6):
        scheduler.add(make_request(number, 1, new=50))
    run_step(scheduler)
    scheduler.add(make_request(6, 2))
    assert run_step(scheduler)[-1] == ("r6", 0, 2)
    scheduler.running[0].num_cached = 0  # as after a change of weights: one token and three more
    for _ in range(2):
        run_step(scheduler)
    assert all(request.num_remaining == 1 for request in scheduler.running)


def test_waiting_requests_are_admitted_in_order_and_never_overtaken():
    scheduler = make_scheduler(requests=2)
    for number in range(4):
        scheduler.add(make_request(number, 4, new=1 + number))
    assert [name for name, *_ in run_step(scheduler)] == ["r0", "r1"]  # r0 ends at once
    assert [name for name, *_ in run_step(scheduler)] == ["r1", "r2"]  # r1 ends
    assert [name for name, *_ in run_step(scheduler)] == ["r2", "r3"]


def test_the_youngest_gives_up_its_pages_and_comes_back():
    scheduler = make_scheduler(pages=7, page_size=4)
    old, young = make_request(0, 11, new=9), make_request(1, 7, new=2)
    for request in (old, young):
        scheduler.add(request)
    run_step(scheduler)
    assert (len(old.held[0].pages), len(young.held[0].pages)) == (3, 2)
    run_step(scheduler)  # both are a token longer: 3 pages of old hold 12
    assert old.num_cached == 12
    assert young.status is Status.FINISHED
    other = make_request(2, 8, new=8)
    scheduler.add(other)
    run_step(scheduler)
    assert other.status is Status.RUNNING
    while other.status is Status.RUNNING and scheduler.running[0] is old:
        run_step(scheduler)
    assert scheduler.num_preemptions == 1
    assert other.status is Status.WAITING
    assert (other.held[0].pages, other.slot, other.num_cached) == ([], 0, 0)
    while scheduler.running or scheduler.waiting:
        run_step(scheduler)
    assert old.num_output == 9
    assert other.num_output == 8
    assert scheduler.groups[0].pool.num_free == 7
    assert scheduler.slots.num_free == 8
    assert not scheduler.groups[0].tables.array.any()


def test_a_preempted_request_is_admitted_before_younger_ones():
    scheduler = make_scheduler()
    for number in range(3):
        scheduler.add(make_request(number, 4, new=50))
    run_step(scheduler)
    scheduler.add(make_request(3, 4))
    scheduler._preempt(scheduler.running[-1])
    scheduler._preempt(scheduler.running[-1])
    assert [request.request_id for request in scheduler.waiting.values()] == ["r1", "r2", "r3"]


def test_a_newcomer_leaves_each_running_request_a_page():
    scheduler = make_scheduler(pages=5, page_size=4)
    scheduler.add(make_request(0, 8, new=8))
    run_step(scheduler)
    newcomer = make_request(1, 8, new=8)
    scheduler.add(newcomer)
    run_step(scheduler)  # 2 of the 5 pages are free once r0 has taken its third
    assert newcomer.status is Status.WAITING


def test_growing_past_a_switch_length_starts_over_in_place():
    scheduler = make_scheduler(switch=(8,), page_size=4)
    request = make_request(0, 7, new=5)
    scheduler.add(request)
    assert run_step(scheduler) == [("r0", 0, 7)]
    assert run_step(scheduler) == [("r0", 7, 8)]  # its ninth token was made: longer than 8
    pages = list(request.held[0].pages)
    assert run_step(scheduler) == [("r0", 0, 9)]
    assert request.held[0].pages[:2] == pages
    assert len(request.held[0].pages) == 3
    assert run_step(scheduler) == [("r0", 9, 10)]


def test_a_prompt_longer_than_a_switch_length_never_starts_over():
    scheduler = make_scheduler(switch=(8,))
    scheduler.add(make_request(0, 9))
    assert run_step(scheduler) == [("r0", 0, 9)]
    assert run_step(scheduler) == [("r0", 9, 10)]


def test_restarting_keeps_pages_and_slots():
    scheduler = make_scheduler()
    scheduler.add(make_request(0, 6))
    run_step(scheduler)
    held = list(scheduler.running[0].held[0].pages), scheduler.running[0].slot
    scheduler.renew_weights(1)
    assert run_step(scheduler) == [("r0", 0, 7)]
    assert (scheduler.running[0].held[0].pages, scheduler.running[0].slot) == held


def test_chunks_of_a_scored_sequence_are_its_own_and_never_split():
    scheduler = make_scheduler(budget=16, chunk=8)
    scheduler.add(ScoreRequest("s", 0, [1] * 20, [3, 15, 20], torch.empty(0)))
    scheduler.add(make_request(1, 8, new=9))
    assert run_step(scheduler) == [("s", 0, 3), ("r1", 0, 8)]
    assert run_step(scheduler) == [("r1", 8, 9), ("s", 3, 15)]
    assert run_step(scheduler) == [("r1", 9, 10), ("s", 15, 20)]


def most_preemptions(most, monkeypatch):
    """Of one request, where older ones grow all the time and need its pages."""
    monkeypatch.setattr("regraft.runtime.scheduler.MOST_PREEMPTIONS", most)
    scheduler = make_scheduler(pages=64, page_size=1, budget=60, requests=20)
    requests = [make_request(number, 1, new=60) for number in range(16)]
    for request in requests:
        scheduler.add(request)
    while scheduler.running or scheduler.waiting:
        run_step(scheduler)
    assert all(request.num_output == 60 for request in requests)
    return max(request.num_preemptions for request in requests)


def test_a_request_is_preempted_a_few_times_and_then_never_again(monkeypatch):
    unbounded = most_preemptions(1000, monkeypatch)
    assert unbounded > 3
    for most in range(1, unbounded):
        assert most_preemptions(most, monkeypatch) == most


@pytest.mark.parametrize("seed", range(20))
def test_every_request_ends_whatever_the_pools(seed):
    """Each step has work within its budget, and all requests end in bounded time."""
    rng = random.Random(seed)
    page_size, pages = rng.choice([1, 2, 4]), rng.randint(12, 30)
    budget = rng.choice([8, 12, 40])
    scheduler = make_scheduler(
        budget=budget, chunk=8, requests=rng.randint(1, 6), pages=pages, page_size=page_size
    )
    longest = pages * page_size
    requests, arrivals = [], [rng.randrange(60) for _ in range(25)]
    for step in range(6000):
        for _ in range(arrivals.count(step)):
            length = rng.randint(1, longest - 1)
            new = rng.randint(1, longest - length)
            requests.append(make_request(len(requests), length, new))
            scheduler.add(requests[-1])
        plan = run_step(scheduler)
        assert sum(end - start for _, start, end in plan) <= budget
        assert len({name for name, *_ in plan}) == len(plan)
        if step > 60 and not (scheduler.running or scheduler.waiting):
            break
    assert len(requests) == 25
    for request in requests:
        assert request.status is Status.FINISHED
        assert request.num_output == request.params.max_new_tokens
    assert scheduler.groups[0].pool.num_free == pages
