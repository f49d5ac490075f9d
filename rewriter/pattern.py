"""What a pass is made of: a region to look at, a reason to decline, and a builder to rewrite with.

A pass is one file in passes/ with three visible parts in this order:

    pattern(region)         -> captures | Declined    follow the dataflow, name what was found
    check(captures)         -> plan | Declined        the conditions under which the rewrite is an equivalence
    rewrite(plan, grafting) -> None                   build the operator call, replace the region's output

and ends with `PASS = Pass("attention", kind="attention", operator=..., pattern=..., check=..., rewrite=...)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .declare import EVERYTHING, PAGED_SEQUENCES, Reach, RowSpec, StateSpec, field_of
from .graph import CapturedGraph, Size, describe


@dataclass(frozen=True)
class Region:
    """A place where tokens mix: the backward slice from `closer` through wide values up to row values.

    A pure function of `inputs` (nodes that hold one row per token; `input_ids` and `position_ids` among them).
    """

    closer: fx.Node
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    kind: str
    path: str
    causes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Declined:
    """A match that was refused: why, and at which node. `progress` (0..1) ranks near misses."""

    reason: str
    node: fx.Node | None = None
    progress: float = 0.0
    fix: str = ""

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"{self.reason} ({describe(self.node)})" if self.node is not None else self.reason


@dataclass(frozen=True)
class Pass:
    """One kind of mixing and how to graft it. Stateless."""

    name: str
    kind: str
    operator: str
    pattern: Callable[[Region], Any]
    check: Callable[[Any], Any]
    rewrite: Callable[[Any, Grafting], None]


@dataclass
class Grafting:
    """The builder handed to `rewrite`: inserts before the region's closer, collects the declared caches.

    The driver makes one per region and reads `row_specs`, `state_specs`, `mask` and `notes` afterwards.
    """

    region: Region
    graph: fx.Graph
    inputs: dict[str, fx.Node]
    new_input: Callable[[str], fx.Node]
    captured: CapturedGraph
    row_specs: list[RowSpec] = field(default_factory=list)
    state_specs: list[StateSpec] = field(default_factory=list)
    mask: str = ""
    notes: list[str] = field(default_factory=list)
    switch_lengths: list[int] = field(default_factory=list)
    replaced: dict[fx.Node, fx.Node] = field(default_factory=dict)
    made: list[fx.Node] = field(default_factory=list)

    def sequence(self, name: str, reach: Reach = EVERYTHING) -> fx.Node:
        """The placeholder of one metadata tensor (see declare.SEQUENCE_FIELDS), as it is for rows of this reach."""
        return self._input(field_of(name, reach))

    def sequences(self, reach: Reach = EVERYTHING) -> tuple[fx.Node, ...]:
        """What every paged operator is told of the sequences of a step, in the order of its arguments."""
        return tuple(self.sequence(name, reach) for name in PAGED_SEQUENCES)

    def row_pool(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        reach: Reach = EVERYTHING,
        every: int = 1,
    ) -> fx.Node:
        """Declare a row per `every` tokens, never read beyond its reach, and get the placeholder of its pool."""
        spec = RowSpec(f"{self.region.path}:{name}", tuple(shape), dtype, reach, every)
        self.row_specs.append(spec)
        return self._input(spec.name)

    def shared_row_pool(self, spec: RowSpec) -> fx.Node:
        """The placeholder of a pool whose rows several regions read. Declared once, by whoever comes first."""
        if spec.name not in self.inputs:
            self.row_specs.append(spec)
        return self._input(spec.name)

    def state_pool(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
        """Declare a state per request and get the placeholder of its pool."""
        spec = StateSpec(f"{self.region.path}:{name}", tuple(shape), dtype)
        self.state_specs.append(spec)
        return self._input(spec.name)

    def weight(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """The node of a weight of the model, by its full name. It stays live: see artifact.LiveWeights."""
        return self.captured.add_weight(name, tensor)

    def constant(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """The node of a tensor that the pass made itself, on the device it belongs to."""
        return self.captured.add_constant(name, tensor)

    def call(
        self,
        target: Callable,
        *args: Any,
        shape: tuple[Size, ...],
        dtype: torch.dtype,
        **kwargs: Any,
    ) -> fx.Node:
        """Insert a call before the closer, with the metadata every node must carry."""
        with self.graph.inserting_before(self.region.closer):
            node = self.graph.call_function(target, args, kwargs)
        closer = self.region.closer.meta
        node.meta.update(
            shape=tuple(shape), dtype=dtype, path=closer["path"], source=closer["source"]
        )
        self.made.append(node)
        return node

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let every user of `old` read `new`."""
        old.replace_all_uses_with(new)
        self.replaced[old] = new

    def _input(self, name: str) -> fx.Node:
        if name not in self.inputs:
            self.inputs[name] = self.new_input(name)
        return self.inputs[name]
