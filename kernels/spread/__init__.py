"""`regraft::spread`: one number per request, handed to each of its tokens."""

from __future__ import annotations

import torch

__all__ = ["spread"]


@torch.library.custom_op("regraft::spread", mutates_args=())
def spread(values: torch.Tensor, cu_seqlens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Per-request values on the packed row.

    values      [R]
    cu_seqlens  [R+1] int32, offsets of the requests in the row
    like        [1, N], any tensor with the row's shape
    returns     [1, N] of values' dtype; tokens behind the last request get the last value
    """
    index = torch.arange(like.shape[1], device=values.device, dtype=cu_seqlens.dtype)
    request = torch.searchsorted(cu_seqlens[1:], index, right=True).clamp_max(values.shape[0] - 1)
    return values[request][None]


@spread.register_fake
def _(values: torch.Tensor, cu_seqlens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(like.shape, dtype=values.dtype)
