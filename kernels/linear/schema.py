"""`regraft::linear`: torch's `linear`, which on a GPU takes a kernel of its own while rows are few.

What few rows cost is reading the weight. BLAS reads large matrices at nearly what memory allows, smaller ones at half
of it, and starts only when the operation before is done.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

torch.library.define("regraft::linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")

linear = torch.ops.regraft.linear.default
"""x [..., K] @ weight [N, K]^T + bias [N] -> [..., N], contiguous, in x's dtype."""


@torch.library.impl("regraft::linear", "CPU")
def _linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight, bias)


@torch.library.impl("regraft::linear", "CUDA")
def _linear_cuda(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Triton is not on every machine, and need not be where there is no GPU.
    from .triton import linear_triton

    return linear_triton(x, weight, bias)


@torch.library.register_fake("regraft::linear")
def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
