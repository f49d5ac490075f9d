"""One copy to the device per step: metadata of all dtypes packed into one pinned buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Arrays = Mapping[str, npt.NDArray[Any]]

_ALIGNMENT = 16
"""Bytes. Kernels load metadata in vectors of at most this size."""


@dataclass(frozen=True)
class Section:
    """Where one array lies in the buffer."""

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Where each array lies in one buffer of `num_bytes`."""

    sections: dict[str, Section]
    num_bytes: int

    @classmethod
    def of(cls, arrays: Arrays) -> Layout:
        """A layout for arrays of these shapes and dtypes."""
        sections, end = {}, 0
        for name, array in arrays.items():
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            sections[name] = Section(start, array.shape, array.dtype)
            end = sections[name].end
        return cls(sections, end)

    def pinned(self, arrays: Arrays) -> torch.Tensor:
        """A new pinned buffer with these arrays in it.

        torch reuses pinned memory only when the copies from it are done, so a buffer a step is safe, and cheap.
        """
        pins = torch.cuda.is_available()
        buffer = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=pins)
        self.fill(buffer, arrays)
        return buffer

    def fill(self, buffer: torch.Tensor, arrays: Arrays) -> None:
        """Writes the arrays into a buffer on the CPU; zeros behind one that is shorter than its section."""
        raw = buffer.numpy()
        for name, section in self.sections.items():
            view = raw[section.start : section.end].view(section.dtype).reshape(section.shape)
            count = arrays[name].shape[-1]
            view[..., :count] = arrays[name]
            view[..., count:] = 0

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays as tensors that share the memory of `buffer`, on any device."""
        return {
            name: buffer[section.start : section.end]
            .view(torch.from_numpy(np.empty(0, section.dtype)).dtype)
            .view(section.shape)
            for name, section in self.sections.items()
        }


def upload(arrays: Arrays, device: torch.device) -> dict[str, torch.Tensor]:
    """The arrays as tensors on `device`. On the CPU they share the arrays' memory."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    layout = Layout.of(arrays)
    return layout.views(layout.pinned(arrays).to(device, non_blocking=True))
