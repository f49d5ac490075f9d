"""What the chunked forms share on the GPU: sequences cut into chunks from their own first token, by shapes alone.

One-token sequences are left to the step kernels, which stay exact.
"""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton import own_tile

_LONGEST_ROW_OF_STEPS = 32
"""Tokens beyond one a sequence from which chunks pay, the sequences being unknown."""


def pays_by_chunks(tokens: int, sequences: int) -> bool:
    """Whether a row of `tokens` is run by chunks rather than token by token: a matter of shapes."""
    return tokens > sequences + _LONGEST_ROW_OF_STEPS


def dot_precision(dtype: torch.dtype) -> str:
    """Of products of float32 numbers, for operands of this dtype. A state is read and written many times: TF32's ten
    bits were seen to cost a digit of the result (on an H200). Both operands split into two bfloat16 numbers keep
    sixteen bits, and take no more registers. Triton's interpreter knows no such products.
    """
    return "ieee" if dtype == torch.float32 or triton.knobs.runtime.interpret else "bf16x3"


@triton.jit
def goes_by_chunks(cu_seqlens_ptr, num_seqs, long, R: tl.constexpr):
    """Whether some sequence has `long` new tokens or more. R is a power of two of at least num_seqs."""
    r_R = tl.arange(0, R)
    start_R = tl.load(cu_seqlens_ptr + r_R, mask=r_R < num_seqs, other=0)
    end_R = tl.load(cu_seqlens_ptr + r_R + 1, mask=r_R < num_seqs, other=0)
    return tl.max(end_R - start_R, 0) >= long


@triton.jit
def own_chunk(cu_seqlens_ptr, num_seqs, C: tl.constexpr, R: tl.constexpr):
    """Of the chunk with this program's number: its first token and the one behind its last, not behind the first if it
    is empty or its sequence has one token. See `own_tile`.
    """
    seq, start, begin, end = own_tile(cu_seqlens_ptr, num_seqs, C, R)
    is_one = tl.load(cu_seqlens_ptr + seq + 1) - start == 1
    return begin, tl.where(is_one, begin, end)


@triton.jit
def linear_chunk(q, k, v, g, state, PRECISION: tl.constexpr):
    """Outputs [C, V] and the next state [K, V] of  S = exp(g) S + k v,  out = q S  over a chunk's tokens.

    q, k [C, K], v [C, V], g [C] log decays, all float32; zero where there is no token. Decays are summed in float64:
    two large sums may differ by little, and it is their difference that counts.
    """
    c_C = tl.arange(0, q.shape[0])
    total_C = tl.cumsum(g.to(tl.float64), 0)
    total = tl.sum(g.to(tl.float64), 0)
    is_earlier_CC = c_C[:, None] >= c_C[None, :]
    gap_CC = tl.where(is_earlier_CC, total_C[:, None] - total_C[None, :], 0.0).to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    scores = tl.where(is_earlier_CC, scores * tl.exp(gap_CC), 0.0)
    carried = tl.dot(q, state, input_precision=PRECISION) * tl.exp(total_C.to(tl.float32))[:, None]
    out = carried + tl.dot(scores, v, input_precision=PRECISION)
    to_end_C = tl.exp((total - total_C).to(tl.float32))
    added = tl.dot(tl.trans(k), v * to_end_C[:, None], input_precision=PRECISION)
    return out, state * tl.exp(total.to(tl.float32)) + added
