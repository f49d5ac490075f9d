"""Calls that a module makes of torch's functions, recorded, and those that make one value of it as a program.

Whatever comes before the first call whose outcome counts values is computed for every token alike; what comes after it
is code of one text. A program of it may be run over texts of any number of blocks: its sizes that count blocks are
known as such.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from regraft.rewriter.leaf_shapes import Affine
from regraft.rewriter.leaves import LeafUnsupported

from .block_leaf import TOPK, Leaf
from .expert_program import named_tensors, tensors_in

COUNTING = (
    torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.masked_select, Tensor.masked_select,
    Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__index__,
)  # fmt: skip
"""Calls of which the result's size, or a number, depends on values."""


@dataclass(frozen=True)
class Value:
    """Number `output` of the tensors that call number `call` gave; of call -1, of the module's arguments."""

    call: int
    output: int


@dataclass(frozen=True)
class Held:
    """A tensor of the module's, by name."""

    name: str


@dataclass(frozen=True)
class Places:
    """Every `step`-th token of a text of whole blocks, from number `start` on, in this shape."""

    start: int
    step: int
    shape: tuple[Any, ...]


@dataclass(frozen=True)
class Step:
    """A call. Its arguments flattened: values, tensors of the module's, places, sizes that count blocks, constants."""

    number: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    spec: pytree.TreeSpec


@dataclass(frozen=True)
class Program:
    """Steps from values that are given to one that comes out."""

    steps: tuple[Step, ...]
    result: Value

    def run(self, module: nn.Module, known: Mapping[Value, Tensor], blocks: Any) -> Tensor:
        """The result for these values, of `blocks` blocks (int or SymInt)."""
        values = dict(known)

        def argument(named: Any) -> Any:
            if isinstance(named, Value):
                return values[named]
            if isinstance(named, Held):
                return operator.attrgetter(named.name)(module)
            return named.at(blocks) if isinstance(named, Affine) else named

        for step in self.steps:
            flat = [argument(named) for named in step.arguments]
            args, kwargs = pytree.tree_unflatten(flat, step.spec)
            outputs = _call(step.function, args, kwargs, blocks)
            values |= {Value(step.number, i): tensor for i, tensor in enumerate(outputs)}
        return values[self.result]


def _call(function: Callable[..., Any], args: Any, kwargs: Any, blocks: Any) -> list[Tensor]:
    """The call; rows are taken at places by cutting the text into its blocks, not by an index."""
    if function in (Tensor.index_select, torch.index_select) and isinstance(args[2], Places):
        return [_take(args[0], args[1], args[2], blocks)]
    if function is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        at = [i for i, entry in enumerate(index) if isinstance(entry, Places)]
        if len(at) == 1:
            places = index[at[0]]
            before = sum(entry is not None for entry in index[: at[0]])
            taken = _take(args[0], before, places, blocks)
            kept = [slice(None)] * len(places.shape)
            return [taken[(*index[: at[0]], *kept, *index[at[0] + 1 :])]]
    if any(isinstance(leaf, Places) for leaf in pytree.tree_leaves((args, kwargs))):
        raise LeafUnsupported("what makes the keys computes with the places of tokens")
    return tensors_in(function(*args, **kwargs))


def _take(source: Tensor, dim: int, places: Places, blocks: Any) -> Tensor:
    dim %= source.dim()
    if places.step > 1:
        source = source.unflatten(dim, (-1, places.step)).select(dim + 1, places.start)
    elif places.start:
        raise LeafUnsupported("the keys are of rows that do not begin with a block")
    shape = [size.at(blocks) if isinstance(size, Affine) else size for size in places.shape]
    return source.unflatten(dim, shape) if len(shape) > 1 else source


@dataclass(frozen=True)
class Call:
    """A recorded call and the tensors that it gave."""

    function: Callable[..., Any]
    given: tuple[tuple[Any, ...], dict[str, Any]]
    outputs: list[Tensor]
    known: Mapping[int, Any]

    @cached_property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments, flattened; a tensor is named, or stays if nobody knows it."""
        return tuple(
            self.known.get(id(a), a) if isinstance(a, Tensor) else a
            for a in pytree.tree_leaves(self.given)
        )

    @cached_property
    def spec(self) -> pytree.TreeSpec:
        """How they were flattened."""
        return pytree.tree_structure(self.given)

    @cached_property
    def values(self) -> list[Value]:
        """The values among the arguments."""
        return [argument for argument in self.arguments if isinstance(argument, Value)]


class Record(TorchFunctionMode):
    """Every call of a run that gives a tensor."""

    def __init__(self, leaf: Leaf, given: list[Tensor]) -> None:
        super().__init__()
        self.given = given
        self.calls: list[Call] = []
        self.known: dict[int, Any] = {id(t): Held(n) for n, t in named_tensors(leaf.call.module)}
        self.known |= {id(tensor): Value(-1, i) for i, tensor in enumerate(given)}
        self.written: set[Any] = set()
        """Values that a call has changed."""
        self.rowwise = -1
        """Calls up to this number came before the first one that counts values."""
        leaf.run(given, self)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.rowwise < 0 and _counts(function, args):
            self.rowwise = len(self.calls) - 1
        result = function(*args, **kwargs)
        outputs = [result] if isinstance(result, Tensor) else tensors_in(result)
        if outputs:
            for i, tensor in enumerate(outputs):
                # a cast to the dtype that a tensor has gives that tensor, which keeps its name
                self.known.setdefault(id(tensor), Value(len(self.calls), i))
            if _writes(function):
                self.written.add(self.known[id(outputs[0])])
            self.calls.append(Call(function, (args, kwargs), outputs, self.known))
        return result

    def __getitem__(self, value: Value) -> Tensor:
        if value.call < 0:
            return self.given[value.output]
        return self.calls[value.call].outputs[value.output]

    @property
    def scores(self) -> Value:
        """What the last top-k chose from."""
        last = next(call for call in reversed(self.calls) if call.function in TOPK)
        assert isinstance(last.arguments[0], Value)
        return last.arguments[0]


def _writes(function: Callable[..., Any]) -> bool:
    """Whether a function changes its argument."""
    name = getattr(function, "__name__", "")
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _counts(function: Any, args: tuple[Any, ...]) -> bool:
    if function is torch.where:
        return len(args) == 1
    if function is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(i, Tensor) and i.dtype == torch.bool for i in index)
    return function in COUNTING


def sliced(
    record: Record, result: Value, is_given: Callable[[Value], bool] = lambda value: False
) -> list[int]:
    """Numbers of the calls that make a value of what is given and of what is computed of every token, in order."""
    pending, numbers = [result], set[int]()
    while pending:
        value = pending.pop()
        if value.call > record.rowwise and value.call not in numbers and not is_given(value):
            numbers.add(value.call)
            pending += record.calls[value.call].values
    return sorted(numbers)
