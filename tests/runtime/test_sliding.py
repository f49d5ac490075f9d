"""Rows of a bounded reach: pages that nobody will read any more are given back while a request runs."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from regraft.rewriter.declare import Reach, RowSpec, field_of, reaches_of
from regraft.runtime import capacity as capacity_module
from regraft.runtime import prefix_keys
from regraft.runtime.capacity import Capacity, plan_capacity
from regraft.runtime.config import EngineConfig
from regraft.runtime.page_groups import PageGroup, most_pages
from regraft.runtime.pages import BlockTables
from regraft.runtime.prefix_pages import Found
from regraft.runtime.request import ScoreRequest, Status
from regraft.runtime.scheduler import Scheduler
from tests.runtime import test_prefix_fuzz as prefix_fuzz
from tests.runtime.engines import assert_idle, make_engine
from tests.runtime.test_fuzz import NAN, Crowd
from tests.runtime.test_scheduler import make_request, run_step
from tests.runtime.toy import ToyModel

WINDOW, CHUNK = Reach(window=9), Reach(chunk=12)
STORY = [(7 * i + i * i) % 64 for i in range(400)]


def sliding(*reaches, has_rows=False, **fields):
    """A toy whose rows have these reaches; with `has_rows`, some that reach back to the start as well."""
    return ToyModel(has_rows=has_rows, has_states=False, reaches=reaches, **fields)


@pytest.mark.parametrize("reach", [WINDOW, CHUNK, Reach(window=5, chunk=12), Reach(window=1)])
def test_a_reach_says_what_a_token_and_all_behind_it_read(reach):
    for position in range(60):
        read = [
            at
            for at in range(position + 1)
            if (not reach.window or position - at < reach.window)
            and (not reach.chunk or at // reach.chunk == position // reach.chunk)
        ]
        assert reach.first(position) == read[0]
        assert reach.first(position) <= reach.first(position + 1)
        assert len(read) <= reach.size
        for size in (1, 3, 4):
            for count in (1, 2, 7):
                pages = (position + count - 1) // size - reach.first(position) // size + 1
                assert pages <= most_pages(reach, count, size)


def test_rows_are_told_apart_by_their_reach():
    rows = [
        RowSpec(str(i), (1,), torch.float32, reach)
        for i, reach in enumerate([WINDOW, Reach(), WINDOW, CHUNK])
    ]
    assert reaches_of(rows) == (Reach(), CHUNK, WINDOW)
    assert reaches_of([]) == (Reach(),)
    names = {
        field_of(name, reach)
        for name in ("block_table", "slot_mapping")
        for reach in reaches_of(rows)
    }
    assert len(names) == 6
    assert field_of("block_table", Reach()) == "block_table"
    assert field_of("cu_seqlens", WINDOW) == "cu_seqlens"


@pytest.mark.parametrize("page_size", [1, 4, 5])
@pytest.mark.parametrize("reaches", [(WINDOW,), (CHUNK,), (WINDOW, CHUNK)], ids=str)
def test_a_request_of_any_length_in_constant_pages(reaches, page_size):
    fields = {"max_positions": None, "vocab_size": 64}
    model = sliding(*reaches, **fields)
    sizes = {"max_batch_tokens": 16, "cache_tokens": 34, "page_size": page_size}
    engine = make_engine(model, **sizes)
    scheduler = engine._loop.scheduler
    assert engine.max_cached > 10**9
    name = engine.add_request(STORY[:150], max_new_tokens=250)
    most = [0] * len(reaches)
    tokens = []
    while engine.has_unfinished:
        for row in model.rows:
            free = next(g.pool.free for g in scheduler.groups if g.reach == row.reach)
            engine._loop.runner.pools[row.name][[0, *free]] = NAN
        tokens += [event.token_id for event in engine.step()]
        for at, group in enumerate(scheduler.groups):
            most[at] = max(most[at], group.pool.num_pages - 1 - group.pool.num_free)
    assert len(tokens) == 250
    assert tokens == model.continue_greedily(STORY[:150], 250), name
    for pool, group, used in zip(engine.stats.pools, scheduler.groups, most):
        assert used <= pool.most_per_request <= most_pages(group.reach, 16, page_size)
        assert used < -(-400 // page_size) // 4
    assert_idle(engine)


def test_rows_that_reach_back_to_the_start_limit_a_request():
    model = sliding(WINDOW, has_rows=True, max_positions=None)
    engine = make_engine(model, max_batch_tokens=16, cache_tokens=80, page_size=4)
    assert engine.max_cached == 80
    (output,) = engine.generate([STORY[:40]], max_new_tokens=40)
    assert output.token_ids == model.continue_greedily(STORY[:40], 40)
    whole, near = engine.stats.pools
    assert (whole.reach, whole.most_per_request) == ("all", None)
    assert (near.reach, near.most_per_request) == ("window 9", 7)
    assert engine.stats.free_pages == whole.free_pages + near.free_pages


def test_a_step_that_would_not_fit_into_the_window_s_pages_limits_a_request():
    model = sliding(WINDOW, max_positions=None)
    assert make_engine(model, max_batch_tokens=32, cache_tokens=40).max_cached == 40
    engine = make_engine(model, max_batch_tokens=16, cache_tokens=28)
    assert engine.max_cached > 10**9
    for schedule in ("prefill", "decode", 7):
        (logits,) = engine.score([STORY[:90]], schedule=schedule)
        assert torch.equal(logits, model.logits_of(STORY[:90]))
    assert_idle(engine)


def test_capacity_of_both(monkeypatch):
    model = sliding(WINDOW, has_rows=True, max_positions=None)
    config = EngineConfig(cache_tokens=4000, page_size=4, max_requests=3, max_batch_tokens=64)
    # 9 tokens lie in 3 pages; one more a request for what is new, and 16 for a step's tokens.
    assert plan_capacity(config, model) == Capacity({Reach(): 1001, WINDOW: 1 + 3 * 4 + 16}, 4, 4)
    small = EngineConfig(cache_tokens=40, page_size=4, max_requests=3, max_batch_tokens=64)
    assert plan_capacity(small, model) == Capacity({Reach(): 11, WINDOW: 11}, 4, 4)
    keeps = EngineConfig(
        cache_tokens=4000, page_size=4, max_requests=3, max_batch_tokens=64, prefix_cache=True
    )
    assert plan_capacity(keeps, model).pages[WINDOW] == 1 + 2 * (3 * 4 + 16)
    monkeypatch.setattr(capacity_module, "_free_host_memory", lambda: 40_000)
    shared = EngineConfig(memory_fraction=0.5, page_size=4, max_requests=3, max_batch_tokens=64)
    # 8 bytes a row: 29 pages of 32 bytes for the window, the rest of 20,000 bytes for the others.
    assert plan_capacity(shared, model).pages == {Reach(): 625 - 29, WINDOW: 29}


SHARED = {"prefix_cache": True, "max_batch_tokens": 64, "page_size": 4, "cache_tokens": 400}


def ask(engine, prompt, count=3):
    """How many tokens of a prompt were not computed."""
    before = engine.stats.prefix_hit_tokens
    (output,) = engine.generate([prompt], max_new_tokens=count)
    assert output.token_ids == engine.model.continue_greedily(prompt, count)
    assert_idle(engine)
    return engine.stats.prefix_hit_tokens - before


@pytest.mark.parametrize("has_rows", [True, False])
def test_a_hit_where_all_that_is_read_is_there(has_rows):
    engine = make_engine(sliding(WINDOW, has_rows=has_rows), **SHARED)
    assert ask(engine, STORY[:60]) == 0
    assert ask(engine, STORY[:60]) == 56
    assert ask(engine, STORY[:31]) == 28  # pages that the first one left behind
    assert ask(engine, [*STORY[:41], 1]) == 40
    assert ask(engine, [1, *STORY[:41]]) == 0
    near = engine._loop.scheduler.prefix._indexes[-1]
    blocks = engine._loop.scheduler.prefix.blocks(request_for(STORY[:57]), 56)
    near.forget(blocks[10])
    # Page 10 has tokens 40 to 43, and at 48 a token reads from 40 on.
    assert ask(engine, STORY[:50]) == 40
    assert ask(engine, STORY[:50]) == 48  # computed anew, and there again
    near.forget(blocks[10])
    assert ask(engine, STORY[:58]) == 56
    for block in blocks[11:]:
        near.forget(block)
    assert ask(engine, STORY[:58]) == 40


def request_for(tokens):
    return SimpleNamespace(
        tokens=tokens,
        params=SimpleNamespace(cache_salt=None),
        prefix=SimpleNamespace(chain=prefix_keys.KeyChain()),
    )


def test_texts_are_told_apart_by_what_the_window_no_longer_holds(monkeypatch):
    """Blocks that differ in what was before them, under a digest that does not tell."""
    monkeypatch.setattr(prefix_keys, "digest", lambda *parts: parts[-1])
    engine = make_engine(sliding(WINDOW), **SHARED)
    assert ask(engine, STORY[:40]) == 0
    assert ask(engine, [9, 9, 9, 9, *STORY[4:40]]) == 0
    assert ask(engine, STORY[:40]) == 36


def test_a_text_whose_window_was_given_to_others_is_computed_again():
    engine = make_engine(
        sliding(WINDOW, has_rows=True), **{**SHARED, "max_batch_tokens": 8, "max_requests": 1}
    )
    whole, near = (group.pool for group in engine._loop.scheduler.groups)
    assert near.num_pages < whole.num_pages
    assert ask(engine, STORY[:60]) == 0
    assert ask(engine, [1] * 50) == 0
    assert ask(engine, STORY[:60]) < 56
    assert near.num_evictions > whole.num_evictions == 0


def crowd(model, fields, *, overlaps=False, seed=3, steps=250):
    made = Crowd(seed, model, {**fields, "overlaps": overlaps})
    made.run(steps)
    made.check()
    return made


CROWDS = {
    "window": ({"has_rows": False, "reaches": (WINDOW,)}, {"cache_tokens": 28, "max_batch_tokens": 16}),
    "chunk": ({"has_rows": False, "reaches": (CHUNK,)}, {"cache_tokens": 40, "page_size": 1, "max_batch_tokens": 24}),
    "window beside all": ({"reaches": (WINDOW,)}, {"cache_tokens": 60}),
    "two beside all": (
        {"reaches": (CHUNK, Reach(window=3)), "min_tokens": 7},
        {"cache_tokens": 70, "page_size": 5, "max_requests": 20},
    ),
    "that changes with the length": (
        {"has_states": False, "reaches": (WINDOW,), "switch_lengths": (5, 12, 13)},
        {"cache_tokens": 50, "page_size": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("overlaps", [False, True], ids=["", "overlaps"])
@pytest.mark.parametrize("name", CROWDS)
def test_everybody_gets_what_a_run_alone_gives(name, overlaps):
    made = crowd(*CROWDS[name], overlaps=overlaps)
    assert len(made.outputs) > 50
    assert made.engine._loop.scheduler.num_preemptions > 0


def leaves_a_page_too_early(monkeypatch):
    leave = PageGroup.leave
    monkeypatch.setattr(
        PageGroup, "leave", lambda self, slot, held, n: leave(self, slot, held, n + self.page_size)
    )


def never_leaves(monkeypatch):
    monkeypatch.setattr(PageGroup, "leave", lambda self, slot, held, n: None)


def keeps_the_numbers_of_pages_that_left(monkeypatch):
    """In tables: whoever reads such a page reads another's."""

    def mutant(self, slot, held, num_cached):
        first = self.first_page(num_cached)
        if first > held.first:
            self.pool.give_back(held.pages[: first - held.first])
            held.pages = held.pages[first - held.first :]
            held.first = first
            self.tables.array[slot, : held.first] = self.tables.array[slot, held.first]

    monkeypatch.setattr(PageGroup, "leave", mutant)


