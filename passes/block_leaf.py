"""A module that is called with rows and masks and returns which keys each query is to see: runs of its own forward.

What it chooses is looked at in its top-k calls: over a causal text of T tokens, each query at position q chooses among
floor((q + 1) / size) blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from regraft.rewriter.errors import first_line
from regraft.rewriter.leaves import LeafUnsupported
from regraft.rewriter.module_leaf import ModuleCall, Slot
from regraft.rewriter.untouched import untouched

from .expert_program import tensors_in
from .module_calls import device_of

TOPK = (torch.topk, Tensor.topk)

WHOLE_TEXTS = (64, 512)
"""Tokens of the texts over which it is looked how long a block is: the first with a second block is enough."""

LONG_TEXTS = (576, 2304, 9216)
"""Tokens of the texts over which it is looked how many blocks are chosen. The last query alone sees keys."""


@dataclass(frozen=True)
class Leaf:
    """A call of a module with rows [1, T, C] and masks [1, 1, T, T]; its result number `result` says which keys count.

    `masks` gives, by number of the argument, what a mask holds where a query sees a key and where it does not.
    """

    call: ModuleCall
    shapes: tuple[tuple[Any, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    masks: Mapping[int, tuple[float, float]]
    result: int

    @property
    def device(self) -> torch.device:
        """Where the module's tensors are."""
        return device_of(self.call)

    def rows(self, length: int, seed: int) -> dict[int, Tensor]:
        """Random rows by number of the argument."""
        random = torch.Generator().manual_seed(seed)
        return {
            i: torch.randn(1, length, shape[2], generator=random).to(self.device, self.dtypes[i])
            for i, shape in enumerate(self.shapes)
            if i not in self.masks
        }

    def given(self, rows: Mapping[int, Tensor], seen: Tensor | None = None) -> list[Tensor]:
        """All arguments; the masks say [T, T] `seen`, by default that a query sees itself and what is earlier."""
        length = next(iter(rows.values())).shape[1]
        if seen is None:
            seen = torch.ones(length, length, dtype=torch.bool).tril()
        found = dict(rows)
        for i, values in self.masks.items():
            there, elsewhere = (torch.tensor(value, dtype=self.dtypes[i]) for value in values)
            found[i] = torch.where(seen, there, elsewhere)[None, None].to(self.device)
        return [found[i] for i in sorted(found)]

    def run(
        self, given: Sequence[Tensor], mode: AbstractContextManager[Any] | None = None
    ) -> Tensor:
        """The module's own forward, watched by `mode`. Raises LeafUnsupported if it does not run over these."""
        feed = iter(given)
        flat = [next(feed) if a is Slot.TENSOR else a for a in self.call.arguments]
        args, kwargs = pytree.tree_unflatten(flat, self.call.argument_spec)
        module = self.call.module
        try:
            with untouched(module), self.call.settings(module), torch.no_grad():
                with mode or nullcontext():
                    output = self.call.forward(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError) as error:  # what numbers at random can cause
            raise LeafUnsupported(
                f"{self.call.path} does not run over random rows: {first_line(error)}"
            ) from error
        return tensors_in(output)[self.result]


class _Choices(TorchFunctionMode):
    """Notes among how many each top-k chooses, and how many."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int]] = []

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in TOPK:
            self.found.append((args[0].numel(), result[1].numel()))
        return result


def sizes(leaf: Leaf) -> tuple[int, int]:
    """(tokens a block, blocks that a query may choose). Raises LeafUnsupported if its top-ks are of no blocks."""
    path, size = leaf.call.path, None
    for length in WHOLE_TEXTS:
        choices = _choices(leaf, length)
        size = _size([among for among, _ in choices], length)
        if size is not None:
            break
    if size is None:
        raise LeafUnsupported(f"{path}: its top-ks are not of each query's whole blocks")
    among, chosen = choices[-1]
    for length in LONG_TEXTS:
        if chosen < among:
            return size, chosen
        seen = torch.zeros(length, length, dtype=torch.bool)
        seen[-1] = True
        ((among, chosen),) = _choices(leaf, length, seen)[-1:]
    raise LeafUnsupported(f"{path} chooses all of {among} blocks: how many it may is not known")


def _choices(leaf: Leaf, length: int, seen: Tensor | None = None) -> list[tuple[int, int]]:
    choices = _Choices()
    leaf.run(leaf.given(leaf.rows(length, seed=0), seen), choices)
    if not choices.found:
        raise LeafUnsupported(f"{leaf.call.path} chooses with no top-k over {length} tokens")
    return choices.found


def _size(among: Sequence[int], length: int) -> int | None:
    """Tokens a block, if queries one after the other choose among floor((q + 1) / size) blocks each."""
    size = sum(n == among[0] for n in among)
    expected = [(q + 1) // size for q in range(length)]
    return size if list(among) == [n for n in expected if n] and among[-1] > 1 else None
