"""`regraft.compare`: what it cannot compare is an error that says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regraft

LOGITS = torch.linspace(-1, 1, 15).reshape(3, 5)


@pytest.mark.parametrize(
    ("a", "b", "tokens", "match"),
    [
        (LOGITS, LOGITS, [[1, 2, 3], [1]], "1 and 1 sets of logits for 2 sequences"),
        (LOGITS, LOGITS[:, :4], [1, 2, 3], r"logits \(3, 5\) and \(3, 4\) for 3 tokens"),
        (LOGITS, LOGITS, [1, 2], r"logits \(3, 5\) and \(3, 5\) for 2 tokens"),
        (LOGITS[:, 0], LOGITS[:, 0], [1, 2, 3], r"logits \(3,\) and \(3,\) for 3 tokens"),
        (LOGITS, LOGITS, [1, 2, 5], "outside the vocabulary of 5"),
        (LOGITS, LOGITS, [1, 2, -1], "outside the vocabulary of 5"),
        ([], [], [], "nothing to compare"),
        (LOGITS.numpy(), LOGITS.numpy(), [1, 2, 3], "logits are torch tensors .*, not ndarray"),
        ([LOGITS], LOGITS.tolist(), [1, 2, 3], "not list"),
    ],
)
def test_what_cannot_be_compared(a: Any, b: Any, tokens: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        regraft.compare(a, b, tokens)


def test_what_is_equal_is_noise() -> None:
    found = regraft.compare(LOGITS, LOGITS.clone(), [1, 2, 3])
    assert found.acceptable
    assert (found.mean_kl, found.top5_overlap, found.dnll, found.max_abs) == (0, 1, 0, 0)


def test_equal_infinities_are_no_difference():
    logits = torch.randn(5, 7)
    logits[:, 6] = -torch.inf
    text = [1, 6, 2, 6, 3]
    same = regraft.compare(logits, logits.clone(), torch.tensor(text))
    assert (same.max_abs, same.dnll, same.acceptable) == (0.0, 0.0, True)
    other = logits.clone()
    other[2, 6] = 0.0
    assert not regraft.compare(logits, other, text).acceptable
    assert not regraft.compare(other, logits, text).acceptable
    assert regraft.compare(logits, other, text).max_abs == torch.inf