def writes_a_page_too_far(monkeypatch):
    extend = BlockTables.extend
    monkeypatch.setattr(
        BlockTables, "extend", lambda self, slot, at, pages: extend(self, slot, at + 1, pages)
    )


def sees_a_token_less(monkeypatch):
    first = Reach.first
    monkeypatch.setattr(
        PageGroup, "first_page", lambda self, n: first(self.reach, n + 2) // self.page_size
    )


def takes_a_hit_without_its_window(monkeypatch):
    monkeypatch.setattr(Found, "reaches", lambda self, count: count <= len(self))


FAULTS = [
    (leaves_a_page_too_early, "window"),
    (never_leaves, "window"),
    (writes_a_page_too_far, "window beside all"),
    (sees_a_token_less, "window"),
    (sees_a_token_less, "two beside all"),
]


@pytest.mark.parametrize(
    ("fault", "name"), FAULTS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_fault_is_seen(fault, name, monkeypatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        crowd(*CROWDS[name])


def test_a_hit_without_its_window_is_seen(monkeypatch):
    takes_a_hit_without_its_window(monkeypatch)
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        prefix_fuzz.run("rows, some within a window", 200)


def test_numbers_of_pages_that_left_are_never_read(monkeypatch):
    """Whatever stands there: all that is in reach lies behind them."""
    keeps_the_numbers_of_pages_that_left(monkeypatch)
    monkeypatch.setattr("tests.runtime.test_fuzz.assert_idle", lambda engine: None)
    crowd(*CROWDS["window"])


@pytest.mark.parametrize("seed", range(12))
def test_every_request_ends_whatever_the_pools(seed):
    """The oldest gets on in every step, and a prompt's step is as long as there are pages for."""
    rng = random.Random(seed)
    page_size, budget = rng.choice([1, 2, 4]), rng.choice([8, 12, 40])
    reach = rng.choice([WINDOW, CHUNK])
    least = most_pages(reach, budget, page_size)
    pages = {reach: 1 + rng.randint(least, 2 * least)}
    if seed % 3:
        pages = {Reach(): 1 + rng.randint(12, 40), **pages}
    config = EngineConfig(
        max_batch_tokens=budget, chunk_size=8, max_requests=rng.randint(1, 6), page_size=page_size
    )
    scheduler = Scheduler(config, Capacity(pages, page_size, 7))
    longest = (pages[Reach()] - 1) * page_size if Reach() in pages else 90
    requests, arrivals = [], [rng.randrange(60) for _ in range(25)]
    for step in range(6000):
        for _ in range(arrivals.count(step)):
            length = rng.randint(1, longest - 1)
            if rng.random() < 0.2:
                requests.append(score_request(len(requests), length, budget))
            else:
                new = rng.randint(1, longest - length)
                requests.append(make_request(len(requests), length, new))
            scheduler.add(requests[-1])
        oldest = scheduler.running[0] if scheduler.running else None
        before = oldest and (oldest.num_cached, oldest.num_preemptions)
        plan = run_step(scheduler)
        assert sum(end - start for _, start, end in plan) <= budget
        assert oldest is None or (oldest.num_cached, oldest.num_preemptions) != before
        if step > 60 and not (scheduler.running or scheduler.waiting):
            break
    assert len(requests) == 25
    assert all(request.status is Status.FINISHED for request in requests)
    for group in scheduler.groups:
        assert group.pool.num_free == group.pool.num_pages - 1
        assert not group.tables.array.any()


def score_request(number, length, budget):
    ends = [*range(budget, length, budget), length]
    return ScoreRequest(f"r{number}", number, [1] * length, ends, torch.empty(0))
