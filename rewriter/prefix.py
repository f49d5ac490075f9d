"""The test of a replayed region's contract, on the real weights: R(x[:n])[:m] == R(x[:m]).

The algebra finds where tokens mix; that no token reads a later one is what this test measures. It catches a shift to
the left, a mean over tokens, the last token, 1/T, a top-k over tokens. It is made with drawn numbers too (drawn.py),
since weights will be trained.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from .drawn import DRAWS, Drawn
from .errors import RewriteError
from .pipeline import Served
from .replay import Replay
from .token_axis.value import has_tokens

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-7, torch.bfloat16: 6e-2, torch.float16: 1e-2}
SHORTEST = 16
"""A region may need this many tokens to run at all (windows, blocks); shorter texts are padded, which is exact."""
FARTHEST = 1 << 17
"""How far the test looks for a change that begins at some length, where long texts are cheap:"""
FAR_BYTES, FAR_SECONDS = 1 << 27, 0.1
"""no tensor of the region may take more bytes; no run may take more time, which is how opaque modules are bounded."""
COMPARING = frozenset(
    "gt ge lt le eq ne clamp clamp_min clamp_max minimum maximum floor_divide sym_max sym_min floordiv".split()
)

Rows = Sequence[torch.Tensor | None]


@torch.no_grad()
def check_prefix(served: Served, rows: Rows, max_positions: int | None = None) -> None:
    """Raise RewriteError unless the region is prefix-stable on `rows`; find the shortest text it runs on.

    rows             one sequence, [T, *row] per input of the region, None for positions
    max_positions    of the model, which serves no longer text (and may well change beyond: dynamic rope scaling)
    """
    replay = served.replay
    assert replay is not None
    total = next((row.shape[0] for row in rows if row is not None), 4 * SHORTEST)
    replay.min_tokens = _shortest(served, rows, total)
    near = {*range(1, SHORTEST + 2), total // 2, total // 2 + 1, total - 2, total - 1}
    _compare(served, rows, total, near)
    _look_far(served, rows, total, min(FARTHEST, max_positions or FARTHEST))
    _compare_drawn(served, rows, total, {n for n in near if 0 < n < total})


def _compare(served: Served, rows: Rows, total: int, lengths: set[int]) -> None:
    """Cut a text of `total` tokens to each of `lengths`, which must not change the results of what is left."""
    replay = served.replay
    assert replay is not None
    whole = _run(replay, rows, total)
    for length in sorted(length for length in lengths if 0 < length < total):
        error = difference(whole[:length], _run(replay, rows, length))
        if not error <= TOLERANCE.get(whole.dtype, 0.0):
            raise _refusal(
                served,
                f"this {served.region.kind} is not causal: cutting the text to {length} of {total} tokens changes "
                f"its result for them by {error:.1e}",
                "a model whose tokens depend on later ones cannot generate token by token",
            )


def _compare_drawn(served: Served, rows: Rows, total: int, lengths: set[int]) -> None:
    """The same with drawn numbers, of which only finite results are compared."""
    replay = served.replay
    assert replay is not None
    expected = _run(replay, rows, total).isfinite()
    for draws in DRAWS:
        drawn = Drawn(*draws)
        twin, other_rows = drawn.region(replay), drawn.rows_of(rows)
        results = _results(twin, other_rows, {*lengths, total})
        if results is None:
            continue
        whole = results[total]
        for length in sorted(lengths):
            error = difference(*_where_finite(whole[:length], results[length]))
            if not error <= TOLERANCE.get(whole.dtype, 0.0):
                raise _refusal(
                    served,
                    f"this {served.region.kind} is causal with its present weights only: with others, drawn at random, "
                    f"cutting the text to {length} of {total} tokens changes its result for them by {error:.1e}",
                    "a gate that is zero, say, hides that until it is trained: a model whose tokens depend on later "
                    "ones cannot generate token by token",
                )
        if bool((whole.isfinite() | ~expected).all()):
            return


def _results(replay: Replay, rows: Rows, lengths: set[int]) -> dict[int, torch.Tensor] | None:
    """By length of the text; None where these numbers are none that the region runs with."""
    try:
        return {length: _run(replay, rows, length) for length in lengths}
    except (RuntimeError, IndexError, ValueError):
        return None


def _where_finite(one: torch.Tensor, two: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both, with zeros where either is not finite."""
    both = one.isfinite() & two.isfinite()
    return one.where(both, 0), two.where(both, 0)


