"""Registers the operators: `regraft::invariant_X` for each operator `regraft::X` that mixes tokens, and row-wise ones.

    invariant_linear(x, weight, bias)               invariant_matmul(a, b, fixed)      see `products`
    invariant_sum(x, dims, keepdim, mean)           invariant_softmax(x, dim, dtype, log)
    invariant_norm(x, num_dims, weight, bias, eps, centered)                           see `reductions`
    invariant_topk(x, k, dim, largest)              invariant_sort(x, dim, descending)
    invariant_pointwise(x, function, options)                                          see `pointwise`

On the CPU they run as torch's own operations (`products`, `reductions`, `attention`, `tokens`), on CUDA as Triton
kernels (`cuda`). Elsewhere there is no implementation: called there, torch says so by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import regraft.kernels.causal_conv
import regraft.kernels.decayed_linear
import regraft.kernels.delta_rule
import regraft.kernels.experts
import regraft.kernels.kda
import regraft.kernels.latent_attention
import regraft.kernels.paged_attention
import regraft.kernels.selective_scan
import regraft.kernels.ssd  # noqa: F401 (registers the operators whose schemas are read)

from . import attention, pointwise, products, reductions, tokens

GRAFTED: dict[str, Callable[..., Tensor]] = {
    "paged_attention": attention.paged_attention,
    "latent_attention": attention.latent_attention,
    "gated_delta_rule": tokens.gated_delta_rule,
    "kda": tokens.kda,
    "ssd": tokens.ssd,
    "selective_scan": tokens.selective_scan,
    "decayed_linear": tokens.decayed_linear,
    "causal_conv": tokens.causal_conv,
    "expert_linear": products.expert_linear,
}
"""Operators that have an invariant form with the same arguments."""


def _register(signature: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = f"regraft::{signature.partition('(')[0]}"
    torch.library.define(name, signature.partition("(")[1] + signature.partition("(")[2])
    torch.library.impl(name, "CPU")(run)
    torch.library.impl(name, "CUDA")(_on_cuda(run.__name__))
    torch.library.register_fake(name)(fake)


def on_device(like: Tensor, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, a function of the CPU's, or its twin where `like` is on CUDA."""
    return _on_cuda(run.__name__) if like.is_cuda else run


def _on_cuda(name: str) -> Callable[..., Any]:
    """The function of that name in `cuda`."""

    def run(*args: Any, **options: Any) -> Any:
        return _in_cuda(name)(*args, **options)

    return run


@functools.cache
def _in_cuda(name: str) -> Callable[..., Any]:
    # Triton is not on every machine, and need not be where there is no GPU.
    from . import cuda

    found: Callable[..., Any] = getattr(cuda, name)
    return found


for _name, _run in GRAFTED.items():
    _operator = getattr(torch.ops.regraft, _name).default
    _signature = str(_operator._schema).partition("regraft::")[2]
    _register(f"invariant_{_signature}", _run, _operator)


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _matmul_fake(a: Tensor, b: Tensor, fixed: str) -> Tensor:
    return torch.matmul(a, b).contiguous()


def _sum_fake(x: Tensor, dims: list[int], keepdim: bool, mean: bool) -> Tensor:
    return x.sum(dims, keepdim=keepdim, dtype=x.dtype)


def _softmax_fake(x: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _like_fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _topk_fake(x: Tensor, k: int, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    values = x.narrow(dim, 0, k).contiguous()
    return values, torch.empty_like(values, dtype=torch.int64)


def _sort_fake(x: Tensor, dim: int, descending: bool) -> tuple[Tensor, Tensor]:
    return x.clone(), torch.empty_like(x, dtype=torch.int64)


_register(
    "invariant_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    products.linear,
    _linear_fake,
)
_register(
    "invariant_matmul(Tensor a, Tensor b, str fixed) -> Tensor", products.matmul, _matmul_fake
)
_register(
    "invariant_sum(Tensor x, int[] dims, bool keepdim, bool mean) -> Tensor",
    reductions.sum_over,
    _sum_fake,
)
_register(
    "invariant_softmax(Tensor x, int dim, ScalarType dtype, bool log) -> Tensor",
    reductions.softmax,
    _softmax_fake,
)
_register(
    "invariant_norm(Tensor x, int num_dims, Tensor? weight, Tensor? bias, float eps, bool centered) -> Tensor",
    reductions.norm,
    _like_fake,
)
_register(
    "invariant_topk(Tensor x, int k, int dim, bool largest) -> (Tensor, Tensor)",
    reductions.topk,
    _topk_fake,
)
_register(
    "invariant_sort(Tensor x, int dim, bool descending) -> (Tensor, Tensor)",
    reductions.sort,
    _sort_fake,
)
_register(
    "invariant_pointwise(Tensor x, str function, float[] options) -> Tensor",
    pointwise.pointwise,
    _like_fake,
)
