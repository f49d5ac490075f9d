"""The oracle: row by row, as the words say it."""

from __future__ import annotations

import torch
from torch import Tensor


def greedy_naive(logits: Tensor) -> tuple[Tensor, Tensor]:
    tokens, scores = [], []
    for row in logits.tolist():
        tokens.append(row.index(max(row)))
        scores.append(float("nan") if any(x != x for x in row) else max(row))
    device = logits.device
    return (
        torch.tensor(tokens, dtype=torch.int64, device=device),
        torch.tensor(scores, dtype=torch.float32, device=device),
    )
