"""Rows of logits for the sampling operators, and a program that runs the Triton kernels without a GPU."""

from __future__ import annotations

from functools import partial

import torch

from regraft.kernels.sampling.naive import greedy_naive
from tests.kernels.triton_process import run_cases
from tests.tolerance import assert_close

SIZES = {
    "one row": (1, 9000),
    "small vocabulary": (3, 5),
    "several parts": (4, 20001),
    "none": (0, 7),
}


def make(name: str, device: str = "cpu") -> torch.Tensor:
    """Few different numbers, so that many are equal, in a strided view; row 1 has a NaN, row 2 infinities."""
    rows, vocab = SIZES[name]
    logits = torch.randint(-50, 50, (rows, 2 * vocab), device=device).float()[:, ::2] / 4
    if rows > 2:
        logits[1, vocab // 2] = torch.nan
        logits[2, 1:] = -torch.inf
    if rows > 3:
        logits[3, vocab - 1] = torch.inf
    return logits


def check(name: str, greedy, device: str = "cpu") -> None:
    """`greedy` against the naive twin; a row that is not fit to choose from may have any token."""
    logits = make(name, device)
    tokens, logprobs = greedy(logits)
    expected_tokens, expected_logprobs = greedy_naive(logits)
    assert tokens.dtype == torch.int64
    assert torch.equal(logprobs.isnan(), expected_logprobs.isnan())
    fit = ~logprobs.isnan()
    assert_close(logprobs[fit], expected_logprobs[fit])
    assert torch.equal(tokens[fit], expected_tokens[fit])
    assert ((tokens >= 0) & (tokens < logits.shape[1]))[fit].all()


def check_alone(name: str, greedy, device: str = "cpu") -> None:
    """A row has the bits that it has alone, wherever in memory it lies and whatever is beside it."""
    logits = make(name, device).contiguous()
    tokens, logprobs = greedy(logits)
    for i in range(len(logits)):
        alone = torch.empty(1, logits.shape[1] + 3, device=device)[:, 3:].copy_(logits[i : i + 1])
        for row in (alone, alone.contiguous(), logits[i : i + 1].clone()):
            token, logprob = greedy(row)
            assert torch.equal(logprob.view(torch.int32), logprobs[i : i + 1].view(torch.int32))
            assert logprob.isnan() or int(token) == int(tokens[i])


if __name__ == "__main__":
    from regraft.kernels.sampling.triton import greedy_triton

    run_cases((name, partial(check, name, greedy_triton)) for name in SIZES)
    run_cases((f"{name}, alone", partial(check_alone, name, greedy_triton)) for name in SIZES)
