"""The test of a replayed region's contract, on the real weights: R(x[:n])[:m] == R(x[:m]).

The algebra finds where tokens mix; that no token reads a later one is what this test measures. It catches a shift to
the left, a mean over tokens, the last token, 1/T, a top-k over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import RewriteError
from .pipeline import Served
from .replay import Replay

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-7, torch.bfloat16: 6e-2, torch.float16: 1e-2}
SHORTEST = 16
"""A region may need this many tokens to run at all (windows, blocks); shorter texts are padded, which is exact."""

Rows = Sequence[torch.Tensor | None]


def check_prefix(served: Served, rows: Rows) -> None:
    """Raise RewriteError unless the region is prefix-stable on `rows`; find the shortest text it runs on.

    rows    one sequence, [T, *row] per input of the region, None for positions
    """
    replay = served.replay
    assert replay is not None
    total = next((row.shape[0] for row in rows if row is not None), 4 * SHORTEST)
    replay.min_tokens = _shortest(served, rows, total)
    whole = replay.run(rows, total)
    lengths = {*range(1, SHORTEST + 2), total // 2, total // 2 + 1, total - 2, total - 1}
    for length in sorted(length for length in lengths if 0 < length < total):
        error = _difference(whole[:length], _run(replay, rows, length))
        if not error <= TOLERANCE.get(whole.dtype, 0.0):
            raise _refusal(
                served,
                f"this {served.region.kind} is not causal: cutting the text to {length} of {total} tokens changes "
                f"its result for them by {error:.1e}",
                "a model whose tokens depend on later ones cannot generate token by token",
            )


def _shortest(served: Served, rows: Rows, total: int) -> int:
    """The fewest tokens from which on the region runs."""
    replay = served.replay
    assert replay is not None
    for length in range(min(SHORTEST, total), replay.min_tokens - 1, -1):
        try:
            _run(replay, rows, length)
        except (RuntimeError, IndexError, ValueError) as problem:
            if length == min(SHORTEST, total):
                text = f"this {served.region.kind} cannot be run over {length} tokens: {problem}"
                raise _refusal(
                    served, text, "replay needs a region that runs over short texts"
                ) from problem
            return length + 1
    return replay.min_tokens


def _run(replay: Replay, rows: Rows, length: int) -> torch.Tensor:
    return replay.run([None if row is None else row[:length] for row in rows], length)


def _refusal(served: Served, problem: str, fix: str) -> RewriteError:
    closer = served.region.closer
    return RewriteError(
        problem,
        operation=str(closer.target),
        path=served.region.path,
        source=closer.meta.get("source", ""),
        fix=fix,
    )


def _difference(whole: torch.Tensor, part: torch.Tensor) -> float:
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
