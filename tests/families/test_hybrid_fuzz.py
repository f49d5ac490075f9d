"""Random crowds against real model classes, pages and slots both short, everything that nobody owns full of NaN."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from regraft.rewriter.artifact import Artifact
from regraft.rewriter.declare import Reach
from regraft.runtime.output import RequestOutput
from regraft.runtime.page_groups import PageGroup
from regraft.runtime.request import Request
from tests.families.models import FAMILIES, build
from tests.families.served import LOGITS, forward, wrap
from tests.runtime.engines import assert_idle

NAN = float("nan")
STEPS = 500
LONGEST = 40
"""Tokens of the longest request, prompt and output."""

# family -> engine: fewer pages than what runs at once comes to need, and fewer slots than callers
CROWDS = {
    "gemma2": {"cache_tokens": 42, "page_size": 2, "max_requests": 6},
    "mistral": {"cache_tokens": 20, "page_size": 2, "max_requests": 6},  # all of them sliding
    "llama4": {"cache_tokens": 42, "page_size": 2, "max_requests": 6},
    "gpt_oss": {"cache_tokens": 42, "page_size": 3, "max_requests": 6},
    "qwen3_next": {"cache_tokens": 44, "page_size": 2, "max_requests": 4},
    "bamba": {"cache_tokens": 40, "page_size": 1, "max_requests": 4},
    "kimi_linear": {"cache_tokens": 42, "page_size": 1, "max_requests": 6},
    "mamba2": {"max_requests": 2},
}


@dataclass(frozen=True)
class Asked:
    """What a caller wanted."""

    prompt: list[int]
    count: int


class Crowd:
    """Callers who come and go, and what each of them got."""

    def __init__(self, name: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.family = FAMILIES[name]
        self.model = build(name)
        self.engine = wrap(self.model, max_batch_tokens=9, chunk_size=4, **CROWDS[name])
        self.pools = self.engine._loop.runner.pools
        self.states = {spec.name for spec in self.engine.model.states}
        for pool in self.pools.values():
            pool.fill_(NAN)
        self._poison_what_is_released()
        self.asked: dict[str, Asked] = {}
        self.cancelled_while: list[str] = []
        self.events: dict[str, list[int]] = {}
        self.outputs: dict[str, RequestOutput] = {}

    def _poison_what_is_released(self) -> None:
        """At once, so that who gets it in the same step finds nothing but NaN there."""
        scheduler = self.engine._loop.scheduler
        release: Callable[[Request], None] = scheduler._release

        def poison(request: Request) -> None:
            for group, held in zip(scheduler.groups, request.held):
                self.poison_pages(group.reach, held.pages)
            for name in self.states:
                self.pools[name][request.slot] = NAN
            release(request)

        scheduler._release = poison  # type: ignore[method-assign]
        for group in scheduler.groups:
            group.pool.give_back = self._poisoning(group)  # type: ignore[method-assign]

    def _poisoning(self, group: PageGroup) -> Callable[[Sequence[int]], None]:
        """What leaves the reach of who runs on is poisoned as well, unless it can be found again."""
        give_back = group.pool.give_back

        def poison(pages: Sequence[int]) -> None:
            give_back(pages)
            self.poison_pages(group.reach, [page for page in pages if group.pool._free[page]])

        return poison

    def poison_pages(self, reach: Reach, pages: Sequence[int]) -> None:
        for row in self.engine.model.rows:
            if row.reach == reach:
                self.pools[row.name][list(pages)] = NAN

    def poison_scratch(self) -> None:
        for pool in self.pools.values():
            pool[0] = NAN

    def arrive(self) -> None:
        for _ in range(self.rng.choice([1, 1, 1, 4])):
            shortest = self.rng.choice([1, 1, LONGEST // 2])
            length = self.rng.choice([1, 2, 3, *self.rng.choices(range(shortest, LONGEST), k=4)])
            count = self.rng.randint(1, min(20, LONGEST - length))
            prompt = self.family.prompt(length, seed=self.rng.randrange(1 << 30)).tolist()
            self.asked[self.engine.add_request(prompt, max_new_tokens=count)] = Asked(prompt, count)

    def cancel(self) -> None:
        live = self.engine._loop.live
        if live:
            stages = {name: _stage(request) for name, request in sorted(live.items())}
            rare = "prefilling" in stages.values()
            stage = "prefilling" if rare else self.rng.choice(sorted({*stages.values()}))
            self.cancelled_while.append(stage)
            self.engine.cancel(self.rng.choice([n for n, s in stages.items() if s == stage]))

    def step(self) -> None:
        self.poison_scratch()
        for event in self.engine.step():
            if event.token_id is not None:
                self.events.setdefault(event.request_id, []).append(event.token_id)
            if event.output is not None:
                self.outputs[event.request_id] = event.output

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for action in self.rng.choices([self.arrive, self.cancel], [3, 1], k=1):
                if len(self.engine._loop.live) < 12 and self.rng.random() < 0.5:
                    action()
            self.step()
        while self.engine.has_unfinished:
            self.step()

    def check(self) -> None:
        """Every request got, token for token, what the plain model says after the tokens before."""
        assert_idle(self.engine)
        assert self.outputs.keys() == self.asked.keys()
        for name, asked in self.asked.items():
            output = self.outputs[name]
            assert self.events.get(name, []) == output.token_ids
            if output.finish_reason != "cancelled":
                assert output.finish_reason == "length"
                assert len(output.token_ids) == asked.count
            self._check_tokens(asked.prompt, output.token_ids)
        assert len(self.cancelled_while) == sum(
            output.finish_reason == "cancelled" for output in self.outputs.values()
        )

    def _check_tokens(self, prompt: list[int], made: list[int]) -> None:
        if not made:
            return
        logits = forward(self.model, [*prompt, *made[:-1]])[len(prompt) - 1 :]
        chosen = logits.gather(-1, torch.tensor(made)[:, None])[:, 0]
        assert (logits.amax(-1) - chosen).max() <= LOGITS


def _stage(request: Request) -> str:
    if request.status.name == "WAITING":
        return "waiting"
    return "decoding" if request.num_remaining == 1 else "prefilling"


SLOW = ("gpt_oss",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else []) for n in CROWDS]
)
def test_everybody_gets_what_a_run_alone_gives(name: str) -> None:
    crowd = Crowd(name, seed=len(name))
    crowd.run(STEPS)
    crowd.check()
    assert len(crowd.outputs) > 50
    assert {"waiting", "prefilling", "decoding"} <= {*crowd.cancelled_while}
    if any(not row.reach.size for row in crowd.engine.model.rows):
        assert crowd.engine._loop.scheduler.num_preemptions > 10


def test_a_slots_old_bytes_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with operators that start from what a slot holds, where they should from zero."""
    serve = Artifact.forward

    def mutant(self: Artifact, inputs: Mapping[str, Tensor]) -> Tensor:
        return serve(self, {**inputs, "context_lens": inputs["context_lens"].clamp(min=1)})

    monkeypatch.setattr(Artifact, "forward", mutant)
    crowd = Crowd("mamba2", seed=0)
    crowd.run(20)
    with pytest.raises(AssertionError):
        crowd.check()
