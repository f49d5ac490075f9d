"""What an expert does with its rows, read off a run of the module's own forward.

The module is run with a few tokens whose every choice is one expert. What it does with their rows, their weights and
the expert's own slices of the module's tensors is recorded call by call, and can be run again for rows of different
experts. What it does with the choices alone (counting them, finding the tokens) is not part of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from regraft.kernels.experts import expert_linear
from regraft.rewriter.leaves import LeafUnsupported
from regraft.rewriter.module_leaf import ModuleCall, owned_tensors
from regraft.rewriter.untouched import untouched

COUNT = 11
"""Tokens of the recorded run: a number that no size is by chance."""

PRODUCTS = (functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)
ZEROS = (torch.zeros_like, Tensor.new_zeros)
ADDING = (Tensor.index_add_, Tensor.index_add, torch.index_add)


@dataclass(frozen=True)
class Value:
    """What the program has so far: number 0 the rows [S, C], 1 their weights [S, 1], then what steps gave."""

    number: int


@dataclass(frozen=True)
class Held:
    """A tensor of the module's, by name; `own`: the expert's slice of it."""

    name: str
    own: bool = False


@dataclass(frozen=True)
class Step:
    """A call of a function, its arguments flattened; a Value or Held stands in place of each tensor."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    spec: pytree.TreeSpec

    def run(self, module: nn.Module, values: list[Tensor], experts: Tensor) -> list[Tensor]:
        """The results that are tensors."""
        flat: list[Any] = [
            values[a.number] if isinstance(a, Value)
            else operator.attrgetter(a.name)(module) if isinstance(a, Held) else a
            for a in self.arguments
        ]  # fmt: skip
        args, kwargs = pytree.tree_unflatten(flat, self.spec)
        if any(isinstance(a, Held) and a.own for a in self.arguments):
            return [self._product(*args, **kwargs, experts=experts)]
        return tensors_in(self.function(*args, **kwargs))

    def _product(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None = None, *, experts: Tensor
    ) -> Tensor:
        product = expert_linear(rows, weight, experts, self.function is not functional.linear)
        return product if bias is None else product + bias[experts]


