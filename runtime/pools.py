"""The caches of a model: one pool for each rows and state that it declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from regraft.rewriter.declare import Reach

if TYPE_CHECKING:
    from .runner import RewrittenModel


def pool_shapes(
    model: RewrittenModel, pages: Mapping[Reach, int], page_size: int, num_slots: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes by name: `pages` are those of each pool of rows, by the rows' reach, `num_slots` those of the
    states.
    """
    rows = {r.name: (r.pool_shape(pages[r.reach], page_size), r.dtype) for r in model.rows}
    return rows | {s.name: ((num_slots, *s.shape), s.dtype) for s in model.states}
