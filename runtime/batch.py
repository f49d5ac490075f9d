"""The packed row of one step and its metadata.

N tokens in the row, R sequences in it, S rows whose logits are wanted:

    input_ids, position_ids  [1, N] int64  position = index of the token in its own request
    cu_seqlens               [R+1]  int32  offsets of each sequence's new tokens in the row
    context_lens             [R]    int32  tokens of the sequence cached before this step
    block_table              [R, P] int32  its pages; unused entries 0
    slot_mapping             [N]    int64  page * page_size + offset of each new token's rows
                                           these two once for each reach that rows have, by `declare.field_of`
    state_slots              [R]    int64  its slot in the state pools
    extents                  [R]    int64  length of the request that the rows are computed for
    logits_rows              [S]    int64  indices in the row; never empty
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from regraft.rewriter.declare import Reach, field_of

from .pages import BlockTables
from .request import Request, Span
from .sampling_params import SamplingParams

Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """The inputs of one step by name, on the host, and how many of its rows of logits somebody wants."""

    arrays: dict[str, npt.NDArray[Any]]
    num_logits: int

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The arrays as tensors on the CPU, sharing their memory."""
        return {name: torch.from_numpy(array) for name, array in self.arrays.items()}

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has just one new token."""
        return self.arrays["input_ids"].shape[1] == len(self.arrays["context_lens"])


def build_batch(
    spans: Sequence[Span], tables: Mapping[Reach, BlockTables], page_size: int, min_tokens: int
) -> Batch:
    """Packs spans, in their order, into one row of at least `min_tokens` tokens. `tables` are by the reach of rows.

    A shorter row is filled up with a sequence of its own: zeros in the scratch page and slot.
    """
    num_tokens = sum(span.num_tokens for span in spans)
    logits = [span.num_logits for span in spans]
    if num_tokens < min_tokens:
        spans = [*spans, _padding(min_tokens - num_tokens)]
    requests = [span.request for span in spans]
    starts = _array([span.start for span in spans])
    counts = _array([span.end for span in spans]) - starts
    slots = _array([request.slot for request in requests])
    cu_seqlens = np.zeros(len(spans) + 1, dtype=np.int64)
    np.cumsum(counts, out=cu_seqlens[1:])

    positions = np.arange(cu_seqlens[-1]) + np.repeat(starts - cu_seqlens[:-1], counts)
    width = 1 + int(positions.max()) // page_size if page_size else 1
    arrays: dict[str, npt.NDArray[Any]] = {
        "input_ids": _row([t for s in spans for t in s.request.tokens[s.start : s.end]]),
        "position_ids": _row(positions),
        "cu_seqlens": cu_seqlens.astype(np.int32),
        "context_lens": starts.astype(np.int32),
        "state_slots": slots,
        "extents": _array([len(request.tokens) for request in requests]),
        "logits_rows": _logits_rows(cu_seqlens, logits),
    }
    owners = np.repeat(slots, counts)
    for reach, table in tables.items():
        table.widen(width)
        places = _slot_mapping(table, owners, positions, page_size)
        arrays[field_of("block_table", reach)] = table.array[slots, :width]
        arrays[field_of("slot_mapping", reach)] = places
    return Batch(arrays, sum(logits))


def pad(arrays: Mapping[str, npt.NDArray[Any]], least: int) -> dict[str, npt.NDArray[Any]]:
    """The same step with no size below `least`: sequences without tokens, rows of logits that nobody wants.

    The row itself must have as many tokens already.
    """
    missing = max(0, least - len(arrays["context_lens"]))
    padded = {**arrays, "cu_seqlens": np.pad(arrays["cu_seqlens"], (0, missing), mode="edge")}
    for name in ("context_lens", "state_slots", "extents"):
        padded[name] = np.pad(arrays[name], (0, missing))
    for name in filter(is_block_table, arrays):
        pages = max(0, least - arrays[name].shape[1])
        padded[name] = np.pad(arrays[name], ((0, missing), (0, pages)))
    rows = arrays["logits_rows"]
    padded["logits_rows"] = np.pad(rows, (0, max(0, least - len(rows))))
    return padded


def is_block_table(name: str) -> bool:
    """Whether a tensor of a step is a block table, of rows of whatever reach."""
    return name.startswith("block_table")


def _slot_mapping(tables: BlockTables, slots: Array, positions: Array, page_size: int) -> Array:
    if not page_size:
        return np.zeros_like(positions)
    pages = tables.array[slots, positions // page_size].astype(np.int64)
    return pages * page_size + positions % page_size


def _logits_rows(cu_seqlens: Array, counts: Sequence[int]) -> Array:
    """The last `counts[i]` rows of each sequence; row 0 if nobody wants any."""
    ends = cu_seqlens[1 : len(counts) + 1]
    if max(counts) <= 1:
        rows = ends[_array(counts) == 1] - 1
    else:
        rows = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, counts)])
    return rows if rows.size else np.zeros(1, dtype=np.int64)


def _padding(count: int) -> Span:
    """A sequence of `count` zeros that owns nothing: slot 0 has no pages but page 0."""
    filler = Request("", -1, [0] * count, SamplingParams(max_new_tokens=1))
    return Span(filler, 0, count)


def _row(values: Sequence[int] | Array) -> Array:
    """[1, N]. Not by a new axis, whose stride would be 0 and not N."""
    return np.asarray(values, dtype=np.int64).reshape(1, -1)


def _array(values: Sequence[int]) -> Array:
    return np.array(values, dtype=np.int64)
