"""Following one element of a tensor back to where it was computed.

An element is a node and its coordinates, sympy integers (rewriter/integers.py). `step_back` undoes one operation that
only moves elements, `trace` undoes all of them. Repeated key heads then show as `floor(h / n_rep)` in a coordinate,
whatever the spelling was, and a transposed, split or fused projection as the coordinates within it.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from .graph import Size, is_aten
from .integers import (
    ONE,
    ZERO,
    Condition,
    Expr,
    Quotient,
    compare,
    is_nonnegative,
    plain,
    remainder,
)

Coordinates = tuple[Expr, ...]
Element = tuple[fx.Node, Coordinates]
Branch = tuple[Condition, fx.Node, Coordinates]
"""Under this condition, the element is that one."""

_LARGE = 1_000_003
"""Stands for TOKENS, and for a size known at run time only, where sizes are ordered: larger than others, and prime."""


def sizes_of(node: fx.Node) -> tuple[Expr, ...]:
    """The shape of a single-tensor node, as sympy expressions in TOKENS."""
    shape = node.meta["shape"]
    assert shape is not None, f"{node.format_node()} is not one tensor"
    return tuple(plain(size) for size in shape)


def size_value(argument: Size | fx.Node) -> Expr | None:
    """The value of a size that is an argument of an operation; None if it is not known."""
    if isinstance(argument, fx.Node):
        size = argument.meta.get("size")
        return None if size is None else plain(size)
    return sympy.sympify(argument)


def trace(node: fx.Node, coordinates: Coordinates) -> list[Element]:
    """The element itself, then every place it was moved from, down to the operation that computed it."""
    chain = [(node, coordinates)]
    while (before := step_back(*chain[-1])) is not None:
        chain.append(before)
    return chain


def step_back(node: fx.Node, coordinates: Coordinates) -> Element | None:
    """Where `node`'s operation took the element from; None if it computes values (or where is not certain)."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return _from_pieces(node, coordinates)
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return None
    rule = _MOVES.get(node.target._opname)
    if rule is not None:
        return rule(node, coordinates)
    for condition, source, place in branches(node, coordinates):
        if condition == sympy.true:
            return source, place
    return None


def branches(node: fx.Node, coordinates: Coordinates) -> list[Branch]:
    """The places an element of a concatenation or of a tensor with a part overwritten may come from.

    Empty for any other operation. Conditions exclude each other and cover every element.
    """
    if is_aten(node, "cat"):
        return _cat_branches(node, coordinates)
    if is_aten(node, "slice_scatter"):
        return _slice_scatter_branches(node, coordinates)
    if is_aten(node, "select_scatter"):
        base, part, dim, index = arguments(node)
        dim = dim % len(coordinates)
        index = index % sizes_of(node)[dim] if index < 0 else index
        inside = compare(coordinates[dim], "==", sympy.sympify(index))
        outer = (*coordinates[:dim], *coordinates[dim + 1 :])
        return [(inside, part, outer), (sympy.Not(inside), base, coordinates)]
    if is_aten(node, "stack"):
        dim = argument(node, 1, "dim", 0) % len(coordinates)
        rest = (*coordinates[:dim], *coordinates[dim + 1 :])
        at = coordinates[dim]
        return [
            (compare(at, "==", sympy.Integer(i)), part, rest)
            for i, part in enumerate(arguments(node)[0])
        ]
    return []


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments of a call."""
    return node.args


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, given by position or by name."""
    return (
        arguments(node)[position]
        if len(arguments(node)) > position
        else node.kwargs.get(name, default)
    )


def broadcast(coordinates: Coordinates, sizes: tuple[Expr, ...]) -> Coordinates:
    """The element of a smaller operand that broadcasting places at `coordinates`."""
    aligned = coordinates[len(coordinates) - len(sizes) :]
    return tuple(ZERO if size == 1 else at for at, size in zip(aligned, sizes))


# ---- one rule a family of moves


def _same_place(node: fx.Node, coordinates: Coordinates) -> Element:
    return arguments(node)[0], coordinates


def _cast(node: fx.Node, coordinates: Coordinates) -> Element | None:
    """A cast that keeps every value: to the same dtype, or a wider float."""
    source, target = arguments(node)[0].meta["dtype"], node.meta["dtype"]
    widens = source.is_floating_point and torch.promote_types(source, target) == target
    return (arguments(node)[0], coordinates) if source == target or widens else None


def _reshape(node: fx.Node, coordinates: Coordinates) -> Element | None:
    place = reindex(coordinates, sizes_of(node), sizes_of(arguments(node)[0]))
    return None if place is None else (arguments(node)[0], place)


