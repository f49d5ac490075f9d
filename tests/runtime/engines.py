"""Engines over the toy model, and what must be true of one that has nothing left to do."""

from __future__ import annotations

import random

from regraft.runtime.config import EngineConfig
from regraft.runtime.engine import Engine
from tests.runtime.toy import ToyModel

SMALL = {
    "max_batch_tokens": 32,
    "chunk_size": 8,
    "page_size": 4,
    "cache_tokens": 400,
    "max_requests": 8,
}


def make_engine(model: ToyModel | None = None, *, overlaps: bool = False, **fields) -> Engine:
    """`overlaps`: tokens are read a step later, as on a GPU."""
    options = {k: fields.pop(k) for k in ("tokenizer", "generation_config") if k in fields}
    engine = Engine(model or ToyModel(), EngineConfig(**{**SMALL, **fields}), **options)
    engine._loop._overlaps = overlaps
    return engine


def make_prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(64) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def assert_idle(engine: Engine) -> None:
    """Every page and slot is back, or kept for who asks for it, and no request is left anywhere."""
    loop, scheduler = engine._loop, engine._loop.scheduler
    assert not engine.has_unfinished
    assert not loop.live
    assert not scheduler.running
    assert not scheduler.waiting
    cache, slots = scheduler.prefix, scheduler.slots
    for group in scheduler.groups:
        pages = group.pool
        assert sorted(pages.free + pages.kept) == list(range(1, pages.num_pages))
        assert not pages._users.any()
        assert not pages.kept or cache.is_on
        assert not group.tables.array.any()
    kept = [len(group.pool.kept) for group in scheduler.groups if group.page_size]
    assert kept == cache.num_pages
    first = slots.num_slots
    named = [checkpoint.slot for checkpoint in cache.checkpoints._named.values()]
    count = len(cache.checkpoints.free_slots) + len(named)
    assert sorted(cache.checkpoints.free_slots + named) == list(range(first, first + count))
    assert not scheduler._saves
    assert sorted(slots._free) == list(range(1, slots.num_slots))
