"""The test of a replayed region's contract, on the real weights: R(x[:n])[:m] == R(x[:m]).

The algebra finds where tokens mix; that no token reads a later one is what this test measures. It catches a shift to
the left, a mean over tokens, the last token, 1/T, a top-k over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import RewriteError
from .graph import describe
from .pipeline import Served

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-7, torch.bfloat16: 6e-2, torch.float16: 1e-2}
SHORTEST = 16
"""A region may need this many tokens to run at all (windows, blocks); shorter texts are padded, which is exact."""


def check_prefix(served: Served, rows: Sequence[torch.Tensor | None]) -> None:
    """Raise RewriteError unless the region is prefix-stable on `rows`; find the shortest text it runs on."""
    replay = served.replay
    assert replay is not None
    total = next((row.shape[0] for row in rows if row is not None), 4 * SHORTEST)
    lengths = [*range(1, SHORTEST + 1), SHORTEST + 1, total // 2, total // 2 + 1, total - 2, total - 1]
    lengths = sorted({length for length in lengths if replay.min_tokens <= length < total})
    whole = replay.run(rows, total)
    limit = TOLERANCE.get(whole.dtype, 0.0)
    scale = max(1.0, float(whole.abs().max())) if whole.is_floating_point() else 1.0
    shortest, worst = replay.min_tokens, 0.0
    for length in lengths:
        error = _difference(served, whole, rows, length) / scale
        if error > limit or error != error:
            shortest, worst = length + 1, error
    if shortest > SHORTEST:
        raise RewriteError(
            f"this {served.region.kind} is not causal: cutting the text to {shortest - 1} of {total} tokens changes its "
            f"result for them by {worst:.1e}",
            operation=describe(served.region.closer), path=served.region.path,
            source=served.region.closer.meta.get("source", ""),
            fix="a model whose tokens depend on later ones cannot generate token by token",
        )  # fmt: skip
    replay.min_tokens = shortest


def _difference(
    served: Served, whole: torch.Tensor, rows: Sequence[torch.Tensor | None], length: int
) -> float:
    replay = served.replay
    assert replay is not None
    try:
        part = replay.run([None if row is None else row[:length] for row in rows], length)
    except (RuntimeError, IndexError):
        return float("inf")  # the subgraph has no result for so short a text
    return float((whole.narrow(replay.out_dim, 0, length).float() - part.float()).abs().max())
