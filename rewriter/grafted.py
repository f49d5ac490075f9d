"""What Dynamo calls in place of a graph that was grafted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from .backend_report import GraphReport
from .dynamo_cut import Place
from .errors import RewriteError
from .module_leaf import get_tensor
from .own_weights import Held
from .packing import NotPackable, Packing, pack, refuse_shifted
from .sizes import Interval

ROWS = ("input_ids", "position_ids")
"""Inputs [1, N] of a grafted graph; its other inputs besides weights have one entry per sequence."""


@dataclass(frozen=True)
class Given:
    """A weight among the inputs, or a part of one ("qdata")."""

    at: int
    part: str = ""

    def of(self, inputs: Sequence[Any]) -> Tensor:
        tensor: Tensor = inputs[self.at]
        return attrgetter(self.part)(tensor) if self.part else tensor


@dataclass(frozen=True)
class Grafted:
    """Called with the inputs of `original`, returns its outputs.

    original     the graph as it came, for a batch that cannot be packed
    ids, attention_mask, position_ids    where these are among the inputs, None for what is not there
    compiled     the grafted graph: (*sequence_inputs, *weights) -> values with one row per token
    weights      where each of its weights is among the inputs, or which module holds it
    places       where each of its values has batch and tokens in the original
    rest         (*inputs, *those values) -> the outputs
    holds        for how many tokens the grafted graph is right
    counts_places  whether some of it makes windows of tokens, or runs over each text as it is: it may count places from
                 the text's first token on
    must_pack    a batch that cannot be packed is a RewriteError
    """

    original: fx.GraphModule
    ids: int
    attention_mask: int | None
    position_ids: int | None
    compiled: Callable[..., Sequence[Tensor]]
    sequence_inputs: tuple[str, ...]
    weights: tuple[Given | Held, ...]
    places: tuple[Place, ...]
    rest: fx.GraphModule
    holds: Interval
    report: GraphReport
    counts_places: bool = False
    must_pack: bool = False

    def as_function(self) -> Callable[..., Any]:
        """For Dynamo, in whose calls of other objects nothing else is ever compiled."""

        def grafted(*args: Any) -> Any:
            return self.run(*args)

        return grafted

    def run(self, *args: Any) -> Any:
        """The graph's outputs."""
        self.report.calls += 1
        ids: Tensor = args[self.ids]
        mask, positions = (
            None if at is None else args[at] for at in (self.attention_mask, self.position_ids)
        )
        try:
            if self.counts_places and mask is not None:
                refuse_shifted(mask)
            packing = pack(ids, mask, positions)
            groups = list(_groups(packing, self.holds.high))
        except NotPackable as problem:
            if self.must_pack:
                raise RewriteError(f"this batch cannot be packed: {problem}") from problem
            self.report.fallbacks += 1
            self.report.last_fallback = str(problem)
            return self.original(*args)
        packed = packing.pack(ids)
        parts = [self._rows(packed[tokens], group, args) for tokens, group in groups]
        whole = parts[0] if len(parts) == 1 else [torch.cat(values) for values in zip(*parts)]
        values = [place.place(packing.unpack(rows)) for place, rows in zip(self.places, whole)]
        return self.rest(*args, *values)

    def _rows(self, ids: Tensor, group: Packing, args: Sequence[Any]) -> list[Tensor]:
        """Each value of one packed row, rows first, [N, ...]."""
        count = group.num_tokens
        given = _inputs(*_filled(ids, group, max(2, self.holds.low)))
        inputs = [given[name] for name in self.sequence_inputs]
        for name, tensor in zip(self.sequence_inputs, inputs):
            torch._dynamo.maybe_mark_dynamic(tensor, 1 if name in ROWS else 0)
        weights = (at.of(args) if isinstance(at, Given) else get_tensor(*at) for at in self.weights)
        values = self.compiled(*inputs, *weights)
        return [
            place.rows_first(value)[:count]
            for place, value in zip(self.places, values, strict=True)
        ]


class CompiledLater:
    """A graph that another backend compiles when it is first called.

    Not before: code that is generated while Dynamo is in the middle of a frame is marked never to be compiled.
    """

    def __init__(self, module: fx.GraphModule, backend: str) -> None:
        self._module, self._backend = module, backend

    @cached_property
    def _compiled(self) -> Callable[..., Sequence[Tensor]]:
        self._module.recompile()
        return torch.compile(self._module, backend=self._backend)

    def __call__(self, *args: Tensor) -> Sequence[Tensor]:
        return self._compiled(*args)


def _groups(packing: Packing, most: int | None) -> Iterator[tuple[slice, Packing]]:
    """Whole sequences, in rows of at most `most` tokens: the slice of the packed row, and its own packing."""
    if most is None or packing.num_tokens <= most:
        yield slice(None), packing
        return
    bounds = packing.cu_seqlens.tolist()
    first = 0
    for last in range(1, len(bounds)):
        if last + 1 < len(bounds) and bounds[last + 1] - bounds[first] <= most:
            continue
        if bounds[last] - bounds[first] > most:
            length = bounds[last] - bounds[first]
            raise NotPackable(f"a sequence has {length} tokens, and the graph holds for {most}")
        tokens = slice(bounds[first], bounds[last])
        boundaries = packing.cu_seqlens[first : last + 1] - bounds[first]
        yield tokens, Packing((1, 0), None, packing.positions[tokens], boundaries)
        first = last


def _filled(ids: Tensor, packing: Packing, least: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids, positions and boundaries of a row of at least `least` tokens: a sequence of its own fills it up."""
    missing = least - packing.num_tokens
    if missing <= 0:
        return ids, packing.positions, packing.cu_seqlens
    end = packing.cu_seqlens.new_tensor([packing.num_tokens + missing])
    return (
        torch.cat([ids, ids.new_zeros(missing)]),
        torch.cat([packing.positions, torch.arange(missing, device=ids.device)]),
        torch.cat([packing.cu_seqlens, end]),
    )


def _inputs(ids: Tensor, positions: Tensor, boundaries: Tensor) -> dict[str, Tensor]:
    """Every input of a grafted graph that is no weight, by name (see stateless.SEQUENCE_INPUTS)."""
    return {
        "input_ids": ids[None],
        "position_ids": positions[None],
        "cu_seqlens": boundaries,
        "extents": positions.index_select(0, boundaries[1:].long() - 1) + 1,
    }
