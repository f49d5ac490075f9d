"""`regraft check MODEL`: is what an engine computes right, and is it the same whatever else it computes?

report = check(engine, model)      # prints as a table; report.passed
    against the model    teacher-forced, in several schedules: mean KL, top-5 overlap, dNLL
    needle               one text alone, and among 1 to 256 others, cut in every way: bits (batch_invariant) or
                         noise (otherwise) may differ
    first divergence     the first operation whose bits differ between the text alone and the same text token by
                         token in a crowd
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .compare import Comparison, compare
from .divergence import Divergence, first_divergence
from .validate import Validation, samples

SIZES = (1, 2, 3, 8, 17, 29, 44, 60, 64, 255, 256, 257)
"""Requests in a batch, the needle among them: around the tiles and buckets of kernels."""

NEEDLE, LONG = 24, 192
"""Tokens of the needle, and of a text whose prefill runs beside it."""

Cuts = list[list[int]]


class CheckedEngine(Protocol):
    """What is asked of an engine."""

    model: Any
    config: Any
    max_cached: int

    def score(self, sequences: Sequence[Any], schedule: Any = "prefill") -> list[Tensor]:
        """Logits of texts."""
        ...

    def generate(self, prompts: Sequence[Any], **fields: Any) -> list[Any]:
        """Continues texts."""
        ...

    def validate(self, *arguments: Any, **options: Any) -> Validation:
        """Compares with the model."""
        ...


@dataclass(frozen=True)
class NeedleRun:
    """The needle in one batch: what it was, how many of its logits have other bits than alone, and how far off."""

    size: int
    beside_long: bool
    how: str
    differing: int
    comparison: Comparison

    def __str__(self) -> str:
        beside = " beside a long prefill" if self.beside_long else ""
        return (
            f"{self.how} in a batch of {self.size}{beside}: {self.differing} logits differ, by "
            f"{self.comparison.max_abs:.1e} at most, mean KL {self.comparison.mean_kl:.1e}"
        )


@dataclass(frozen=True)
class CheckReport:
    """What was found. `passed`: acceptable against the model; the needle the same bits, or acceptable where the engine
    promises no bits.
    """

    validation: Validation
    runs: tuple[NeedleRun, ...]
    generated: tuple[str, ...]
    divergence: Divergence | None
    invariant: bool

    @property
    def failures(self) -> tuple[NeedleRun, ...]:
        """Runs that are not as promised."""
        return tuple(
            run for run in self.runs if (run.differing if self.invariant else not run.comparison.acceptable)
        )  # fmt: skip

    @property
    def passed(self) -> bool:
        return self.validation.passed and not self.failures and not self.generated

    def __str__(self) -> str:
        promise = "the same bits" if self.invariant else "noise at most"
        worst = max(self.runs, key=lambda run: run.comparison.max_abs)
        lines = [
            f"{'passed' if self.passed else 'FAILED'}",
            f"against the model  {self.validation}",
            *(f"    {name:10} {result}" for name, result in self.validation.by_schedule.items()),
            f"needle             {len(self.runs)} batches, promised {promise}; {len(self.failures)} failed",
            f"    worst: {worst}",
            *(f"    failed: {run}" for run in self.failures[:8]),
            *(f"    generation: {line}" for line in self.generated[:8]),
            f"first divergence   {self.divergence or 'none: the same bits alone and token by token in a crowd'}",
        ]
        return "\n".join(lines)


def check(
    engine: CheckedEngine,
    model: nn.Module,
    *,
    sizes: Sequence[int] = SIZES,
    validate: str = "quick",
    seed: int = 0,
    progress: bool = False,
) -> CheckReport:
    """All three checks of an engine that was made by `regraft.wrap(model, validate="off")`.

    `progress` shows on stderr how many batches are done.
    """
    haystack = Haystack(engine, model, seed)
    invariant = bool(engine.config.batch_invariant)
    return CheckReport(
        validation=engine.validate(validate, seed=seed),
        runs=tuple(haystack.runs(sizes, progress)),
        generated=tuple(haystack.generations()) if invariant else (),
        divergence=haystack.divergence(),
        invariant=invariant,
    )


class Haystack:
    """Random texts around one needle. None of them has the needle's token at the same position."""

    def __init__(self, engine: CheckedEngine, model: nn.Module, seed: int = 0) -> None:
        self.engine = engine
        self._random = random.Random(seed)
        longest = min(engine.max_cached, engine.model.max_positions or engine.max_cached)
        longest = min(longest, engine.config.max_batch_tokens // 2)
        (text,) = samples(model, engine.model.vocab_size, 64, "prefix", seed)
        self.tokens = sorted(set(text))
        self.needle = text[: min(NEEDLE, longest)]
        self.longest = min(LONG, longest)
        (self.alone,) = engine.score([self.needle])

    def text(self, length: int) -> list[int]:
        """Random tokens, none where the needle has the same."""
        chosen = self._random.choices(self.tokens, k=length)
        step = len(self.tokens) // 2
        for at, own in enumerate(self.needle[:length]):
            if chosen[at] == own:
                chosen[at] = self.tokens[(self.tokens.index(own) + step) % len(self.tokens)]
        return chosen

    def crowd(self, size: int, beside_long: bool) -> tuple[list[list[int]], int]:
        """Texts with the needle at a random place among them, and that place."""
        lengths = [self._random.randint(1, 9 if size < 64 else 4) for _ in range(size - 1)]
        texts = [self.text(length) for length in lengths]
        place = self._random.randint(0, len(texts))
        texts.insert(place, self.needle)
        if beside_long:
            texts.insert(0, self.text(self.longest))
            place += 1
        return texts, place

    def runs(self, sizes: Sequence[int], progress: bool = False) -> list[NeedleRun]:
        """The needle in batches of these sizes, with and without a long prefill, whole and in random pieces."""
        found = []
        crowds = [(size, beside_long) for size in sizes for beside_long in (False, True)]
        for size, beside_long in tqdm(crowds, unit="batch", disable=not progress):
            texts, place = self.crowd(size, beside_long)
            for how, cuts in self._ways(texts, place):
                logits = self.engine.score(texts, schedule=cuts)[place]
                found.append(self._judged(size, beside_long, how, logits))
        return found

    def _ways(self, texts: list[list[int]], place: int) -> list[tuple[str, Any]]:
        length = len(self.needle)
        pieces = sorted(self._random.sample(range(1, length), min(4, length - 1)))
        decode: Cuts = [[] for _ in texts]
        decode[place] = list(range(1, length))
        cut: Cuts = [[] for _ in texts]
        cut[place] = pieces
        return [("whole", "prefill"), ("token by token", decode), (f"cut at {pieces}", cut)]

    def _judged(self, size: int, beside_long: bool, how: str, logits: Tensor) -> NeedleRun:
        differing = int((bits(logits) != bits(self.alone)).sum())
        comparison = compare(self.alone, logits, self.needle)
        return NeedleRun(size, beside_long, how, differing, comparison)

    def generations(self, count: int = 8) -> list[str]:
        """Greedy and sampled continuations, alone and in a crowd, and their log-probabilities against `score`."""
        problems = []
        prompt = self.needle[: max(1, len(self.needle) - count)]
        sampled = {"do_sample": True, "seed": 7, "temperature": 0.8, "top_k": 0}
        for fields in ({"do_sample": False}, sampled):
            options = {**fields, "max_new_tokens": count, "logprobs": True}
            (alone,) = self.engine.generate([prompt], **options)
            others = [self.text(self._random.randint(1, 9)) for _ in range(11)]
            crowd = self.engine.generate([*others, prompt], **options)[-1]
            kind = "sampled" if fields["do_sample"] else "greedy"
            if (alone.token_ids, alone.logprobs) != (crowd.token_ids, crowd.logprobs):
                problems.append(f"{kind}: other tokens or log-probabilities in a crowd than alone")
            (logits,) = self.engine.score([prompt + alone.token_ids])
            rows = (logits[len(prompt) - 1 : -1] / fields.get("temperature", 1.0)).log_softmax(-1)
            scored = rows[torch.arange(len(rows)), torch.tensor(alone.token_ids)].tolist()
            if scored != alone.logprobs:
                problems.append(f"{kind}: score gives other log-probabilities than generation")
        return problems

    def divergence(self) -> Divergence | None:
        """Between the needle alone in one piece and token by token in a crowd."""
        texts, place = self.crowd(8, beside_long=True)
        cuts: Cuts = [[] for _ in texts]
        cuts[place] = list(range(1, len(self.needle)))
        return first_divergence(
            self.engine,
            self.needle,
            lambda: self.engine.score([self.needle]),
            lambda: self.engine.score(texts, schedule=cuts),
        )


def bits(x: Tensor) -> Tensor:
    """Floats as integers: NaN equals itself, and -0 is not 0."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
