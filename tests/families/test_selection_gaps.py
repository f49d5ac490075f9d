"""Models that select keys by index scores: how near the last selected key is to the first left out.

Two exact implementations round differently, so where these scores are nearer than rounding they may select
different keys, and their logits then differ by any amount. The coverage test compares logits of these very texts, so
none of them may be such a case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.families.models import FAMILIES, build, names
from tests.families.test_coverage import LENGTHS

GAP = 1e-5
HIDDEN = -1e30
RATE = 4
"""Tokens of a compressed entry (deepseek_v4)."""
LEAST = {10: 90, 12: 40}
"""Selections that leave something out, by the row of the coverage table: fewer would say nothing."""


class Gaps(TorchFunctionMode):
    """Collects score k minus score k + 1 of each top-k over the keys in sight, one or fewer a token."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.Tensor.topk:
            scores, count = args[0], args[1]
            if scores.dim() == 3 and scores.shape[-2] // RATE <= scores.shape[-1] > count:
                ordered = scores.sort(-1, descending=True).values
                last, next_one = ordered[..., count - 1], ordered[..., count]
                self.found += (last - next_one)[next_one > HIDDEN].tolist()
        return result


@pytest.mark.parametrize("name", names(*LEAST))
def test_no_text_has_a_selection_at_the_edge_of_rounding(name: str) -> None:
    model, family = build(name), FAMILIES[name]
    with torch.no_grad(), Gaps() as gaps:
        for seed in LENGTHS:
            model(family.prompt(seed, seed=seed)[None], use_cache=False)
    assert len(gaps.found) >= LEAST[family.row], (
        "the texts are too short for a selection to leave keys out"
    )
    assert min(gaps.found) > GAP
