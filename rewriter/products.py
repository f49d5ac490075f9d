"""Sums of products over one index: matmul, bmm, baddbmm, einsum and `(a * b).sum(dim)` as the same thing."""

from __future__ import annotations

from torch import fx

from .graph import is_aten
from .indexing import Coordinates, Element, argument, arguments, broadcast, sizes_of
from .integers import ZERO, Index

Product = tuple[Element, Element, Index]
"""Two elements, and the index over which their products are added up."""


def is_product(node: fx.Node) -> bool:
    """Whether a node is a sum of products of two tensors, maybe with something added."""
    return is_aten(node, "matmul", "bmm", "baddbmm") or _labels(node) is not None


def multiplied(node: fx.Node, place: Coordinates, name: str) -> Product | None:
    """The elements that the element of a product at `place` is made of; `name` is for the index summed over.

    None if the node is no product of two tensors over one index.
    """
    labels = _labels(node)
    if labels is not None:
        return _of_labels(node, place, labels, name)
    if is_aten(node, "sum"):
        return _summed(node, place, name)
    if not is_aten(node, "matmul", "bmm", "baddbmm"):
        return None
    left, right = arguments(node)[1:3] if is_aten(node, "baddbmm") else arguments(node)[:2]
    if len(sizes_of(left)) < 2 or len(sizes_of(right)) < 2:
        return None
    *batch, row, column = place
    index = Index(name, sizes_of(left)[-1])
    one = (*broadcast(tuple(batch), sizes_of(left)[:-2]), row, index)
    two = (*broadcast(tuple(batch), sizes_of(right)[:-2]), index, column)
    return (left, one), (right, two), index


def _summed(node: fx.Node, place: Coordinates, name: str) -> Product | None:
    """The elements of `(a * b).sum(dim)`."""
    terms, dims = arguments(node)[0], argument(node, 1, "dim")
    if not is_aten(terms, "mul") or not isinstance(dims, (list, tuple)) or len(dims) != 1:
        return None
    if not all(isinstance(factor, fx.Node) for factor in arguments(terms)[:2]):
        return None
    sizes = sizes_of(terms)
    dim = dims[0] % len(sizes)
    index = Index(name, sizes[dim])
    after = dim + 1 if argument(node, 2, "keepdim", False) else dim
    place = (*place[:dim], index, *place[after:])
    one, two = ((x, broadcast(place, sizes_of(x))) for x in arguments(terms)[:2])
    return one, two, index


def own_dims(node: fx.Node) -> tuple[list[int], list[int]]:
    """The dimensions of a product's result that only the left operand has, and those that only the right one has."""
    labels = _labels(node)
    if labels is None:
        rank = len(sizes_of(node))
        return [rank - 2], [rank - 1]
    left, right, result = labels
    rows = [dim for dim, label in enumerate(result) if label not in right]
    return rows, [dim for dim, label in enumerate(result) if label not in left]


def _labels(node: fx.Node) -> tuple[str, str, str] | None:
    """The labels of an einsum of two tensors over one index: (left, right, result)."""
    if not is_aten(node, "einsum") or argument(node, 2, "path") is not None:
        return None
    equation = arguments(node)[0].replace(" ", "")
    operands, arrow, result = equation.partition("->")
    parts = operands.split(",")
    if len(parts) != 2 or not arrow or "." in equation:
        return None
    left, right = parts
    summed = (set(left) | set(right)) - set(result)
    distinct = all(len(set(part)) == len(part) for part in (left, right, result))
    return (
        (left, right, result)
        if distinct and len(summed) == 1 and summed <= set(left) & set(right)
        else None
    )


def _of_labels(
    node: fx.Node, place: Coordinates, labels: tuple[str, str, str], name: str
) -> Product:
    left, right, result = labels
    operands = arguments(node)[1]
    (summed,) = (set(left) | set(right)) - set(result)
    sizes = [sizes_of(operand) for operand in operands]
    index = Index(
        name,
        max((sizes[0][left.index(summed)], sizes[1][right.index(summed)]), key=lambda s: s != 1),
    )
    known = {**dict(zip(result, place)), summed: index}
    one, two = (
        (operand, tuple(ZERO if size == 1 else known[label] for label, size in zip(part, own)))
        for operand, part, own in zip(operands, (left, right), sizes)
    )
    return one, two, index
