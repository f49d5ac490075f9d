"""A row's own index becomes each request's position; near misses are named and replayed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regraft.passes import positions
from regraft.rewriter.pipeline import rewrite
from tests.rewriter.serving import serves
from tests.rewriter.toys import captured

Count = Callable[[int], Tensor]

COUNTS: dict[str, Count] = {
    "from zero": lambda n: torch.arange(n),
    "from one": lambda n: torch.arange(1, n + 1),
    "from below zero": lambda n: torch.arange(-3, n - 3),
    "in steps": lambda n: torch.arange(5, 5 + 3 * n, 3),
    "backwards": lambda n: torch.arange(0, -n, -1),
    "of floats": lambda n: torch.arange(1, n + 1, dtype=torch.float32),
}


def mix(count: Count) -> Callable[[object, Tensor, Tensor], Tensor]:
    return lambda m, x, p: x * (count(x.shape[1])[:, None] * 0.1).cos()


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_a_position(name: str) -> None:
    state = rewrite(captured(mix(COUNTS[name])), [positions.PASS], fallback="refuse")
    assert [served.kind for served in state.served] == ["position"]
    serves(state, mix(COUNTS[name]))


def last_first(length: int) -> Tensor:
    return torch.arange(length - 1, -1, -1)


def longer(length: int) -> Tensor:
    return torch.arange(length + 1)[1:]


@pytest.mark.parametrize(
    ("count", "reason"),
    [(last_first, "a start or a step that is no constant"), (longer, "is not a row index")],
)
def test_near_misses(count: Count, reason: str) -> None:
    state = rewrite(captured(mix(count)), [positions.PASS])
    (run,) = state.runs
    assert run.matches == 0
    assert any(reason in declined.reason for _, declined in run.declined)
