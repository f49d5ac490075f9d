"""Presence and frequency penalties, against their definition written out."""

from __future__ import annotations

import torch

from regraft.runtime.serve.penalties import CountPenalty


def test_counts_of_what_was_made():
    history = torch.tensor([[5, 5, 2, 7, 7, 1]])
    scores = torch.arange(9.0)[None]
    processed = CountPenalty(2, presence=0.5, frequency=0.25)(history, scores)
    expected = list(range(9))
    for token, count in {2: 1, 7: 2, 1: 1}.items():
        expected[token] -= 0.5 + 0.25 * count
    assert processed[0].tolist() == expected
    assert torch.equal(scores[0], torch.arange(9.0))
    nothing_made = CountPenalty(6, 1.0, 1.0)(history, scores)
    assert torch.equal(nothing_made, scores)
