"""The oracle: gather every row's matrix and multiply."""

from __future__ import annotations

import torch


def expert_linear_naive(
    x: torch.Tensor, weight: torch.Tensor, expert_ids: torch.Tensor, transposed: bool
) -> torch.Tensor:
    matrices = weight[expert_ids]
    if not transposed:
        matrices = matrices.transpose(1, 2)
    return torch.bmm(x[:, None], matrices)[:, 0]