def reindex(
    coordinates: Coordinates, sizes: tuple[Expr, ...], target: tuple[Expr, ...]
) -> Coordinates | None:
    """Coordinates, in a tensor of sizes `target`, of the element at the same row-major offset."""
    groups = dimension_groups(sizes, target)
    if groups is None:
        return None
    place: list[Expr] = [ZERO] * len(target)
    for outer, inner in groups:
        if len(outer) == 1 and len(inner) == 1:
            place[inner[0]] = coordinates[outer[0]]
            continue
        offset, stride = ZERO, ONE
        for dim in reversed(outer):
            offset, stride = offset + coordinates[dim] * stride, stride * sizes[dim]
        stride = ONE
        for dim in reversed(inner):
            quotient = Quotient(offset, stride)
            first = dim == inner[0]
            place[dim] = quotient if first else remainder(quotient, target[dim])
            stride = stride * target[dim]
    return tuple(sympy.expand(at) for at in place)


Group = tuple[list[int], list[int]]


def dimension_groups(sizes: tuple[Expr, ...], target: tuple[Expr, ...]) -> list[Group] | None:
    """The finest pairs of neighbouring dimensions that a reshape keeps apart; dimensions of size 1 are left out."""
    left = [dim for dim, size in enumerate(sizes) if size != 1]
    right = [dim for dim, size in enumerate(target) if size != 1]
    groups: list[Group] = []
    while left and right:
        one, two = [left.pop(0)], [right.pop(0)]
        product, other = sizes[one[0]], target[two[0]]
        while sympy.expand(product - other) != 0:
            grow_left = _magnitude(product) < _magnitude(other)
            rest = left if grow_left else right
            if not rest:
                return None
            dim = rest.pop(0)
            if grow_left:
                one.append(dim)
                product = product * sizes[dim]
            else:
                two.append(dim)
                other = other * target[dim]
        groups.append((one, two))
    return None if left or right else groups


def _magnitude(size: Expr) -> int:
    return int(size.xreplace(dict.fromkeys(size.free_symbols, sympy.Integer(_LARGE))))


def _expand(node: fx.Node, coordinates: Coordinates) -> Element:
    return arguments(node)[0], broadcast(coordinates, sizes_of(arguments(node)[0]))


def _transpose(node: fx.Node, coordinates: Coordinates) -> Element:
    place = list(coordinates)
    one, two = (dim % len(place) for dim in arguments(node)[1:3])
    place[one], place[two] = place[two], place[one]
    return arguments(node)[0], tuple(place)


def _matrix_transpose(node: fx.Node, coordinates: Coordinates) -> Element:
    return arguments(node)[0], (*coordinates[:-2], *reversed(coordinates[-2:]))


def _permute(node: fx.Node, coordinates: Coordinates) -> Element:
    place: list[Expr] = [ZERO] * len(coordinates)
    for at, dim in zip(coordinates, arguments(node)[1]):
        place[dim % len(place)] = at
    return arguments(node)[0], tuple(place)


def _unsqueeze(node: fx.Node, coordinates: Coordinates) -> Element:
    dim = arguments(node)[1] % len(coordinates)
    return arguments(node)[0], (*coordinates[:dim], *coordinates[dim + 1 :])


def _squeeze(node: fx.Node, coordinates: Coordinates) -> Element:
    sizes = sizes_of(arguments(node)[0])
    dims = arguments(node)[1] if len(node.args) > 1 else list(range(len(sizes)))
    named = {dim % len(sizes) for dim in ([dims] if isinstance(dims, int) else dims)}
    rest = iter(coordinates)
    gone = {dim for dim in named if sizes[dim] == 1}
    return arguments(node)[0], tuple(
        ZERO if dim in gone else next(rest) for dim in range(len(sizes))
    )


def _slice(node: fx.Node, coordinates: Coordinates) -> Element | None:
    source = arguments(node)[0]
    dim = argument(node, 1, "dim", 0) % len(coordinates)
    size, step = sizes_of(source)[dim], argument(node, 4, "step", 1)
    start = _start(argument(node, 2, "start"), size)
    if start is None and argument(node, 3, "end") in (None, sys.maxsize):
        start = size - sizes_of(node)[dim]  # what runs to the end starts where its length says
    if start is None or not isinstance(step, int) or step < 1:
        return None
    return source, _replaced(coordinates, dim, start + step * coordinates[dim])


def _start(start: Size | fx.Node | None, size: Expr) -> Expr | None:
    """The first index of a slice; None if its sign is not known."""
    value = ZERO if start is None else size_value(start)
    if value is None or is_nonnegative(value):
        return value
    return size + value if is_nonnegative(-value - 1) else None


def _replaced(coordinates: Coordinates, dim: int, at: Expr) -> Coordinates:
    return (*coordinates[:dim], sympy.expand(at), *coordinates[dim + 1 :])


