"""A replayed region with other numbers in place of its weights, and of its rows: what today's numbers may hide.

A gate that is zero (ReZero, a new adapter) or all but zero hides whatever is behind it, until it is trained. So the
region is run with drawn numbers too: as a function, the model keeps its own.

A region need not work with every number. Where it takes a logarithm or a root, drawn numbers make NaN or infinity,
of which nothing follows; then less is drawn, in the order of `DRAWS`, until the region is finite where it was with the
model's own numbers. Buffers are never drawn: a causal mask or a table of angles is often one. Nor is a parameter of a
class of its own, as a quantised one: what a plain tensor does in its place is not what the model does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from .module_leaf import ModuleCall, is_module_leaf, run_with_weights
from .replay import Replay

SMALL = 0.1
"""Numbers below this part of a usual size are made larger: a tolerance might hide what they do."""

DRAWN = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Draw = Callable[[Tensor, float, torch.Generator], Tensor]
"""(numbers, a usual size of them, random numbers) -> numbers of their shape, dtype and device."""


def afresh(own: Tensor, usual: float, random: torch.Generator) -> Tensor:
    """Nothing is left of the model's own: a gate that is all but closed, be it by a large number, is open."""
    return _noise(own, random) * usual


def nearby(own: Tensor, usual: float, random: torch.Generator) -> Tensor:
    """Each within a half of what it is, so that what must be positive stays so; zeros are noise, small ones larger."""
    size, noise = _size(own), _noise(own, random)
    if size == 0:
        return noise * usual
    scale = usual / size if size < SMALL * usual else 1.0
    return torch.where(own == 0, noise * size, own * noise.abs()) * scale


def as_is(own: Tensor, usual: float, random: torch.Generator) -> Tensor:
    """The model's own."""
    return own


DRAWS: tuple[tuple[Draw, Draw], ...] = ((afresh, nearby), (nearby, nearby), (nearby, as_is))
"""How weights and how rows are drawn. Of rows, which are results, less may be asked than of weights."""


@dataclass
class Drawn:
    """Numbers drawn for one run; a weight that is read in two places is one weight."""

    weights: Draw
    rows: Draw
    _random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    _known: dict[int, Tensor] = field(default_factory=dict)

    def region(self, replay: Replay) -> Replay:
        """The region with drawn weights."""
        leaves = [node.meta["leaf"] for node in replay.subgraph.graph.nodes if is_module_leaf(node)]
        subgraph = replay.subgraph
        if leaves:
            weights = {call.key: self._of_leaf(call) for call in leaves}
            subgraph = cast(fx.GraphModule, _WithWeights(subgraph, weights))
        twin = Replay(subgraph, replay.layouts, replay.result, replay.path, replay.min_tokens)
        twin.weights = tuple(self._of_weight(weight) for weight in replay.weights)
        return twin

    def rows_of(self, rows: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Other rows. Whole numbers, as token ids and choices, stay."""
        return [
            row if row is None or row.dtype not in DRAWN else self.rows(row, 1.0, self._random)
            for row in rows
        ]

    def _of_leaf(self, call: ModuleCall) -> list[Tensor]:
        return [self._of_weight(weight) for weight, _ in call.parameters]

    def _of_weight(self, weight: Tensor) -> Tensor:
        if type(weight) is not nn.Parameter or weight.dtype not in DRAWN or not weight.numel():
            return weight
        if id(weight) not in self._known:
            fan_in = math.prod(weight.shape[1:]) if weight.dim() > 1 else 1
            drawn = self.weights(weight.detach(), fan_in**-0.5, self._random)
            self._known[id(weight)] = drawn
        return self._known[id(weight)]


class _WithWeights(nn.Module):
    """A region's graph, whose opaque modules are run with these tensors in place of their parameters."""

    def __init__(self, subgraph: fx.GraphModule, weights: dict[str, list[Tensor]]) -> None:
        super().__init__()
        self._interpreter = _Interpreter(subgraph, weights)

    def forward(self, *args: Any) -> Any:
        return self._interpreter.run(*args)


class _Interpreter(fx.Interpreter):
    def __init__(self, subgraph: fx.GraphModule, weights: dict[str, list[Tensor]]) -> None:
        super().__init__(subgraph)
        self._weights = weights

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.regraft.module_leaf.default:
            tensors, sizes, key = args
            return run_with_weights(tensors, sizes, key, self._weights[key])
        return super().call_function(target, args, kwargs)


def _size(numbers: Tensor) -> float:
    """Root of the mean square of what is finite."""
    finite = numbers.double().nan_to_num(0.0, 0.0, 0.0)
    return float(finite.square().mean().sqrt())


def _noise(like: Tensor, random: torch.Generator) -> Tensor:
    """Numbers of either sign from 1/2 to 3/2: none is near zero, so that none closes a gate."""
    sizes = torch.rand(like.shape, generator=random) + 0.5
    signs = torch.randint(2, like.shape, generator=random) * 2 - 1
    return (sizes * signs).to(like.device, like.dtype)
