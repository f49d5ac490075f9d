"""Random small ATen programs over a packed row, run at three lengths, and the naive meaning of what is claimed of them.

A program is an fx graph with the facts a captured one carries. Every node is evaluated while it is added, on three
rows of 7, 5 and 11 tokens: the longer and the shorter row are made of the first one's tokens, in another order and
some of them twice. A value that has one row per token must then have equal rows where the tokens are equal.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

import sympy
import torch
from torch import fx

from regraft.rewriter.graph import TOKENS, Size
from regraft.rewriter.token_axis import Value, analyse

LENGTHS = (7, 5, 11)
ORIGIN = ((0, 1, 2, 3, 4, 5, 6), (6, 2, 2, 0, 5), (3, 6, 0, 1, 1, 5, 2, 4, 0, 6, 3))
"""Which token of the first row each token of each row is."""
VOCABULARY = 12
MOST_ELEMENTS = 6000

Item = TypeVar("Item")
aten = torch.ops.aten


class Chooser:
    """How a program makes its choices: drawn by hypothesis, or by a plain random number generator."""

    def __init__(self, integer: Callable[[int], int]) -> None:
        self._integer = integer

    def below(self, bound: int) -> int:
        return self._integer(bound)

    def pick(self, items: Sequence[Item]) -> Item:
        return items[self._integer(len(items))]

    def chance(self, one_in: int) -> bool:
        return self._integer(one_in) == 0


class Program:
    """A graph under construction.

    `runs[node]` holds the node's result at each of LENGTHS; `exact` what was computed without rounding, so that it
    may be compared or sorted; `live` what tokens went into.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.runs: dict[fx.Node, tuple[Any, ...]] = {}
        self.exact: set[fx.Node] = set()
        self.live: set[fx.Node] = set()
        self.sizes: dict[sympy.Expr, fx.Node] = {}
        generator = torch.Generator().manual_seed(5)
        self._random = lambda high, shape: torch.randint(high, shape, generator=generator)
        ids, positions = self._random(VOCABULARY, (LENGTHS[0],)), self._random(9, (LENGTHS[0],))
        self.ids = self._input("input_ids", ids)
        self.positions = self._input("position_ids", positions)
        self.tokens = self.call(aten.sym_size.int, self.ids, 1)
        self.tensors = [self.ids, self.positions]

    def _input(self, name: str, row: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        self.live.add(node)
        return self._keep(node, tuple(row[list(origin)][None] for origin in ORIGIN), exact=True)

    def weight(self, *shape: int, high: int = 0) -> fx.Node:
        """A constant tensor: whole numbers below `high` as indices, else small floats that add without rounding."""
        value = self._random(high or 7, shape)
        if not high:
            value = (value - 3).double()
        node = self.graph.create_node("get_attr", f"w{len(self.runs)}")
        self._keep(node, (value,) * 3, exact=True)
        self.tensors.append(node)
        return node

    def size(self, expr: Size) -> fx.Node | int:
        """An argument for this size."""
        if isinstance(expr, int) or expr.is_Integer:
            return int(expr)
        if expr == TOKENS:
            return self.tokens
        if expr not in self.sizes:
            self.sizes[expr] = self._computed(expr)
        return self.sizes[expr]

    def _computed(self, expr: sympy.Expr) -> fx.Node:
        if isinstance(expr, (sympy.floor, sympy.ceiling)):
            odd = self.call(operator.add, self.tokens, int(isinstance(expr, sympy.ceiling)))
            node = self.call(operator.floordiv, odd, 2)
        elif expr.is_Add:
            constant, rest = expr.as_coeff_Add()
            node = self.call(operator.add, self.size(rest), int(constant))
        else:
            node = self.call(operator.mul, self.tokens, self.size(sympy.cancel(expr / TOKENS)))
        assert node is not None
        return node

    def call(
        self, target: Callable, *args: Any, exact: bool = True, **kwargs: Any
    ) -> fx.Node | None:
        """Add a call; None where it cannot run, or where its shape is no simple function of T."""
        operands: list[fx.Node] = []
        fx.map_arg((args, kwargs), lambda n: operands.append(n) or n)
        results = []
        for run in range(3):
            try:
                results.append(self._run(target, args, kwargs, run))
            except (RuntimeError, IndexError, ValueError):
                return None
        if isinstance(results[0], (tuple, list)):
            return self._several(target, args, kwargs, results, exact and self._all_exact(operands))
        if isinstance(results[0], torch.Tensor) and not _fits(results):
            return None
        node = self.graph.call_function(target, args, kwargs)
        self._keep(node, tuple(results), exact=exact and self._all_exact(operands))
        if not self.live.isdisjoint(operands):
            self.live.add(node)
        if isinstance(results[0], torch.Tensor):
            self.tensors.append(node)
        return node

    def _run(self, target: Callable, args: Any, kwargs: Any, run: int) -> Any:
        args, kwargs = fx.map_arg((args, kwargs), lambda node: self.runs[node][run])
        return target(*args, **kwargs)

    def _several(
        self, target: Callable, args: Any, kwargs: Any, results: list, exact: bool
    ) -> fx.Node | None:
        counts = {len(result) for result in results}
        if len(counts) > 1 or not all(_fits(parts) for parts in zip(*results)):
            return None
        node = self.graph.call_function(target, args, kwargs)
        self.runs[node] = tuple(results)
        if exact:
            self.exact.add(node)
        if not self.live.isdisjoint(node.all_input_nodes):
            self.live.add(node)
        node.meta.update(shape=None, dtype=None, path="m", source="", val=results[0])
        parts = [self.call(operator.getitem, node, i, exact=exact) for i in range(len(results[0]))]
        return parts[-1]

    def _all_exact(self, operands: Sequence[fx.Node]) -> bool:
        return all(operand in self.exact for operand in operands)

    def _keep(self, node: fx.Node, results: tuple[Any, ...], exact: bool) -> fx.Node:
        self.runs[node] = results
        if exact:
            self.exact.add(node)
        shape = dtype = None
        if isinstance(results[0], torch.Tensor):
            shape = tuple(_size_of(sizes) for sizes in zip(*(r.shape for r in results)))
            dtype = results[0].dtype
        else:
            node.meta["size"] = _size_of(results)
        node.meta.update(shape=shape, dtype=dtype, path="m", source="", val=results[0])
        return node


def _fits(results: Sequence[torch.Tensor]) -> bool:
    """Small, not empty, not beyond whole numbers in a double, and of a shape that is a simple function of T."""
    if not all(isinstance(r, torch.Tensor) for r in results):
        return False
    if len({r.dim() for r in results}) > 1 or results[0].dim() > 5:
        return False
    if any(r.numel() > MOST_ELEMENTS or r.numel() == 0 for r in results):
        return False
    if results[0].is_floating_point() and any(_largest(r) > 1e12 for r in results):
        return False
    return all(_size_of(sizes) is not None for sizes in zip(*(r.shape for r in results)))


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max())


