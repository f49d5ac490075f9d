"""Replay without caches: an unmodified region over each whole sequence of a packed row, differentiable.

Slower than an operator, and no slower than the model itself on one sequence after the other.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from regraft.kernels.varlen.differentiable import recompute

from .replay import Replay

_REGIONS: weakref.WeakValueDictionary[str, Replay] = weakref.WeakValueDictionary()
"""Regions by key. Alive as long as the graph that they were cut from."""

_serial = itertools.count()


def enlist(region: Replay) -> str:
    """The key by which an operator call names a region."""
    key = f"{next(_serial)}:{region.path}"
    _REGIONS[key] = region
    return key


def _run(region: Replay, tensors: Sequence[Tensor], cu_seqlens: Tensor) -> Tensor:
    count = len(region.stored)
    values = [
        layout.rows_first(x) for layout, x in zip(region.stored, tensors[:count], strict=True)
    ]
    region.weights = tuple(tensors[count:])
    bounds = cu_seqlens.tolist()
    outputs = []
    for start, end in pairwise(bounds):
        if start == end:
            continue
        rows = iter([value[start:end] for value in values])
        inputs = [None if layout is None else next(rows) for layout in region.layouts]
        outputs.append(region.run(inputs, end - start))
    return region.result.rebuild(torch.cat(outputs))


@torch.library.custom_op(
    "regraft::varlen_replay",
    mutates_args=(),
    schema="(Tensor[] tensors, Tensor cu_seqlens, SymInt num_tokens, str key) -> Tensor",
)
def varlen_replay(
    tensors: Sequence[Tensor], cu_seqlens: Tensor, num_tokens: int, key: str
) -> Tensor:
    """The region `key` over each sequence: its stored rows and then its weights in, its rows out."""
    with torch.no_grad():
        return _run(_REGIONS[key], tensors, cu_seqlens)


@varlen_replay.register_fake
def _(tensors: Sequence[Tensor], cu_seqlens: Tensor, num_tokens: int, key: str) -> Tensor:
    result = _REGIONS[key].result
    return result.rebuild(cu_seqlens.new_empty(num_tokens, *result.shape, dtype=result.dtype))


@torch.library.custom_op(
    "regraft::varlen_replay_backward",
    mutates_args=(),
    schema="(Tensor grad, bool[] needed, Tensor[] tensors, Tensor cu_seqlens, str key) -> Tensor[]",
)
def varlen_replay_backward(
    grad: Tensor, needed: Sequence[bool], tensors: Sequence[Tensor], cu_seqlens: Tensor, key: str
) -> list[Tensor]:
    """Gradients of the tensors that are `needed`."""
    region = _REGIONS[key]
    return recompute(lambda *own: _run(region, own, cu_seqlens), grad, needed, tensors)


@varlen_replay_backward.register_fake
def _(grad: Tensor, needed: Sequence[bool], tensors: Sequence[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x, needs in zip(tensors, needed, strict=True) if needs]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, cu_seqlens, _, ctx.key = inputs
    ctx.save_for_backward(cu_seqlens, *tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    cu_seqlens, *tensors = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[0])
    found = iter(varlen_replay_backward(grad, needed, tensors, cu_seqlens, ctx.key))
    return [next(found) if needs else None for needs in needed], None, None, None


varlen_replay.register_autograd(_backward, setup_context=_save)
