"""`greedy`: the best token of each row of logits. `draw`: one drawn from each row's own distribution. A row's token has
nothing to do with the rows beside it, and the host reads nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .naive import draw_naive


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the largest logits of each row. On a GPU the same bits whatever rows are beside it.

    Args:
        logits: [S, vocab], any floating dtype; rows may be strided.

    Returns:
        tokens [S] int64 and their log-probabilities [S] float32; NaN, and any token, for a row that has NaN or +inf in
        it, or nothing but -inf.
    """
    if logits.is_cuda:
        # Triton is not on every machine, and need not be where there is no GPU.
        from .triton import greedy_triton

        return greedy_triton(logits)
    tokens = logits.argmax(dim=-1)  # the first of equal ones, and a NaN before all
    return tokens, logits.float().log_softmax(dim=-1).gather(-1, tokens[:, None])[:, 0]


def draw(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """A token of each row, drawn as transformers' warpers say, applied in their order.

    Scores are the logits in float32 divided by the temperature. Top-k keeps all that are no less than the k-th. Top-p
    drops a score where those above it come to top_p of what top-k left, never the best; of equal scores where it ends
    it drops those of the lowest indices. Min-p drops what is less than min_p times as probable as the best. What is
    left is summed in the order of indices, and the token is the one within which the share `uniforms` of the sum falls:
    none of probability 0.

    On a GPU a row's token and log-probability are the same bits whatever rows are beside it. On the CPU this is the
    definition, row by row: not fast.

    Args:
        logits: [S, vocab], any floating dtype; rows may be strided. -inf is a token that is never drawn.
        temperature: [S] float64, above 0.
        top_k: [S] int64; 0, or vocab and more, keeps all.
        top_p: [S] float64 of [0, 1]; 1 keeps all.
        min_p: [S] float64 of [0, 1]; 0 keeps all.
        uniforms: [S] float64 of [0, 1).

    Returns:
        tokens [S] int64, and the log-probabilities [S] float32 of them in what they were drawn from; NaN, and any
        token, for a row that has NaN or +inf in it, or nothing but -inf, once it is divided by the temperature.

    Raises:
        ValueError: a tensor has another shape, dtype or device. Values are not looked at.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"logits: floats [S, vocab], not {logits.dtype} {list(logits.shape)}")
    settings = {
        "temperature": (temperature, torch.float64),
        "top_k": (top_k, torch.int64),
        "top_p": (top_p, torch.float64),
        "min_p": (min_p, torch.float64),
        "uniforms": (uniforms, torch.float64),
    }
    for name, (value, dtype) in settings.items():
        if value.shape != logits.shape[:1] or value.dtype != dtype or value.device != logits.device:
            raise ValueError(
                f"{name}: {dtype} [{logits.shape[0]}] on {logits.device}, not {value.dtype} "
                f"{list(value.shape)} on {value.device}"
            )
    if logits.is_cuda:
        from .triton_draw import draw_triton

        return draw_triton(logits, temperature, top_k, top_p, min_p, uniforms)
    return draw_naive(logits, temperature, top_k, top_p, min_p, uniforms)
