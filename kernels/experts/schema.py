"""`regraft::expert_linear`: rows sorted by expert, one matmul an expert, and back.

Each row's result is the dot products of that row alone, so routing is row-local by construction.
"""

from __future__ import annotations

import torch

from .grouped import product_by_expert
from .naive import expert_linear_naive


@torch.library.custom_op("regraft::expert_linear", mutates_args=())
def expert_linear(
    x: torch.Tensor, weight: torch.Tensor, expert_ids: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """Multiply each row by its expert's matrix.

    x           [S, in]
    weight      [E, out, in], or [E, in, out] if `transposed`
    expert_ids  [S] int64, each in 0..E-1
    returns     [S, out]
    """
    return expert_linear_naive(x, weight, expert_ids, transposed)


@expert_linear.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, expert_ids: torch.Tensor, transposed: bool
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])


@expert_linear.register_kernel("cpu")
def _(
    x: torch.Tensor, weight: torch.Tensor, expert_ids: torch.Tensor, transposed: bool
) -> torch.Tensor:
    return product_by_expert(
        x, weight, expert_ids, transposed, lambda rows, matrix: rows @ matrix.T
    )


@expert_linear.register_kernel("cuda")
def _(
    x: torch.Tensor, weight: torch.Tensor, expert_ids: torch.Tensor, transposed: bool
) -> torch.Tensor:
    # Triton is not on every machine, and need not be where there is no GPU.
    from .triton import expert_linear_triton

    return expert_linear_triton(x, weight, expert_ids, transposed)