@cache
def _size_of(sizes: tuple[int, ...]) -> Size | None:
    """The size as a function of T: a constant, a * T + b, a * T * T, ceil or floor of T / 2."""
    if len(set(sizes)) == 1:
        return int(sizes[0])
    slope = sympy.Rational(sizes[2] - sizes[0], LENGTHS[2] - LENGTHS[0])
    candidates = [slope * TOKENS + (sizes[0] - slope * LENGTHS[0])] if slope.is_Integer else []
    square = sympy.Rational(sizes[0], LENGTHS[0] ** 2)
    candidates += [square * TOKENS**2] if square.is_Integer else []
    candidates += [sympy.ceiling(TOKENS / 2), sympy.floor(TOKENS / 2)]
    for candidate in candidates:
        if all(candidate.subs(TOKENS, length) == size for length, size in zip(LENGTHS, sizes)):
            return candidate
    return None


def violation(node: fx.Node, value: Value, program: Program) -> str:
    """How the node's results contradict what the analysis promises of an unmixed value; "" if they do not.

    An element at token indices (t, s, ...) of its axes is a function of these tokens alone, whatever the other tokens
    and their number are, and is the same along every other dimension whose size has T.
    """
    first = _by_tokens(program.runs[node][0], node, value, 0)
    if isinstance(first, str):
        return first
    for run in (1, 2):
        other = _by_tokens(program.runs[node][run], node, value, run)
        if isinstance(other, str):
            return other
        expected = first
        for dim in range(len(value.axes)):
            expected = expected.index_select(dim, torch.tensor(ORIGIN[run]))
        if other.shape != expected.shape:
            return f"shape {[*other.shape]} where {[*expected.shape]} was expected"
        if not torch.allclose(
            other.double(), expected.double(), rtol=1e-9, atol=1e-9, equal_nan=True
        ):
            return f"rows of equal tokens differ at {LENGTHS[run]} tokens"
    return ""


def _by_tokens(tensor: torch.Tensor, node: fx.Node, value: Value, run: int) -> torch.Tensor | str:
    """[T, T, ..., rest]: a token dimension per axis first. Uniform dimensions are cut to one element."""
    length, axes = LENGTHS[run], dict(value.axes)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    front, shape = [], []
    for dim, (size, known) in enumerate(zip(tensor.shape, [*node.meta["shape"], 2])):
        axis = axes.get(dim)
        if axis is not None:
            if axis.outer * length * axis.inner != size:
                return f"{axis} does not make {size} elements"
            front.append(len(shape) + 1)
            shape += [axis.outer, length, axis.inner]
        elif isinstance(known, int):
            shape.append(size)
        else:
            one = tensor.narrow(dim, 0, 1)
            if not torch.allclose(tensor.double(), one.double().expand_as(tensor), equal_nan=True):
                return f"dimension {dim} is not uniform"
            tensor = one
            shape.append(1)
    split = tensor.reshape(shape)
    rest = [dim for dim in range(len(shape)) if dim not in front]
    return split.permute((*front, *rest))


def claims(program: Program) -> Iterator[tuple[fx.Node, Value]]:
    """What the analysis promises of the computed tensors that no mixing went into before.

    Behind a cut rows are taken for granted (the region that closes there is replaced or replayed), so nothing that
    has a cut among its ancestors is looked at.
    """
    analysis = analyse(program.graph)
    behind: set[fx.Node] = set()
    for node in program.graph.nodes:
        if analysis.is_cut(node) or any(operand in behind for operand in node.all_input_nodes):
            behind.add(node)
            continue
        value = analysis.values[node]
        computed = node.op == "call_function" and isinstance(program.runs[node][0], torch.Tensor)
        if computed and isinstance(value, Value) and not value.mixed:
            yield node, value


def violations(program: Program) -> list[str]:
    """Every claim that the runs contradict."""
    found = []
    for node, value in claims(program):
        problem = violation(node, value, program)
        if problem:
            found.append(f"{node.format_node()} is called {value.axes}: {problem}")
    return found
