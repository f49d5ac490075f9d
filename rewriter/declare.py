"""What a grafted operator needs from the runtime: rows kept per token, states kept per request.

A pass declares caches by name, shape and dtype; the runtime sizes and allocates pools from these declarations
alone and knows no model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SEQUENCE_FIELDS = (
    "cu_seqlens",
    "context_lens",
    "block_table",
    "slot_mapping",
    "state_slots",
    "extents",
)
"""Names of the metadata tensors that a rewritten graph may take (see runtime/batch.py for shapes and dtypes)."""


@dataclass(frozen=True)
class RowSpec:
    """One cache row per token: pool tensor `[num_pages, page_size, *shape]` of `dtype`.

    `name` is unique in the model: module path, a colon, and the operator's name for it ("model.layers.3.self_attn:k").
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes per token."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StateSpec:
    """One state of fixed size per request: pool tensor `[num_slots, *shape]` of `dtype`.

    An operator treats the state of a request whose `context_lens` is 0 as zero, whatever the slot holds.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes per request."""
        return math.prod(self.shape) * self.dtype.itemsize
