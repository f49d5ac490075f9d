"""What is derived from a packed row's metadata, kept from layer to layer of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_MOST = 4
"""Rows kept."""


@dataclass(frozen=True)
class Metadata:
    """Of a packed row; shapes as in `paged_attention`."""

    cu_seqlens: Tensor
    context_lens: Tensor
    block_table: Tensor

    def equals(self, other: Metadata) -> bool:
        return all(torch.equal(mine, vars(other)[name]) for name, mine in vars(self).items())

    def copy(self) -> Metadata:
        return Metadata(*(tensor.clone() for tensor in vars(self).values()))


@dataclass(frozen=True)
class _Row(Generic[T]):
    metadata: Metadata
    made: dict[tuple[int, ...], T] = field(default_factory=dict)


class OfLastRow(Generic[T]):
    """`make(metadata, *settings)` of the row seen last, by settings.

    Every layer of a step asks for the same, but for the page table, of which there is one for each reach that layers
    have: a few are kept. A row is recognised by its contents: a caller may refill its metadata tensors in place.
    """

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._last: list[_Row[T]] = []

    def __call__(self, metadata: Metadata, *settings: int) -> T:
        row = next((row for row in self._last if row.metadata.equals(metadata)), None)
        if row is None:
            row = _Row(metadata.copy())
            # Replaced as a whole: another thread may be looking through it.
            self._last = [row, *self._last[: _MOST - 1]]
        if settings not in row.made:
            row.made[settings] = self._make(row.metadata, *settings)
        return row.made[settings]
