"""Random crowds whose texts begin alike, over a prefix cache: each gets what a run alone without any cache gives.

Pages and slots are short, requests are preempted and cancelled, tenants have salts of their own, and everything that
nobody can ask for is full of NaN. Then the same with faults put in on purpose, which must be seen.
"""

from __future__ import annotations

import pytest

from regraft.rewriter.declare import Reach
from regraft.runtime import prefix_keys
from regraft.runtime.checkpoints import Checkpoints
from regraft.runtime.pages import PagePool
from regraft.runtime.prefix_cache import Hit, PrefixCache
from regraft.runtime.prefix_pages import PageIndex
from regraft.runtime.runner import Runner
from regraft.runtime.scheduler import MOST_PREEMPTIONS
from tests.runtime.test_fuzz import NAN, Crowd

NEAR = Reach(window=9)
CHUNK = Reach(chunk=12)

CROWDS = {
    # model, engine: page sizes that divide the chunk of 8 and some that do not
    "rows": ({"has_states": False}, {"cache_tokens": 120, "page_size": 4}),
    "rows, short of pages": ({"has_states": False}, {"cache_tokens": 62, "page_size": 2}),
    "rows that change with the length": (
        {"has_states": False, "switch_lengths": (5, 12, 30)},
        {"cache_tokens": 120, "page_size": 3},
    ),
    "both": ({}, {"cache_tokens": 120, "page_size": 4}),
    "both, pages of 5": ({"min_tokens": 7}, {"cache_tokens": 140, "page_size": 5, "chunk_size": 5}),
    "both, that change with the length": (
        {"switch_lengths": (12, 30)},
        {"cache_tokens": 100, "page_size": 4, "chunk_size": 4},
    ),
    "both, one checkpoint": ({}, {"cache_tokens": 120, "page_size": 4, "prefix_checkpoints": 1}),
    "both, no checkpoint": ({}, {"cache_tokens": 120, "page_size": 4, "prefix_checkpoints": 0}),
    "rows, some within a window": (
        {"has_states": False, "reaches": (NEAR,)},
        {"cache_tokens": 110, "page_size": 4},
    ),
    "rows, some within a chunk": (
        {"has_states": False, "reaches": (CHUNK,)},
        {"cache_tokens": 62, "page_size": 2},
    ),
    "rows within two windows": (
        {"has_states": False, "reaches": (Reach(window=2), Reach(window=21)), "min_tokens": 5},
        {"cache_tokens": 100, "page_size": 3, "chunk_size": 4, "max_batch_tokens": 20},
    ),
    "rows within a window alone": (
        {"has_states": False, "has_rows": False, "reaches": (NEAR,)},
        {"cache_tokens": 62, "page_size": 2, "max_batch_tokens": 24},
    ),
    "both, within a window, that change with the length": (
        {"reaches": (NEAR, CHUNK), "switch_lengths": (12, 30)},
        {"cache_tokens": 100, "page_size": 4, "chunk_size": 4},
    ),
    "states and rows within a window": (
        {"has_rows": False, "reaches": (NEAR,)},
        {"cache_tokens": 80, "page_size": 4},
    ),
    "states": ({"has_rows": False}, {"max_requests": 4, "max_batch_tokens": 16}),
    "states, few checkpoints": ({"has_rows": False}, {"max_requests": 4, "prefix_checkpoints": 3}),
}


class PrefixCrowd(Crowd):
    """Callers with a few conversations among them."""

    def __init__(self, seed, model, fields, *, overlaps=False):
        super().__init__(seed, model, {"prefix_cache": True, "overlaps": overlaps, **fields})
        self.stories = [[self.rng.randrange(64) for _ in range(60)] for _ in range(3)]
        self.stories.append(self.stories[0][:4] * 15)  # blocks that differ in their place alone
        self.most_preemptions = 0
        runner = self.engine._loop.runner
        self._build = runner.build
        runner.build = self.build

    def build(self, spans, tables, page_size):
        """Nobody writes where others read or may come to read."""
        for span in spans if page_size else ():
            first, last = span.start // page_size, (span.end - 1) // page_size
            for group, held in zip(self.engine._loop.scheduler.groups, span.request.held):
                pages = held.pages[first - held.first : last + 1 - held.first]
                assert len(pages) == last + 1 - first
                assert group.pool.are_exclusive(pages)
        return self._build(spans, tables, page_size)

    def poison(self):
        super().poison()
        loop = self.engine._loop
        free = loop.scheduler.prefix.checkpoints.free_slots
        if "toy:state" in loop.runner.pools:
            loop.runner.pools["toy:state"][free] = NAN

    def arrive(self):
        for _ in range(self.rng.choice([1, 1, 6])):
            length = self.rng.randint(1, self.longest - 1)
            new = self.rng.randint(1, min(20, self.longest - length))
            story = self.rng.choice(self.stories)
            same = self.rng.choice([length, length, self.rng.randint(0, length)])
            prompt = story[:same] + [self.rng.randrange(64) for _ in range(length - same)]
            salt = self.rng.choice([None, None, None, "other"])
            name = self.engine.add_request(prompt, max_new_tokens=new, cache_salt=salt)
            self.prompts[name] = (prompt, new)

    def step(self):
        super().step()
        requests = self.engine._loop.live.values()
        most = max((request.num_preemptions for request in requests), default=0)
        self.most_preemptions = max(self.most_preemptions, most)


