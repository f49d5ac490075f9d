"""Rows of logits for the sampling operators, and a program that runs the Triton kernels without a GPU."""

from __future__ import annotations

from functools import partial

import torch

from regraft.kernels.sampling.naive import greedy_naive
from tests.kernels.triton_process import run_cases

SIZES = {
    "one row": (1, 9000),
    "small vocabulary": (3, 5),
    "several parts": (4, 20001),
    "none": (0, 7),
}


def make(name: str, device: str = "cpu") -> torch.Tensor:
    """Whole numbers, so that many are equal, in a strided view; row 1 has a NaN, row 2 infinities."""
    rows, vocab = SIZES[name]
    logits = torch.randint(-50, 50, (rows, 2 * vocab), device=device).float()[:, ::2]
    if rows > 2:
        logits[1, vocab // 2] = torch.nan
        logits[2, 1:] = -torch.inf
    return logits


def check(name: str, greedy, device: str = "cpu") -> None:
    """`greedy` against the naive twin; a row with a NaN may have any token."""
    logits = make(name, device)
    tokens, best = greedy(logits)
    expected_tokens, expected_best = greedy_naive(logits)
    assert tokens.dtype == torch.int64
    assert torch.equal(best.isnan(), expected_best.isnan())
    fit = ~best.isnan()
    assert torch.equal(best[fit], expected_best[fit])
    assert torch.equal(tokens[fit], expected_tokens[fit])
    assert ((tokens >= 0) & (tokens < logits.shape[1]))[fit].all()


if __name__ == "__main__":
    from regraft.kernels.sampling.triton import greedy_triton

    run_cases((name, partial(check, name, greedy_triton)) for name in SIZES)
