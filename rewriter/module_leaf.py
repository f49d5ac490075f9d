"""Module leaves: a module that cannot be traced with T symbolic becomes one opaque operator.

`regraft::module_leaf(tensors, sizes, key) -> Tensor[]` runs the module's unmodified forward, eagerly. What it returns
(how many tensors, of which shapes in T) is found by running the real module at a few lengths before the trace.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from .leaves import LeafUnsupported
from .untouched import untouched

_CONSTANTS = (type(None), bool, int, float, str, bytes, enum.Enum, torch.dtype, torch.device, slice)


class _Slot(enum.Enum):
    """Where a flattened argument or result comes from, if it is no constant."""

    TENSOR = enum.auto()
    SIZE = enum.auto()


@dataclass(frozen=True)
class Affine:
    """A size that grows with the number of tokens: `slope * T + start`."""

    slope: int
    start: int

    def at(self, tokens: Any) -> Any:
        return tokens if (self.slope, self.start) == (1, 0) else self.slope * tokens + self.start


TokensAt = tuple[_Slot, int, int, Affine]
"""Where a call's arguments tell T: kind of slot, index among those of its kind, dimension, size there in T."""


@dataclass(frozen=True)
class Example:
    """What one real call at one length returned, flattened, tensors as ShapeOf; `problem` rules the module out."""

    results: tuple[Any, ...]
    result_spec: pytree.TreeSpec
    problem: str = ""


