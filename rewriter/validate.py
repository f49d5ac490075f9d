"""Translation validation: the rewritten graph against the original model, on the user's own weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .capture import takes_positions, without_cache
from .choices import NEAR, ChoicesUnknown, Choosing, Ties, watching
from .compare import Comparison, compare
from .errors import RewriteError

TOLERATED_KL = {torch.float32: 1e-5, torch.float64: 1e-8}
"""Largest mean KL (nats) between the same weights run two ways. In half precision, see Comparison.acceptable."""

POSITIONS = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference, as a part of the largest logit, between positions that are given and those a model counts."""

LENGTHS = {
    "prefix": (64,),
    "quick": (19, 3, 33, 8),
    "full": (19, 3, 33, 8, 1, 2, 64, 65, 130, 257, 600),
}


class ValidationError(Exception):
    """Rewritten and original model disagree. `validation` holds the figures."""

    def __init__(self, validation: Validation) -> None:
        self.validation = validation
        super().__init__(f"the rewritten graph disagrees with the model: {validation}")


@dataclass(frozen=True)
class Validation:
    """What was measured. `by_schedule`: how the texts were cut -> Comparison with the original's no-cache forward.

    `ties`: where rounding made other choices of experts or keys than in the original, what was found of them;
    `by_schedule` then compares with the original made to choose likewise. `num_nan`: texts in whose logits the original
    itself has NaN.
    """

    num_sequences: int
    num_tokens: int
    by_schedule: Mapping[str, Comparison]
    passed: bool
    ties: Ties | None = None
    num_nan: int = 0

    @classmethod
    def of(
        cls, texts: Sequence[Sequence[int]], expected: Sequence[torch.Tensor],
        scored: Mapping[str, Sequence[torch.Tensor]], dtype: torch.dtype,
    ) -> Validation:  # fmt: skip
        results = {name: compare(expected, logits, texts) for name, logits in scored.items()}
        num_nan = sum(bool(logits.isnan().any()) for logits in expected)
        return cls._judged(texts, results, dtype, num_nan=num_nan)

    @classmethod
    def of_likewise(
        cls, texts: Sequence[Sequence[int]], pairs: Mapping[str, tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
        ties: Ties, dtype: torch.dtype,
    ) -> Validation:  # fmt: skip
        """Of logits that are each compared with those of the original made to choose likewise."""
        results = {
            name: compare(expected, logits, texts) for name, (expected, logits) in pairs.items()
        }
        return cls._judged(texts, results, dtype, ties)

    @classmethod
    def _judged(
        cls, texts: Sequence[Sequence[int]], results: Mapping[str, Comparison], dtype: torch.dtype,
        ties: Ties | None = None, num_nan: int = 0,
    ) -> Validation:  # fmt: skip
        passed = all(_passes(result, dtype) for result in results.values())
        near = ties is None or ties.widest <= NEAR.get(dtype, 0.0)
        return cls(len(texts), sum(map(len, texts)), results, passed and near, ties, num_nan)

    @property
    def max_abs(self) -> float:
        return max(result.max_abs for result in self.by_schedule.values())

    @property
    def mean_kl(self) -> float:
        return max(result.mean_kl for result in self.by_schedule.values())

    @property
    def top5_overlap(self) -> float:
        return min(result.top5_overlap for result in self.by_schedule.values())

    @property
    def dnll(self) -> float:
        return max(result.dnll for result in self.by_schedule.values())

    def __str__(self) -> str:
        ways = ", ".join(self.by_schedule)
        return (
            f"{'passed' if self.passed else 'FAILED'}: max |dlogit| {self.max_abs:.1e}, mean KL {self.mean_kl:.1e}, "
            f"top-5 overlap {self.top5_overlap:.3f}, dNLL {self.dnll:.1e} "
            f"({self.num_sequences} texts, {self.num_tokens} tokens; {ways})"
            + (f"; {self.ties}, and the original chose likewise" if self.ties else "")
            + (f"; the model's own logits are NaN in {self.num_nan} texts" if self.num_nan else "")
        )


def _passes(result: Comparison, dtype: torch.dtype) -> bool:
    limit = TOLERATED_KL.get(dtype)
    return result.acceptable and (limit is None or result.mean_kl <= limit)


def samples(
    model: nn.Module, vocab_size: int, longest: int, size: str, seed: int, reaching: int = 0
) -> list[list[int]]:
    """Random texts of ragged lengths, none longer than `longest`, without the placeholder ids of images and sounds.

    One is as long as `reaching`, if that is more than theirs and not too long.
    """
    if size not in LENGTHS:
        raise ValueError(f"size={size!r}: choose from {', '.join(LENGTHS)}")
    generator = random.Random(seed)
    special = _placeholder_ids(model)
    ids = [
        token
        for token in range(min(vocab_size, _embedded(model, vocab_size)))
        if token not in special
    ]
    lengths = LENGTHS[size]
    if reaching > max(lengths):
        lengths = (*lengths, reaching)
    return [generator.choices(ids, k=min(n, longest)) for n in lengths]


def _embedded(model: Any, default: int) -> int:
    embedding = model.get_input_embeddings()
    return getattr(embedding, "num_embeddings", default)


def _placeholder_ids(model: nn.Module) -> set[int]:
    """Every "..._token_id" that the model's configurations name."""
    configs = [
        model.config,
        *(c for m in model.modules() if (c := getattr(m, "config", None)) is not None),
    ]
    found: set[int] = set()
    for config in configs:
        for name, value in vars(config).items():
            if name.endswith(("_token_id", "_token_index")):
                found.update(value if isinstance(value, list) else [value])
    return {value for value in found if isinstance(value, int)}


def reference_logits(model: Any, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The original model's own forward without a cache, one text at a time: float32 [len, vocab] each."""
    device = next(model.parameters()).device
    extra: dict[str, Any] = dict(without_cache(model))
    results = []
    with torch.no_grad():
        for text in texts:
            if takes_positions(model):
                extra["position_ids"] = torch.arange(len(text), device=device)[None]
            output = model(input_ids=torch.tensor([list(text)], device=device), **extra)
            results.append(output.logits[0].float())
    return results


Score = Callable[[Any], list[torch.Tensor]]
"""Logits of the validated texts, by schedule."""


def validate_likewise(
    artifact: Any, model: nn.Module, texts: Sequence[Sequence[int]], score: Score,
    schedules: Mapping[str, Any],
) -> Validation | None:  # fmt: skip
    """The texts compared with the original made to choose the same experts and keys; None if nothing chooses otherwise,
    or if what the graph chooses cannot be told (see rewriter/choices.py).
    """
    ties, pairs = Ties(), {}
    for name, schedule in schedules.items():
        with watching(artifact, texts) as noted:
            logits = score(schedule)
        try:
            expected = []
            for text in noted:
                with Choosing(text, ties) as choosing:
                    expected += reference_logits(model, [text.tokens])
                choosing.finish()
        except ChoicesUnknown:
            return None
        pairs[name] = expected, logits
    return (
        Validation.of_likewise(texts, pairs, ties, artifact.precision) if ties.differing else None
    )


def check_positions(model: Any, text: Sequence[int], counted: torch.Tensor) -> None:
    """Raise RewriteError unless the model, left alone, counts a text's positions from 0 as a server of it does.

    counted   the text's logits over positions 0, 1, 2, ..., as of `reference_logits`

    Some count from elsewhere, or only tokens that are no padding: a graph over given positions is not that model.
    """
    if not takes_positions(model):
        return
    with torch.no_grad():
        ids = torch.tensor([list(text)], device=counted.device)
        alone = model(input_ids=ids, **dict(without_cache(model))).logits[0]
    tolerance = POSITIONS[alone.dtype] * float(alone.abs().max())
    difference = float((counted - alone.float()).abs().max())
    if difference > tolerance:
        raise RewriteError(
            f"the model's own positions are not 0, 1, 2, ...: with these its logits differ by {difference:.1e}",
            fix="a model that derives positions from its tokens cannot be served by positions",
        )
