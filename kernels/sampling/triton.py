"""The best token of each row on the GPU: parts of a row side by side, then the best of the parts.

How a row is cut, and in what order its parts are summed up, has nothing to do with the rows beside it.
"""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regraft.kernels.whole import cdiv, power_of_2

_PART = 4096
"""Logits a program reads."""

_STEP = 16
"""Multiples by which Triton tells integers and addresses apart."""


def greedy_triton(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See schema.greedy."""
    rows, vocab = logits.shape
    parts = cdiv(vocab, _PART)
    scores, sums = torch.empty(2, rows, parts, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        logits = _aligned(logits)
        stride = logits.stride(0) if rows > 1 else 0
        part_kernel[(rows, parts)](
            logits, stride, scores, sums, places, vocab, PART=_PART, num_warps=8, enable_fp_fusion=False
        )  # fmt: skip
        row_kernel[(rows,)](
            scores, sums, places, tokens, logprobs, parts, P=power_of_2(parts), num_warps=1, enable_fp_fusion=False
        )  # fmt: skip
    return tokens, logprobs


def _aligned(logits: Tensor) -> Tensor:
    """The same logits where rows are consecutive and begin at multiples of 16: copied if they do not.

    What a kernel is told of strides and alignment changes how it spreads a row over threads, and so its sums: this way
    it is always told the same, and reads whole vectors.
    """
    rows, vocab = logits.shape
    is_even = rows == 1 or logits.stride(0) % _STEP == 0
    if is_even and logits.stride(1) == 1 and logits.data_ptr() % _STEP == 0:
        return logits
    padded = logits.new_empty(rows, cdiv(vocab, _STEP) * _STEP)[:, :vocab]
    return padded.copy_(logits)


@triton.jit
def part_kernel(
    logits_ptr, stride_row, scores_ptr, sums_ptr, places_ptr, vocab, PART: tl.constexpr
):
    """One program a (row, part): the best logit, where it is, and the sum of what the others weigh beside it; NaN if
    there is one.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    v_P = part * PART + tl.arange(0, PART)
    is_in_P = v_P < vocab
    row_ptr = logits_ptr + row.to(tl.int64) * stride_row
    x_P = tl.load(row_ptr + v_P, mask=is_in_P, other=float("-inf")).to(tl.float32)
    is_nan_P = x_P != x_P
    clean_P = tl.where(is_nan_P, float("-inf"), x_P)
    best = tl.max(clean_P, 0)
    place = tl.min(tl.where((clean_P == best) & is_in_P, v_P, 2147483647), 0)
    total = tl.sum(tl.exp(clean_P - tl.where(best == float("-inf"), 0.0, best)), 0)
    at = row * tl.num_programs(1) + part
    tl.store(scores_ptr + at, tl.where(tl.max(is_nan_P.to(tl.int32), 0) > 0, float("nan"), best))
    tl.store(sums_ptr + at, total)
    tl.store(places_ptr + at, place)


@triton.jit
def row_kernel(scores_ptr, sums_ptr, places_ptr, tokens_ptr, logprobs_ptr, parts, P: tl.constexpr):
    """One program a row: the best of its parts, the first of equal ones, and its log-probability."""
    row = tl.program_id(0)
    p_P = tl.arange(0, P)
    is_in_P = p_P < parts
    x_P = tl.load(scores_ptr + row * parts + p_P, mask=is_in_P, other=float("-inf"))
    is_nan_P = x_P != x_P
    clean_P = tl.where(is_nan_P, float("-inf"), x_P)
    best = tl.max(clean_P, 0)
    places_P = tl.load(places_ptr + row * parts + p_P, mask=is_in_P, other=2147483647)
    token = tl.min(tl.where(clean_P == best, places_P, 2147483647), 0)
    sums_P = tl.load(sums_ptr + row * parts + p_P, mask=is_in_P, other=0.0)
    total = tl.sum(sums_P * tl.exp(clean_P - best), 0)
    is_fit = (
        (best > float("-inf")) & (best < float("inf")) & (tl.max(is_nan_P.to(tl.int32), 0) == 0)
    )
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, tl.where(is_fit, -tl.log(total), float("nan")))