def _shortest(served: Served, rows: Rows, total: int) -> int:
    """The fewest tokens from which on the region runs."""
    replay = served.replay
    assert replay is not None
    longest = min(SHORTEST, total)
    for length in range(longest, replay.min_tokens - 1, -1):
        if _runs(replay, rows, length):
            continue
        if length == longest:
            raise _refusal(
                served,
                f"this {served.region.kind} cannot be run over {length} tokens",
                "replay needs a region that runs over short texts",
            )
        return length + 1
    return replay.min_tokens


def _look_far(served: Served, rows: Rows, total: int, longest: int) -> None:
    """A region may be causal up to some length only: a rotary embedding that changes, a scale by the length."""
    replay = served.replay
    assert replay is not None
    farthest = min(longest, FAR_BYTES // _bytes_per_token(replay))
    if farthest <= total:
        return
    named = [n for n in _thresholds(replay) if n + 3 <= farthest]
    text = [None if row is None else _repeat(row, farthest) for row in rows]
    lengths, seconds = [total], 0.0
    while lengths[-1] < farthest and seconds < FAR_SECONDS:
        start, longer = time.perf_counter(), min(2 * lengths[-1], farthest)
        if not _runs(replay, text, longer):  # a table may end before
            break
        seconds = time.perf_counter() - start
        lengths.append(longer)
    _compare(served, text, lengths[-1], set(lengths))
    for n in named:
        if n + 3 <= lengths[-1] or _runs(replay, text, n + 3):
            _compare(served, text, n + 3, {n - 1, n, n + 1, n + 2})


def _bytes_per_token(replay: Replay) -> int:
    """Of the largest tensor of the region. Without bound where one has a size of tokens times tokens."""
    largest = 1
    for node in replay.subgraph.graph.nodes:
        sizes = node.meta.get("shape") or ()
        if sum(map(has_tokens, sizes)) > 1:
            return FAR_BYTES
        row = [int(size) for size in sizes if not has_tokens(size)]
        if len(row) < len(sizes):
            largest = max(largest, math.prod(row) * node.meta["dtype"].itemsize)
    return largest


def _thresholds(replay: Replay) -> list[int]:
    """Numbers beyond a short text that the region compares something with."""
    nodes = list(replay.subgraph.graph.nodes)
    names = {
        node: getattr(node.target, "_opname", getattr(node.target, "__name__", ""))
        for node in nodes
    }
    numbers = [
        x for node in nodes if names[node] in COMPARING for x in (*node.args, *node.kwargs.values())
    ]
    return sorted(
        {int(x) for x in numbers if isinstance(x, (int, float)) and SHORTEST < x < FARTHEST}
    )


def _repeat(row: torch.Tensor, length: int) -> torch.Tensor:
    """`length` rows, the given ones again and again."""
    return row[torch.arange(length, device=row.device) % len(row)]


def _run(replay: Replay, rows: Rows, length: int) -> torch.Tensor:
    return replay.run([None if row is None else row[:length] for row in rows], length)


def _runs(replay: Replay, rows: Rows, length: int) -> bool:
    """Whether the region has a result for a text of this length (a table may end before, a window not fit in)."""
    try:
        _run(replay, rows, length).flatten()[:1].tolist()  # to the end, on a GPU too
    except (RuntimeError, IndexError, ValueError):
        return False
    return True


def _refusal(served: Served, problem: str, fix: str) -> RewriteError:
    closer = served.region.closer
    return RewriteError(
        problem,
        operation=str(closer.target),
        path=served.region.path,
        source=closer.meta.get("source", ""),
        fix=fix,
    )


def difference(whole: torch.Tensor, part: torch.Tensor) -> float:
    """Largest difference in units of the largest magnitude (at least 1); for whole numbers, how many differ.

    What is not finite, or as large as the lowest number that masks are filled with, must be equal.
    """
    if whole.is_complex():
        whole, part = torch.view_as_real(whole), torch.view_as_real(part)
    if not whole.is_floating_point():
        return float((whole != part).sum())
    one, two = whole.double(), part.double()
    plain = one.abs() < torch.finfo(whole.dtype).max / 4
    if not torch.equal(one[~plain], two[~plain]):
        return float("inf")
    one, two = one[plain], two[plain]
    return float((one - two).abs().max()) / max(1.0, float(one.abs().max())) if plain.any() else 0.0
