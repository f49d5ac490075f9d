"""`greedy`: the best token of each row of logits, in one reading of them."""

from __future__ import annotations

from torch import Tensor


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the largest logits of each row.

    Args:
        logits: [S, vocab], any floating dtype; rows may be strided.

    Returns:
        tokens [S] int64 and their logits [S] float32; NaN, and any token, for a row with a NaN in it.
    """
    if logits.is_cuda:
        # Triton is not on every machine, and need not be where there is no GPU.
        from .triton import greedy_triton

        return greedy_triton(logits)
    tokens = logits.argmax(dim=-1)  # the first of equal ones, and a NaN before all
    return tokens, logits.gather(-1, tokens[:, None])[:, 0].float()
