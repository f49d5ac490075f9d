"""What a grafted operator needs from the runtime: rows kept per token, states kept per request.

A pass declares caches by name, shape and dtype; the runtime sizes and allocates pools from these declarations
alone and knows no model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from regraft.kernels.paged_attention.spans import first_key

SEQUENCE_FIELDS = (
    "cu_seqlens",
    "context_lens",
    "block_table",
    "slot_mapping",
    "state_slots",
    "extents",
)
"""Names of the metadata tensors that a rewritten graph may take (see runtime/batch.py for shapes and dtypes)."""

PAGED_SEQUENCES = ("cu_seqlens", "context_lens", "block_table", "slot_mapping")
"""Those of them that an operator on paged rows takes, in the order of its arguments."""

PAGED_FIELDS = ("block_table", "slot_mapping")
"""Those of them that say where rows are: one of each for every reach that rows have, see `field_of`."""


@dataclass(frozen=True)
class Reach:
    """How far back the rows of earlier tokens are read: as `window` and `chunk` of paged attention, 0 for no limit.

    A row that no token still to come can read need not be kept.
    """

    window: int = 0
    chunk: int = 0

    @functools.cached_property
    def size(self) -> int:
        """Most tokens whose rows one token reads, its own among them; 0 if any number."""
        return min((size for size in (self.window, self.chunk) if size), default=0)

    def first(self, position: int) -> int:
        """The first position that the token at `position`, or any behind it, reads."""
        return first_key(position, self.window, self.chunk)

    def __str__(self) -> str:
        limits = {"window": self.window, "chunk": self.chunk}
        return ", ".join(f"{name} {size}" for name, size in limits.items() if size) or "all"


EVERYTHING = Reach()
"""That of rows which are read back to the start of their sequence."""


def field_of(name: str, reach: Reach) -> str:
    """The name of a metadata tensor for rows of this reach: "block_table", "block_table of window 4096"."""
    return f"{name} of {reach}" if name in PAGED_FIELDS and reach.size else name


@dataclass(frozen=True)
class RowSpec:
    """One cache row per token, or per `every` tokens: pool tensor `[num_pages, rows of a page, *shape]` of `dtype`.

    `name` is unique in the model: module path, a colon, and the operator's name for it ("model.layers.3.self_attn:k").
    Rows of one `reach` share pages. A row of several tokens lies in the page of the last one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    reach: Reach = EVERYTHING
    every: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes per token, rounded up, in pages of at least `every` tokens."""
        return -(-self.row_bytes // self.every)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    def pool_shape(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        """Of the pool with pages of `page_size` tokens: as many rows a page as may end in one."""
        return (num_pages, -(-page_size // self.every), *self.shape)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page of `page_size` tokens."""
        return -(-page_size // self.every) * self.row_bytes


def reaches_of(rows: Iterable[RowSpec]) -> tuple[Reach, ...]:
    """The reaches that rows have, each once, the farthest first; all there is for no rows."""
    found = {row.reach for row in rows} or {EVERYTHING}
    return tuple(sorted(found, key=lambda reach: (reach.size > 0, -reach.size, reach.window)))


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
