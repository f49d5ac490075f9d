"""Elementwise functions that torch rounds one way in vector registers and another in the rest of a row.

Each is spelled with operations for which both ways agree (+ - * / sqrt exp log1p erf tanh), in float32 or wider.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .reductions import wide


def _sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + (-x).exp())


def _silu(x: Tensor) -> Tensor:
    return x / (1.0 + (-x).exp())


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + (x * math.sqrt(0.5)).erf())


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = x + x * x * x * 0.044715
    return 0.5 * x * (1.0 + (inner * math.sqrt(2.0 / math.pi)).tanh())


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, x, scaled.exp().log1p() / beta)


def _elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    return torch.where(x > 0, x * scale, ((x * input_scale).exp() - 1.0) * (alpha * scale))


def _mish(x: Tensor) -> Tensor:
    return x * _softplus(x).tanh()


def _rsqrt(x: Tensor) -> Tensor:
    return 1.0 / x.sqrt()


def _exp2(x: Tensor) -> Tensor:
    return (x * math.log(2.0)).exp()


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "sigmoid": _sigmoid,
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "softplus": _softplus,
    "elu": _elu,
    "mish": _mish,
    "rsqrt": _rsqrt,
    "exp2": _exp2,
}


def pointwise(x: Tensor, function: str, options: Sequence[float] = ()) -> Tensor:
    """`FUNCTIONS[function](x, *options)`, in x's dtype."""
    return FUNCTIONS[function](x.to(wide(x.dtype)), *options).to(x.dtype)