def run(name, steps, *, overlaps=False):
    crowd = PrefixCrowd(len(name), *CROWDS[name], overlaps=overlaps)
    crowd.run(steps)
    crowd.check()
    return crowd


@pytest.mark.parametrize("overlaps", [False, True], ids=["", "overlaps"])
@pytest.mark.parametrize("name", CROWDS)
def test_everybody_gets_what_a_run_alone_gives(name, overlaps):
    crowd = run(name, 200, overlaps=overlaps)
    stats = crowd.engine.stats
    assert len(crowd.outputs) > 40
    assert len(crowd.cancelled) > 5
    if name == "both, no checkpoint":
        assert stats.prefix_hit_tokens == 0
    else:
        assert stats.prefix_hit_tokens > 100
    if crowd.model.rows:
        assert stats.prefix_evictions > 10
    if any(not row.reach.size for row in crowd.model.rows):
        assert stats.num_preemptions > 0
    if name in ("both, one checkpoint", "states, few checkpoints"):
        assert stats.checkpoint_evictions > 5
    assert crowd.most_preemptions <= MOST_PREEMPTIONS + len(crowd.model.switch_lengths)


def ignores_how_long_it_is(monkeypatch):
    """Rows are the same however many switch lengths a request has passed."""
    upto = prefix_keys.KeyChain.upto
    monkeypatch.setattr(
        prefix_keys.KeyChain, "upto", lambda self, root, *rest: upto(self, (0, 0, None), *rest)
    )


def ignores_what_was_before(monkeypatch):
    """A block is known by its own tokens alone."""
    monkeypatch.setattr(prefix_keys, "digest", lambda *parts: parts[-1])
    monkeypatch.setattr(prefix_keys.Block, "is_same", lambda self, other: self.text == other.text)


def computes_no_token_again(monkeypatch):
    """A text that is there as a whole is a hit as a whole, and its last page is written by two."""
    find = PrefixCache.find

    def mutant(self, request):
        request.tokens.append(request.tokens[-1])
        hit = find(self, request)
        request.tokens.pop()
        return Hit(min(hit.length, len(request.tokens) - 1), hit.held, hit.checkpoint)

    monkeypatch.setattr(PrefixCache, "find", mutant)


def frees_what_others_use(monkeypatch):
    def mutant(self, pages):
        self._users[list(pages)] = 1
        for page in pages:
            self._kept.pop(page, None)

    monkeypatch.setattr(PagePool, "share", mutant)


def forgets_no_evicted_page(monkeypatch):
    monkeypatch.setattr(PageIndex, "_evicted", lambda self, page: self._content.pop(page, None))


def copies_no_states(monkeypatch):
    monkeypatch.setattr(Runner, "copy_states", lambda self, sources: None)


def finds_any_checkpoint(monkeypatch):
    monkeypatch.setattr(
        Checkpoints, "find", lambda self, key, text: next(iter(self._named.values()))
    )


def writes_on_where_others_read(monkeypatch):
    """A request that starts over keeps its pages, though others use them too."""
    monkeypatch.setattr(PagePool, "are_exclusive", lambda self, pages: True)


def loses_what_an_idle_request_held(monkeypatch):
    forget = PagePool.forget

    def mutant(self, page):
        self._kept.pop(page, None)
        forget(self, page)

    monkeypatch.setattr(PagePool, "forget", mutant)


FAULTS = [
    (ignores_how_long_it_is, "rows that change with the length"),
    (ignores_what_was_before, "rows"),
    (ignores_what_was_before, "both"),
    (computes_no_token_again, "rows"),
    (frees_what_others_use, "rows, short of pages"),
    (forgets_no_evicted_page, "rows, short of pages"),
    (copies_no_states, "both"),
    (copies_no_states, "states"),
    (finds_any_checkpoint, "states"),
    (writes_on_where_others_read, "rows that change with the length"),
    (loses_what_an_idle_request_held, "rows"),
]


@pytest.mark.parametrize(
    ("fault", "name"), FAULTS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_fault_is_seen(fault, name, monkeypatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, LookupError, RuntimeError, StopIteration, ValueError)):
        run(name, 200)
