"""What an opaque module returns, as a function of the number of tokens, learned from real calls at a few lengths."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .leaves import LeafUnsupported

CONSTANTS = (type(None), bool, int, float, str, bytes, enum.Enum, torch.dtype, torch.device, slice)
"""Types of the values that may go into or come out of an opaque module beside tensors."""


@dataclass(frozen=True)
class Affine:
    """A size that grows with the number of tokens: `slope * T + start`."""

    slope: int
    start: int

    def at(self, tokens: Any) -> Any:
        """The size for this many tokens (int or SymInt)."""
        return tokens if (self.slope, self.start) == (1, 0) else self.slope * tokens + self.start

    def solve(self, size: Any) -> Any:
        """The number of tokens at which the size is `size`."""
        return size if (self.slope, self.start) == (1, 0) else (size - self.start) // self.slope


@dataclass(frozen=True)
class ShapeOf:
    """What is remembered of a tensor. Sizes are int or Affine."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device

    def at(self, tokens: Any) -> ShapeOf:
        """The same with every size a number (int or SymInt)."""
        sizes = (size.at(tokens) if isinstance(size, Affine) else size for size in self.shape)
        return ShapeOf(tuple(sizes), self.dtype, self.device)

    def in_batch(self, grows: Sequence[int], rows: Any) -> ShapeOf:
        """The same for `rows` rows in place of one, in the sizes that grow with them."""
        sizes = (rows * size if more else size for size, more in zip(self.shape, grows))
        return ShapeOf(tuple(sizes), self.dtype, self.device)


@dataclass(frozen=True)
class Example:
    """What one real call returned, flattened, tensors as ShapeOf; `problem` says why it cannot be an operator."""

    results: tuple[Any, ...]
    spec: pytree.TreeSpec
    problem: str = ""


def example_of(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Example]:
    """Make a real call: its result, and what to remember of it."""
    before = pytree.tree_leaves((args, kwargs))
    given = [leaf for leaf in before if isinstance(leaf, torch.Tensor)]
    versions = [tensor._version for tensor in given]
    output = forward(*args, **kwargs)
    after = pytree.tree_leaves((args, kwargs))
    replaced = [id(leaf) for leaf in before] != [id(leaf) for leaf in after]
    written = replaced or versions != [tensor._version for tensor in given]
    results, spec = pytree.tree_flatten(output)
    problem = "it writes into its arguments" if written else ""
    return output, Example(tuple(map(_remembered, results)), spec, problem)


def _remembered(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ShapeOf(tuple(value.shape), value.dtype, value.device)
    return value


def results_in_tokens(
    lengths: Sequence[int], examples: Sequence[Example], path: str
) -> tuple[Any, ...]:
    """What the calls of one module at these lengths returned, in one description: sizes as int or Affine.

    Raises LeafUnsupported if there is none.
    """
    problem = next((example.problem for example in examples if example.problem), "")
    if problem or any(example.spec != examples[0].spec for example in examples):
        raise LeafUnsupported(
            f"{path}: {problem or 'its result has another structure at another length'}"
        )
    values = zip(*(example.results for example in examples), strict=True)
    return tuple(_in_tokens(lengths, of_one, path) for of_one in values)


def results_in_batch(
    results: Sequence[Any], one: Example, many: Example, rows: int, path: str
) -> tuple[tuple[int, ...], ...]:
    """For each tensor of `results`, as learned from calls with one row, which of its sizes grow with the number of
    rows: 1 for those that do, 0 for others.

    `one` and `many` are calls of the same length with one row and with `rows`. Raises LeafUnsupported.
    """
    if many.problem or many.spec != one.spec:
        raise LeafUnsupported(f"{path}: its result has another structure for several rows")
    found = []
    for result, single, several in zip(results, one.results, many.results, strict=True):
        if not isinstance(result, ShapeOf):
            continue
        pairs = list(zip(single.shape, several.shape, strict=True))
        if any(two not in (size, rows * size) for size, two in pairs):
            raise LeafUnsupported(
                f"{path} returns shape {several.shape} for {rows} rows, {single.shape} for one"
            )
        found.append(tuple(int(two != size) for size, two in pairs))
    return tuple(found)


def _in_tokens(lengths: Sequence[int], values: Sequence[Any], path: str) -> Any:
    first = values[0]
    if all(isinstance(value, ShapeOf) for value in values):
        kinds = {(len(value.shape), value.dtype) for value in values}
        if len(kinds) == 1:
            sizes = zip(*(value.shape for value in values), strict=True)
            return ShapeOf(tuple(_line(lengths, s, path) for s in sizes), first.dtype, first.device)
    elif all(isinstance(value, CONSTANTS) and value == first for value in values):
        return first
    raise LeafUnsupported(f"{path} returns values that change with the length: {values}")


def _line(lengths: Sequence[int], sizes: Sequence[int], path: str) -> Any:
    """The one size, or the Affine through all points."""
    if len(set(sizes)) == 1:
        return sizes[0]
    slope, rest = divmod(sizes[1] - sizes[0], lengths[1] - lengths[0])
    line = Affine(slope, sizes[0] - slope * lengths[0])
    if (
        rest
        or slope <= 0
        or any(line.at(n) != size for n, size in zip(lengths, sizes, strict=True))
    ):
        raise LeafUnsupported(f"{path} has a size of {sizes} at lengths {lengths}")
    return line
