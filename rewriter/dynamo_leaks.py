"""A graph that is left to the model, called with a packed row: refused where the model lets the texts see each other.

Many models keep the texts of a packed row apart by themselves, as far as attention goes, and a few mix them. Which one
this is, is measured on the row's own first texts, packed and alone, when the first such row comes. Any other call, and
a row whose texts the model keeps apart, runs as the model runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .dynamo_frame import FrameCall
from .dynamo_inputs import Inputs
from .errors import RewriteError
from .packing import pack
from .untouched import untouched, writes_undone

TEXTS, TOKENS = 4, 64
"""How many of a row's texts are looked at, and how many tokens of each."""

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest difference as a part of the largest magnitude: where rounding is far below, and a leak far above."""


@dataclass
class LeftAlone:
    """Called with the inputs of a graph that was left alone for `reason`; the call that it was traced in is `call`.

    ids, attention_mask, position_ids    where these are among the inputs, None for what is not there
    """

    compiled: Callable[..., Any]
    call: FrameCall
    reason: str
    ids: int
    attention_mask: int | None
    position_ids: int
    leak: float | None = None

    def as_function(self) -> Callable[..., Any]:
        """For Dynamo, in whose calls of other objects nothing else is ever compiled."""

        def left_alone(*args: Any) -> Any:
            self.refuse(args)
            return self.compiled(*args)

        return left_alone

    def refuse(self, args: Sequence[Any]) -> None:
        """Raise RewriteError for a row of several texts that would see each other."""
        if self.attention_mask is not None:
            return
        ids, positions = args[self.ids], args[self.position_ids]
        several = (positions.diff(dim=1) != 1).any(1).nonzero()
        if not len(several):
            return
        row = int(several[0])
        bounds = pack(ids[row : row + 1], None, positions[row : row + 1]).cu_seqlens.tolist()
        if self.leak is None:
            self.leak = leak(self.call, [ids[row : row + 1, a:b] for a, b in pairwise(bounds)])
        if self.leak > 0:
            raise RewriteError(
                "the texts of this packed row would see each other: the model itself lets them, and the graph was left "
                f"to it, because {self.reason} (a text's results are off by {self.leak:.0e} of the largest)",
                fix="give a padded batch with an attention_mask, one text a row (or use_cache=False, if a cache is in "
                "the way)",
            )


def refusing_leaks(
    compiled: Callable[..., Any],
    module: fx.GraphModule,
    inputs: Inputs,
    call: FrameCall | None,
    reason: str,
) -> Callable[..., Any]:
    """What to call in place of `compiled`: it itself where no packed row can come, or nothing can be measured."""
    if call is None or inputs.position_ids is None:
        return compiled
    order = {node: i for i, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    mask = None if inputs.attention_mask is None else order[inputs.attention_mask]
    ids, positions = order[inputs.input_ids], order[inputs.position_ids]
    return LeftAlone(compiled, call, reason, ids, mask, positions).as_function()


def leak(call: FrameCall, texts: Sequence[Tensor]) -> float:
    """By how much of the largest magnitude the model's results for the first texts [1, T] depend on which texts are in
    front of them; 0.0 for no more than rounding.
    """
    texts = [text[:, :TOKENS] for text in texts[:TEXTS]]
    places = [torch.arange(text.shape[1], device=text.device)[None] for text in texts]
    with untouched(call.module), writes_undone(call.module):  # these calls are nobody's
        packed = _rows(call.run(torch.cat(texts, 1), torch.cat(places, 1)))
        alone = [_rows(call.run(*each)) for each in zip(texts, places, strict=True)]
    start, worst = 0, 0.0
    for text, rows in zip(texts, alone, strict=True):
        stop = start + text.shape[1]
        for row, own in zip(packed, rows, strict=False):
            if row.shape[1] == sum(t.shape[1] for t in texts) and own.shape[1] == text.shape[1]:
                off = float((row[:, start:stop] - own).abs().max())
                part = off / max(float(own.abs().max()), 1e-6)
                worst = max(worst, part if part > TOLERANCE.get(own.dtype, 5e-2) else 0.0)
        start = stop
    return worst


def _rows(result: Any) -> list[Tensor]:
    """The results that may have one row per token: [1, T, ...]."""
    leaves = pytree.tree_leaves(result)
    leaves += [value for leaf in leaves for value in getattr(leaf, "__dict__", {}).values()]
    return [
        leaf
        for leaf in leaves
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() == 3
    ]