def _narrow(node: fx.Node, coordinates: Coordinates) -> Element | None:
    dim = arguments(node)[1] % len(coordinates)
    start = _start(arguments(node)[2], sizes_of(arguments(node)[0])[dim])
    return (
        None
        if start is None
        else (arguments(node)[0], _replaced(coordinates, dim, start + coordinates[dim]))
    )


def _select(node: fx.Node, coordinates: Coordinates) -> Element | None:
    dim = arguments(node)[1] % (len(coordinates) + 1)
    index = _start(arguments(node)[2], sizes_of(arguments(node)[0])[dim])
    return (
        None
        if index is None
        else (arguments(node)[0], (*coordinates[:dim], index, *coordinates[dim:]))
    )


def _repeat(node: fx.Node, coordinates: Coordinates) -> Element:
    sizes = sizes_of(arguments(node)[0])
    aligned = coordinates[len(coordinates) - len(sizes) :]
    return arguments(node)[0], tuple(remainder(at, size) for at, size in zip(aligned, sizes))


def _repeat_interleave(node: fx.Node, coordinates: Coordinates) -> Element | None:
    repeats, dim = argument(node, 1, "repeats"), argument(node, 2, "dim")
    if not isinstance(repeats, int) or (dim is None and len(coordinates) != 1):
        return None
    dim = (dim or 0) % len(coordinates)
    at = Quotient(coordinates[dim], sympy.Integer(repeats))
    return arguments(node)[0], _replaced(coordinates, dim, at)


def _flip(node: fx.Node, coordinates: Coordinates) -> Element:
    place = list(coordinates)
    for dim in arguments(node)[1]:
        place[dim] = sizes_of(node)[dim] - 1 - place[dim]
    return arguments(node)[0], tuple(place)


def _from_pieces(node: fx.Node, coordinates: Coordinates) -> Element | None:
    """Element `i` of a split, chunk or unbind."""
    pieces, number = arguments(node)
    if is_aten(pieces, "unbind"):
        source, dim = arguments(pieces)[0], argument(pieces, 1, "dim", 0) % (len(coordinates) + 1)
        return source, (*coordinates[:dim], sympy.Integer(number), *coordinates[dim:])
    if not is_aten(pieces, "split", "split_with_sizes", "chunk"):
        return None
    source, dim = arguments(pieces)[0], argument(pieces, 2, "dim", 0) % len(coordinates)
    offset = _piece_offset(pieces, sizes_of(source)[dim], number)
    return (
        None if offset is None else (source, _replaced(coordinates, dim, offset + coordinates[dim]))
    )


def _piece_offset(pieces: fx.Node, size: Expr, number: int) -> Expr | None:
    width = arguments(pieces)[1]
    if isinstance(width, (list, tuple)):
        widths = [size_value(w) for w in width[:number]]
        return None if None in widths else sympy.Add(*widths)
    if is_aten(pieces, "chunk"):
        return number * Quotient(size + width - 1, sympy.Integer(width))
    value = size_value(width)
    return None if value is None else number * value


def _cat_branches(node: fx.Node, coordinates: Coordinates) -> list[Branch]:
    dim = argument(node, 1, "dim", 0) % len(coordinates)
    at, start, found = coordinates[dim], ZERO, []
    for part in arguments(node)[0]:
        if len(sizes_of(part)) != len(coordinates):
            continue  # an empty one-dimensional tensor, which a concatenation skips
        end = start + sizes_of(part)[dim]
        inside = sympy.And(compare(at, ">=", start), compare(at, "<", end))
        if inside != sympy.false:
            found.append((inside, part, _replaced(coordinates, dim, at - start)))
        start = end
    return found


def _slice_scatter_branches(node: fx.Node, coordinates: Coordinates) -> list[Branch]:
    base, part = arguments(node)[:2]
    dim = argument(node, 2, "dim", 0) % len(coordinates)
    start = _start(argument(node, 3, "start"), sizes_of(node)[dim])
    if start is None or argument(node, 5, "step", 1) != 1:
        return []
    at = coordinates[dim]
    inside = sympy.And(compare(at, ">=", start), compare(at, "<", start + sizes_of(part)[dim]))
    return [
        (inside, part, _replaced(coordinates, dim, at - start)),
        (sympy.Not(inside), base, coordinates),
    ]


_MOVES: dict[str, Callable[[fx.Node, Coordinates], Element | None]] = {
    **dict.fromkeys(("clone", "alias", "detach", "contiguous", "lift_fresh_copy"), _same_place),
    **dict.fromkeys(("_to_copy", "to", "type_as"), _cast),
    **dict.fromkeys(("reshape", "view", "_unsafe_view", "flatten", "unflatten"), _reshape),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    "transpose": _transpose,
    **dict.fromkeys(("t", "mT"), _matrix_transpose),
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "flip": _flip,
}
