"""Random crowds whose texts begin alike, against real model classes with a prefix cache, pages and slots both short.

Whatever a request gives up and nobody can find again is full of NaN at once.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from regraft.runtime.request import Request
from tests.families import test_hybrid_fuzz as hybrid
from tests.families.test_hybrid_fuzz import LONGEST, NAN, Asked, Crowd

STEPS = 150

CROWDS = {
    "gemma2": {"cache_tokens": 44, "page_size": 2, "max_requests": 6},
    "mistral": {"cache_tokens": 30, "page_size": 2, "max_requests": 6},  # all of them sliding
    "llama4": {"cache_tokens": 44, "page_size": 2, "max_requests": 6},
    "qwen3_next": {"cache_tokens": 80, "page_size": 2, "max_requests": 4, "prefix_checkpoints": 6},
    "bamba": {"cache_tokens": 80, "page_size": 1, "max_requests": 4},
    "mamba2": {"max_requests": 3, "prefix_checkpoints": 5},
}
SLOW = ("qwen3_next", "bamba", "llama4")


class PrefixCrowd(Crowd):
    """Callers who tell one of three stories, each up to some place of his own."""

    def _poison_what_is_released(self) -> None:
        scheduler = self.engine._loop.scheduler
        release: Callable[[Request], None] = scheduler._release

        def poison(request: Request) -> None:
            release(request)
            slots = [*scheduler.slots._free, *scheduler.prefix.checkpoints.free_slots]
            for group in scheduler.groups:
                self.poison_pages(group.reach, group.pool.free)
            for name in self.states:
                self.pools[name][slots] = NAN

        scheduler._release = poison  # type: ignore[method-assign]

    def arrive(self) -> None:
        for _ in range(self.rng.choice([1, 1, 4])):
            length = self.rng.choice([1, 3, *self.rng.choices(range(8, LONGEST), k=6)])
            count = self.rng.randint(1, min(12, LONGEST - length))
            same = self.rng.choice([length, self.rng.randint(0, length)])
            story = self.family.prompt(same, seed=self.rng.randrange(3)).tolist()
            rest = self.family.prompt(length - same, seed=self.rng.randrange(1 << 30)).tolist()
            salt = self.rng.choice([None, None, "other"])
            prompt = story + rest
            name = self.engine.add_request(prompt, max_new_tokens=count, cache_salt=salt)
            self.asked[name] = Asked(prompt, count)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else []) for n in CROWDS]
)
def test_everybody_gets_what_a_run_alone_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hybrid.CROWDS, name, {**CROWDS[name], "prefix_cache": True})
    crowd = PrefixCrowd(name, seed=len(name))
    crowd.run(STEPS)
    crowd.check()
    stats = crowd.engine.stats
    assert len(crowd.outputs) > 20
    assert crowd.cancelled_while
    assert stats.prefix_hit_tokens > 50
    if crowd.engine.model.rows:
        assert stats.prefix_evictions > 0
    if any(not row.reach.size for row in crowd.engine.model.rows):
        assert stats.num_preemptions > 0
    if crowd.engine.model.states:
        assert stats.checkpoint_evictions > 0
