"""Module leaves: a module that cannot be traced with T symbolic becomes one opaque operator.

`regraft::module_leaf(tensors, sizes, key) -> Tensor[]` runs the module's unmodified forward, eagerly. The analysis may
assume nothing of it: whether it is causal, or even row-local, is for the prefix test on the real weights to say.
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

from .leaf_shapes import CONSTANTS, Affine, ShapeOf
from .leaves import LeafUnsupported
from .untouched import storage_key, untouched


class Slot(enum.Enum):
    """Where a flattened argument comes from, if it is no constant."""

    TENSOR = enum.auto()
    SIZE = enum.auto()


@dataclass(frozen=True)
class TokensAt:
    """Where the arguments of a call tell T: which argument (kind, index in that kind), its dimension, the size."""

    slot: Slot
    index: int
    dim: int
    size: Affine


@dataclass(frozen=True)
class Arguments:
    """The arguments of a traced call, taken apart; `template` is all of them flattened, with slots in place."""

    tensors: list[torch.Tensor]
    sizes: list[torch.SymInt]
    template: tuple[Any, ...]
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], path: str) -> Arguments:
        """Raises LeafUnsupported for an argument that is neither tensor nor size nor plain constant."""
        tensors: list[torch.Tensor] = []
        sizes: list[torch.SymInt] = []
        template: list[Any] = []
        flat, spec = pytree.tree_flatten((args, kwargs))
        for value in flat:
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                template.append(Slot.TENSOR)
            elif isinstance(value, torch.SymInt):
                sizes.append(value)
                template.append(Slot.SIZE)
            elif isinstance(value, CONSTANTS):
                template.append(value)
            else:
                raise LeafUnsupported(f"{path} is called with a {type(value).__name__}")
        return cls(tensors, sizes, tuple(template), spec)

    def tokens_at(self, symbol: sympy.Expr | None) -> TokensAt | None:
        """Where to read T, by preference where it stands by itself."""
        found: list[TokensAt] = []
        for slot, index, dim, size in self._places():
            expr = sympy.expand(size.node.expr)
            slope, start = expr.coeff(symbol), expr.coeff(symbol, 0)
            rest = sympy.expand(slope * symbol + start - expr)
            if slope.is_Integer and start.is_Integer and slope > 0 and rest == 0:
                found.append(TokensAt(slot, index, dim, Affine(int(slope), int(start))))
        found.sort(key=lambda place: (place.size.slope != 1, place.size.start != 0))
        return found[0] if found else None

    def _places(self) -> Iterator[tuple[Slot, int, int, Any]]:
        for index, tensor in enumerate(self.tensors):
            symbolic: list[tuple[int, Any]] = list(enumerate(tensor.shape))
            yield from (
                (Slot.TENSOR, index, d, s) for d, s in symbolic if isinstance(s, torch.SymInt)
            )
        yield from ((Slot.SIZE, index, 0, size) for index, size in enumerate(self.sizes))


@dataclass(eq=False)
class ModuleCall:
    """One call of an opaque module in a captured graph: `node.meta["leaf"]` of its operator's node.

    `arguments` and `results` are templates: a slot, or a ShapeOf, for what is passed, and constants. `writes` are the
    module's own tensors that a forward pass of the model writes into: they are passed in, after the arguments, as
    what they are by then. `settings` selects the implementations that the model was traced with. `initialise` is how
    the model fills a module that no file has weights for (see initialised.py), if it can. `why` says why no trace
    at all goes through the module, if none does.
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
    initialise: Callable[[nn.Module], None] | None = None
    why: str = ""

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        sizes: Sequence[int],
        weights: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """The module's own forward on these tensors; its attributes and buffers are as before afterwards.

        With `weights`, those in place of its `parameters`, and autograd may record what is done with them.
        """
        feeds: dict[Slot, Iterator[Any]] = {Slot.TENSOR: iter(tensors), Slot.SIZE: iter(sizes)}
        flat = [next(feeds[a]) if isinstance(a, Slot) else a for a in self.arguments]
        args, kwargs = pytree.tree_unflatten(flat, self.argument_spec)
        records = weights is not None and torch.is_grad_enabled()
        with untouched(self.module), self.settings(self.module), torch.set_grad_enabled(records):
            for (_, places), weight in zip(self.parameters, weights or ()):
                for owner, name in places:
                    set_tensor(owner, name, weight)
            for (owner, name), value in zip(self.writes, feeds[Slot.TENSOR], strict=True):
                set_tensor(owner, name, value.clone())
            output = self.forward(*args, **kwargs)
        found, spec = pytree.tree_flatten(output)
        returned = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
        expected = [shape.shape for shape in self.shapes(tensors, sizes)]
        if spec != self.result_spec or [tuple(t.shape) for t in returned] != expected:
            shapes = [tuple(t.shape) for t in returned]
            raise RuntimeError(f"{self.path} returned shapes {shapes}, expected {expected}")
        return _unaliased(returned, tensors)

    @property
    def parameters(self) -> list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
        """Each parameter of the module, and all places where the module holds it.

        Not those of a module that keeps them in something else than a dict, which may copy what is put in their place.
        """
        found: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
        for owner, name, tensor in owned_tensors(self.module):
            if isinstance(tensor, nn.Parameter) and isinstance(owner._parameters, dict):
                found.setdefault(id(tensor), (tensor, []))[1].append((owner, name))
        return list(found.values())

    def shapes(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[ShapeOf]:
        """Shape, dtype and device of each tensor that comes back for these arguments."""
        tokens = None
        if (at := self.tokens_at) is not None:
            size = tensors[at.index].shape[at.dim] if at.slot is Slot.TENSOR else sizes[at.index]
            tokens = at.size.solve(size)
        return [result.at(tokens) for result in self.results if isinstance(result, ShapeOf)]

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The module's result, with these tensors in it."""
        feed = iter(tensors)
        flat = [next(feed) if isinstance(result, ShapeOf) else result for result in self.results]
        return pytree.tree_unflatten(flat, self.result_spec)


_CALLS: weakref.WeakValueDictionary[str, ModuleCall] = weakref.WeakValueDictionary()
"""Calls by key. Alive as long as a graph has the node (`meta["leaf"]`)."""


@torch.library.custom_op(
    "regraft::module_leaf",
    mutates_args=(),
    schema="(Tensor[] tensors, SymInt[] sizes, str key) -> Tensor[]",
)
def module_leaf(
    tensors: Sequence[torch.Tensor], sizes: Sequence[int], key: str
) -> list[torch.Tensor]:
    """Run the module that `key` stands for."""
    return _CALLS[key].run(tensors, sizes)


@module_leaf.register_fake
def _(tensors: Sequence[torch.Tensor], sizes: Sequence[int], key: str) -> list[torch.Tensor]:
    shapes = _CALLS[key].shapes(tensors, sizes)
    return [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in shapes]


def run_with_weights(
    tensors: Sequence[torch.Tensor], sizes: Sequence[int], key: str, weights: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Run the module that `key` stands for with these tensors in place of its parameters; autograd sees it."""
    return _CALLS[key].run(tensors, sizes, weights)


def is_module_leaf(node: fx.Node) -> bool:
    """Whether a node runs an opaque module (`node.meta["leaf"]` is its ModuleCall)."""
    return node.op == "call_function" and node.target is torch.ops.regraft.module_leaf.default


def attach_calls(graph: fx.Graph) -> None:
    """Hang each module leaf's call on its node, which keeps it alive."""
    for node in graph.nodes:
        if is_module_leaf(node):
            node.meta["leaf"] = _CALLS[node.args[2]]


def emit(
    call: ModuleCall,
    tensors: list[torch.Tensor],
    sizes: list[torch.SymInt],
    written: Sequence[torch.Tensor] | None = None,
) -> Any:
    """Put the operator into the trace in place of the call. `written`: what its `writes` are by now."""
    _CALLS[call.key] = call
    if written is None:
        written = [get_tensor(owner, name) for owner, name in call.writes]
    return call.rebuild(torch.ops.regraft.module_leaf([*tensors, *written], sizes, call.key))


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
    """Put another tensor in the place of one that a module holds, without registering anything."""
    places: list[dict[str, Any]] = [owner._parameters, owner._buffers, owner.__dict__]
    next(held for held in places if name in held)[name] = value


def _unaliased(results: list[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results that share no storage with the arguments or with each other, as an operator's must not."""
    used = {storage_key(tensor) for tensor in given}
    fresh: list[torch.Tensor] = []
    for tensor in results:
        shared = storage_key(tensor) in used
        fresh.append(tensor.clone() if shared else tensor)
        used.add(storage_key(fresh[-1]))
    return fresh
