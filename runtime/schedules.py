"""How `score` cuts its sequences: from a schedule to the ends of each sequence's chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import RequestError

Schedule = str | int | Sequence[Sequence[int]]


def chunk_ends(schedule: Schedule, lengths: Sequence[int], max_chunk: int) -> list[list[int]]:
    """The ends of the chunks of each sequence, the last one its length.

    "prefill": whole (as much as `max_chunk` tokens at once); "decode": token by token; an int:
    chunks of that many tokens; or one list of cut points per sequence, increasing, from 1 to its
    length. Anything else, or a chunk of more than `max_chunk` tokens, is a RequestError.
    """
    if isinstance(schedule, str) or not isinstance(schedule, (int, Sequence)):
        if schedule not in ("prefill", "decode"):
            raise RequestError(
                f"schedule={schedule!r}: give 'prefill', 'decode', a chunk length, or one list of "
                "cut points per sequence"
            )
        size = max_chunk if schedule == "prefill" else 1
        return [_regular(length, size) for length in lengths]
    if isinstance(schedule, int):
        if isinstance(schedule, bool) or schedule < 1:
            raise RequestError(f"schedule={schedule!r}: a chunk has 1 token or more")
        return [_limited(_regular(length, schedule), max_chunk) for length in lengths]
    if len(schedule) != len(lengths):
        raise RequestError(
            f"schedule has {len(schedule)} lists of cut points for {len(lengths)} sequences: give "
            "one for each"
        )
    return [_limited(_ended(cuts, length), max_chunk) for cuts, length in zip(schedule, lengths)]


def _regular(length: int, size: int) -> list[int]:
    return [*range(size, length, size), length]


def _ended(cuts: Any, length: int) -> list[int]:
    """The cut points and the end of the sequence, which may be one of them."""
    if not isinstance(cuts, Sequence):
        raise RequestError(f"cut points {cuts!r} are no list: give one for each sequence")
    is_counted = all(isinstance(cut, int) for cut in cuts)
    if not is_counted or any(not low < cut <= length for low, cut in zip([0, *cuts], cuts)):
        raise RequestError(
            f"cut points {list(cuts)} of a sequence of {length} tokens do not increase from 1 to {length}"
        )
    return [*cuts] if cuts and cuts[-1] == length else [*cuts, length]


def _limited(ends: list[int], max_chunk: int) -> list[int]:
    size = max(end - start for start, end in zip([0, *ends], ends))
    if size > max_chunk:
        raise RequestError(
            f"a chunk of {size} tokens is more than max_batch_tokens={max_chunk}: cut it, or raise max_batch_tokens"
        )
    return ends
