"""The value of a tensor without its history: what `detach` is to a model, as an operator that stays in a graph.

A rewritten graph is brought to a form in which copies and aliases are gone, `detach` among them. Where a model stops
a gradient on purpose, this operator stands instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("regraft::stop_gradient", mutates_args=())
def stop_gradient(x: Tensor) -> Tensor:
    """A copy of x through which no gradient flows."""
    return x.clone()


@stop_gradient.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, grad: Tensor) -> None:
    return None


stop_gradient.register_autograd(_backward)
