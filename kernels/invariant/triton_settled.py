"""Operands as kernels are compiled for: one way for the same layer, however many rows a step has.

Triton compiles a kernel by whether addresses and strides are multiples of 16, and lays a tile out over threads by what
it then knows: a sum within a tile could go in another order. The stride of a dimension of size 1 says nothing, so it
must not decide either.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_STEP = 16


def settled(x: Tensor) -> Tensor:
    """`x`, copied unless it lies evenly: consecutive in its last dimension, strides of the others multiples of 16, and
    so they would be if it were contiguous.
    """
    packed = _packed(x.shape)
    if x.stride() == packed and _is_even(packed) and not x.data_ptr() % _STEP:
        return x
    strides = tuple(p if size == 1 else by for p, size, by in zip(packed, x.shape, x.stride()))
    if not (_is_even(strides) and _is_even(packed)) or x.data_ptr() % _STEP:
        x, strides = x.clone(memory_format=torch.contiguous_format), packed
    return x if x.stride() == strides else x.as_strided(x.shape, strides)


@functools.cache
def _packed(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor, also in dimensions of size 1."""
    packed = [1]
    for size in reversed(shape[1:]):
        packed.append(packed[-1] * size)
    return tuple(reversed(packed))


def _is_even(strides: tuple[int, ...]) -> bool:
    return strides[-1] == 1 and all(by % _STEP == 0 for by in strides[:-1])