@dataclass(frozen=True)
class ShapeOf:
    """What is kept of a tensor of an example."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(eq=False)
class ModuleCall:
    """One call of an opaque module in a captured graph (`node.meta["leaf"]` of its operator's node).

    `run` makes the call on real tensors; `results` describes what comes back. `writes` are the module's own tensors
    that a forward pass of the model writes into: they are passed in, after the arguments, as what they are by then.
    """

    key: str
    path: str
    module: nn.Module
    forward: Callable[..., Any]
    settings: Callable[[nn.Module], contextlib.AbstractContextManager[None]]
    arguments: tuple[Any, ...]
    argument_spec: pytree.TreeSpec
    results: tuple[Any, ...]
    result_spec: pytree.TreeSpec
    tokens_at: TokensAt | None
    writes: tuple[tuple[nn.Module, str], ...] = ()

    def run(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        """The module's own forward on these tensors; its attributes and buffers are as before afterwards."""
        args, kwargs = pytree.tree_unflatten(self._fill(tensors, sizes), self.argument_spec)
        with untouched(self.module), self.settings(self.module), torch.no_grad():
            for (owner, name), value in zip(self.writes, tensors[len(tensors) - len(self.writes) :], strict=True):
                set_tensor(owner, name, value.clone())
            output = self.forward(*args, **kwargs)
        leaves, spec = pytree.tree_flatten(output)
        found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        expected = self.shapes(tensors, sizes)
        if spec != self.result_spec or [t.shape for t in found] != [shape.shape for shape in expected]:
            raise RuntimeError(
                f"{self.path} returned {[tuple(t.shape) for t in found]}, expected {[s.shape for s in expected]}"
            )
        return _unaliased(found, tensors)

    def shapes(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[ShapeOf]:
        """Shape, dtype and device of each tensor that comes back for these arguments."""
        tokens = self._tokens(tensors, sizes)
        return [
            ShapeOf(
                tuple(size.at(tokens) if isinstance(size, Affine) else size for size in result.shape),
                result.dtype,
                result.device,
            )
            for result in self.results
            if isinstance(result, ShapeOf)
        ]

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The module's result, with these tensors in it."""
        feed = iter(tensors)
        leaves = [next(feed) if isinstance(result, ShapeOf) else result for result in self.results]
        return pytree.tree_unflatten(leaves, self.result_spec)

    def _fill(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[Any]:
        feeds = {_Slot.TENSOR: iter(tensors), _Slot.SIZE: iter(sizes)}
        return [next(feeds[a]) if isinstance(a, _Slot) else a for a in self.arguments]

    def _tokens(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> Any:
        if self.tokens_at is None:
            return None
        slot, index, dim, affine = self.tokens_at
        size = tensors[index].shape[dim] if slot is _Slot.TENSOR else sizes[index]
        return size if (affine.slope, affine.start) == (1, 0) else (size - affine.start) // affine.slope


_CALLS: weakref.WeakValueDictionary[str, ModuleCall] = weakref.WeakValueDictionary()
"""Calls by key. Alive as long as a graph has the node (`meta["leaf"]`)."""


@torch.library.custom_op(
    "regraft::module_leaf", mutates_args=(), schema="(Tensor[] tensors, SymInt[] sizes, str key) -> Tensor[]"
)
def module_leaf(tensors: Sequence[torch.Tensor], sizes: Sequence[int], key: str) -> list[torch.Tensor]:
    """Run the module that `key` stands for."""
    return _CALLS[key].run(tensors, sizes)


@module_leaf.register_fake
def _(tensors: Sequence[torch.Tensor], sizes: Sequence[int], key: str) -> list[torch.Tensor]:
    return [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in _CALLS[key].shapes(tensors, sizes)]


def is_module_leaf(node: fx.Node) -> bool:
    """Whether a node runs an opaque module (`node.meta["leaf"]` is its ModuleCall)."""
    return node.op == "call_function" and node.target is torch.ops.regraft.module_leaf.default


def attach_calls(graph: fx.Graph) -> None:
    """Hang each module leaf's call on its node, which keeps it alive."""
    for node in graph.nodes:
        if is_module_leaf(node):
            node.meta["leaf"] = _CALLS[node.args[2]]


def example_of(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Example]:
    """Make a real call: its result, and what to remember of it."""
    flat, _ = pytree.tree_flatten((args, kwargs))
    given = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
    versions = [tensor._version for tensor in given]
    output = forward(*args, **kwargs)
    problem = ""
    if versions != [tensor._version for tensor in given]:
        problem = "it writes into its arguments"
    results, spec = pytree.tree_flatten(output)
    example = Example(tuple(map(_kept, results)), spec, problem)
    return output, example


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ShapeOf(tuple(value.shape), value.dtype, value.device)
    return value


def owned_tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Every tensor that a module and its children hold: (holder, name, tensor)."""
    for owner in module.modules():
        for held in (owner._parameters, owner._buffers, vars(owner)):
            for name, value in held.items():
                if isinstance(value, torch.Tensor):
                    yield owner, name, value


def get_tensor(owner: nn.Module, name: str) -> torch.Tensor:
    """A tensor that a module holds."""
    value = getattr(owner, name)
    assert isinstance(value, torch.Tensor)
    return value


def set_tensor(owner: nn.Module, name: str, value: torch.Tensor) -> None:
    """Put another tensor in the place of an owned one, without registering anything."""
    for held in (owner._parameters, owner._buffers, vars(owner)):
        if name in held:
            held[name] = value
            return


def shapes_in_tokens(lengths: Sequence[int], seen: Sequence[tuple[Any, ...]], path: str) -> tuple[Any, ...]:
    """One description of what was seen at several lengths: sizes as int or Affine. LeafUnsupported if there is none."""
    if len({len(values) for values in seen}) != 1:
        raise LeafUnsupported(f"{path} takes or returns another number of values at another length")
    return tuple(_fit(lengths, values, path) for values in zip(*seen, strict=True))


def _fit(lengths: Sequence[int], values: Sequence[Any], path: str) -> Any:
    first = values[0]
    if all(isinstance(value, ShapeOf) for value in values):
        ranks = {len(value.shape) for value in values}
        if len(ranks) == 1 and len({(value.dtype, value.device) for value in values}) == 1:
            sizes = zip(*(value.shape for value in values), strict=True)
            return ShapeOf(tuple(_line(lengths, s, path) for s in sizes), first.dtype, first.device)
    elif isinstance(first, int) and not isinstance(first, bool) and all(isinstance(v, int) for v in values):
        return _line(lengths, values, path)
    elif all(isinstance(v, _CONSTANTS) and v == first for v in values):
        return first
    raise LeafUnsupported(f"{path} takes or returns values that change with the length: {values}")


def _line(lengths: Sequence[int], sizes: Sequence[int], path: str) -> Any:
    if len(set(sizes)) == 1:
        return sizes[0]
    slope, rest = divmod(sizes[1] - sizes[0], lengths[1] - lengths[0])
    start = sizes[0] - slope * lengths[0]
    if rest or slope <= 0 or any(size != slope * n + start for n, size in zip(lengths, sizes, strict=True)):
        raise LeafUnsupported(f"{path} has a size of {sizes} at lengths {lengths}")
    return Affine(slope, start)


def find_tokens(
    tensors: Sequence[torch.Tensor], sizes: Sequence[torch.SymInt], symbol: sympy.Expr | None
) -> TokensAt | None:
    """Where among the arguments of a traced call the number of tokens can be read."""
    places = [
        (_Slot.TENSOR, index, dim, size)
        for index, tensor in enumerate(tensors)
        for dim, size in enumerate(tensor.shape)
        if isinstance(size, torch.SymInt)
    ]
    places += [(_Slot.SIZE, index, 0, size) for index, size in enumerate(sizes)]
    found: list[TokensAt] = []
    for slot, index, dim, size in places:
        expr = sympy.expand(size.node.expr)
        slope, start = expr.coeff(symbol), expr.coeff(symbol, 0)
        if slope.is_Integer and start.is_Integer and slope > 0 and sympy.expand(slope * symbol + start - expr) == 0:
            found.append((slot, index, dim, Affine(int(slope), int(start))))
    found.sort(key=lambda place: (place[3].slope != 1, place[3].start != 0))
    return found[0] if found else None


def emit(call: ModuleCall, tensors: list[torch.Tensor], sizes: list[Any]) -> Any:
    """Put the operator into the trace in place of the call."""
    _CALLS[call.key] = call
    return call.rebuild(torch.ops.regraft.module_leaf(tensors, sizes, call.key))


def split_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], path: str
) -> tuple[list[torch.Tensor], list[Any], tuple[Any, ...], pytree.TreeSpec]:
    """Flattened arguments of a traced call: tensors, symbolic sizes, the rest with slots for both, and the structure."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    tensors: list[torch.Tensor] = []
    sizes: list[Any] = []
    kept: list[Any] = []
    for value in flat:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            kept.append(_Slot.TENSOR)
        elif isinstance(value, torch.SymInt):
            sizes.append(value)
            kept.append(_Slot.SIZE)
        elif isinstance(value, _CONSTANTS):
            kept.append(value)
        else:
            raise LeafUnsupported(f"{path} is called with a {type(value).__name__}")
    return tensors, sizes, tuple(kept), spec


def _unaliased(results: list[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results that share no storage with the arguments or with each other, as an operator's must not."""
    used = {tensor.untyped_storage()._cdata for tensor in given}
    fresh: list[torch.Tensor] = []
    for tensor in results:
        if tensor.untyped_storage()._cdata in used:
            tensor = tensor.clone()
        used.add(tensor.untyped_storage()._cdata)
        fresh.append(tensor)
    return fresh