@dataclass(frozen=True)
class Program:
    """Steps, and which value comes out."""

    steps: tuple[Step, ...]
    result: Value

    @property
    def products(self) -> int:
        """How many products with the expert's own matrices."""
        return sum(any(isinstance(a, Held) and a.own for a in s.arguments) for s in self.steps)

    def run(self, module: nn.Module, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Rows [S, C] of experts [S], weights [S] -> [S, C]."""
        values = [rows, weights.unsqueeze(1)]
        for step in self.steps:
            values += step.run(module, values, experts)
        return values[self.result.number]


def record(call: ModuleCall, given: tuple[Tensor, ...], x: int, ids: int, weights: int) -> Program:
    """The program of the expert that all of `given[ids]` name; `given` are COUNT tokens' arguments, by what they are.

    Raises LeafUnsupported for what no program can say.
    """
    recorder = _Recorder(call, given[x], given[weights], int(given[ids].flatten()[0]))
    args, kwargs = pytree.tree_unflatten(list(given), call.argument_spec)
    module = call.module
    try:
        with untouched(module), call.settings(module), torch.no_grad(), recorder:
            output = call.forward(*args, **kwargs)
    except (IndexError, ValueError, NotImplementedError) as error:
        raise LeafUnsupported(f"{call.path} with one expert alone: {error}") from error
    results = [recorder.known.get(id(tensor)) for tensor in tensors_in(output)]
    if len(results) != 1 or results[0] not in recorder.summed:
        raise LeafUnsupported(f"{call.path} does not return the sum of what its experts give")
    assert isinstance(results[0], Value)
    return Program(tuple(recorder.steps), results[0])


def tensors_in(result: Any) -> list[Tensor]:
    """The tensors of a result, flattened."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


@dataclass
class _Pairs:
    """The tokens and choices that the module has taken rows and weights of: each pair once, always in one order."""

    choices: int
    tokens: Tensor | None = None

    def are_tokens(self, index: object) -> bool:
        """Whether an index is of every token, once for each of its choices."""
        if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.dim() != 1:
            return False
        if self.tokens is None:
            counts = index.bincount(minlength=COUNT)
            if len(counts) == COUNT and bool((counts == self.choices).all()):
                self.tokens = index
        return self.tokens is not None and torch.equal(self.tokens, index)

    def are_choices(self, index: object) -> bool:
        """Whether an index beside that of the tokens is of each of their choices."""
        if not isinstance(index, Tensor) or self.tokens is None or index.shape != self.tokens.shape:
            return False
        pairs = self.tokens * self.choices + index
        return torch.equal(pairs.sort().values, torch.arange(len(pairs), device=pairs.device))


class _Recorder(TorchFunctionMode):
    """Notes the calls that read rows, weights or the module's tensors."""

    def __init__(self, call: ModuleCall, x: Tensor, weights: Tensor, expert: int) -> None:
        super().__init__()
        self.path, self.expert = call.path, expert
        self.given = {id(x): Value(0), id(weights): Value(1)}
        self.pairs = _Pairs(weights.shape[1])
        self.shape = x.shape
        self.known: dict[int, Value | Held] = {
            id(tensor): Held(name) for name, tensor in named_tensors(call.module)
        }
        self.zeros: set[int] = set()
        self.summed: set[Value | Held | None] = set()
        self.steps: list[Step] = []
        self.count = 2
        self.alive: list[Any] = [x, weights]

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        if function in ADDING and id(args[0]) in self.zeros:
            # not run: weights may be on the meta device, where no index of the CPU's can be added at
            result = args[0] if function is Tensor.index_add_ else args[0].clone()
            self._add(result, *args, **kwargs)
            return result
        result = function(*args, **kwargs)
        self.alive.append(result)
        found = tensors_in(result)
        read = [id(a) for a in tensors_in((args, kwargs))]
        if not found or not any(
            i in self.known or i in self.given or i in self.zeros for i in read
        ):
            return result
        if function in ZEROS and found[0].shape == self.shape:
            self.zeros.add(id(found[0]))
        elif function is Tensor.__getitem__ and read[0] in self.given:
            self._take(found[0], *args)
        elif function is Tensor.__getitem__ and isinstance(self.known.get(read[0]), Held):
            self._slice(found[0], *args)
        else:
            self._note(function, args, kwargs, found)
        return result

    def _take(self, result: Tensor, source: Tensor, index: Any) -> None:
        """Rows or weights of every pair of token and choice."""
        value = self.given[id(source)]
        at = index if isinstance(index, tuple) else (index,)
        wanted = (self.pairs.are_tokens, self.pairs.are_choices)[: 1 + value.number]
        indices = [i for i in at if i is not None]
        if len(indices) != len(wanted) or not all(w(i) for w, i in zip(wanted, indices)):
            raise self._unknown("takes other than every token's rows")
        if value.number == 0 and None not in at:
            self.known[id(result)] = value
            return
        taken = iter((slice(None), 0))
        place = tuple(None if i is None else next(taken) for i in at)
        self._append(Tensor.__getitem__, (value, place), {}, [result])

    def _slice(self, result: Tensor, source: Tensor, index: Any) -> None:
        held = self.known[id(source)]
        if not isinstance(held, Held) or held.own or index != self.expert:
            raise self._unknown("slices a tensor of its own otherwise than by the expert's number")
        self.known[id(result)] = Held(held.name, own=True)

    def _add(self, result: Tensor, zeros: Tensor, dim: int, index: Tensor, source: Tensor) -> None:
        value = self.known.get(id(source))
        if dim != 0 or not self.pairs.are_tokens(index) or not isinstance(value, Value):
            raise self._unknown("adds up something else than rows of its tokens")
        self.zeros.discard(id(zeros))
        self.alive.append(result)
        self.known[id(result)] = value
        self.summed.add(value)

    def _note(
        self, function: Callable[..., Any], args: Any, kwargs: Any, results: list[Tensor]
    ) -> None:
        name = getattr(function, "__name__", "")
        inplace = name.endswith("_") and not name.endswith("__")
        if inplace or name in ("__setitem__", "__set__") or name.startswith("__i"):
            raise self._unknown(f"writes with {name}")
        own = [isinstance(a, Held) and a.own for a in self._named((args, kwargs))]
        if any(own) and (function not in PRODUCTS or own[0] or not own[1]):
            raise self._unknown(f"has {name} of an expert's own tensor")
        named_args, named_kwargs = pytree.tree_map(self._name, (args, kwargs))
        self._append(function, named_args, named_kwargs, results)

    def _append(
        self, function: Callable[..., Any], args: Any, kwargs: Any, results: list[Tensor]
    ) -> None:
        flat, spec = pytree.tree_flatten((args, kwargs))
        self.steps.append(Step(function, tuple(flat), spec))
        for tensor in results:
            self.known[id(tensor)] = Value(self.count)
            self.count += 1

    def _named(self, arguments: Any) -> list[Any]:
        return [self._name(leaf) for leaf in pytree.tree_leaves(arguments)]

    def _name(self, leaf: Any) -> Any:
        """What stands for an argument in a step."""
        if isinstance(leaf, Tensor):
            if id(leaf) not in self.known:
                raise self._unknown("computes with the choices, or with rows of no choice")
            return self.known[id(leaf)]
        if leaf in (COUNT, COUNT * self.pairs.choices):
            raise self._unknown("computes with the number of tokens")
        return leaf

    def _unknown(self, what: str) -> LeafUnsupported:
        return LeafUnsupported(f"{self.path} {what}")


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a module and its children hold, by its name from there."""
    names = {id(owner): name for name, owner in module.named_modules()}
    for owner, name, tensor in owned_tensors(module):
        yield f"{names[id(owner)]}.{name}".lstrip("."), tensor
