"""Views: the same elements under other coordinates. Decided by integers, since T is a single symbol.

In row-major order, reshaping keeps the product of the sizes before a dimension. Where the old and the new shape have a
common prefix product, the dimensions up to there form a group; within a group with one token axis the factors of
`outer * T * inner` are redistributed, and the rows stay in order exactly if T is one factor of some new dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import sympy
import torch
from torch import fx

from regraft.rewriter.graph import Size

from .analysis import Facts, Result, rule
from .value import ODD, PERM, Axis, Value, fitted, has_tokens, make, tokens_multiple

Dims = tuple[int, ...]
Shape = tuple[Size, ...]


@rule(
    "view",
    "_unsafe_view",
    "reshape",
    "flatten",
    "unflatten",
    "_reshape_alias",
    "view_as",
    sizes=True,
)
def view(facts: Facts) -> Result:
    source = facts.tensor(0, "self")
    value = facts.value(source)
    if isinstance(facts.argument(1, "dtype"), torch.dtype):
        return _bit_view(facts, source)
    axes = reshape_axes(dict(value.axes), facts.shape(source), facts.out_shape)
    return make(axes, value.mixed, value.why or "rows are reordered by a view")


def _bit_view(facts: Facts, source: fx.Node) -> Result:
    """The same memory under another dtype: only the last dimension changes."""
    old, new = facts.shape(source), facts.out_shape
    if old == new or not has_tokens(new[-1]):
        return facts.value(source)
    return facts.unknown("tokens are split into bits")


def reshape_axes(axes: dict[int, Axis], old: Shape, new: Shape) -> dict[int, Axis]:
    """Where the token axes of a tensor of shape `old` are after a row-major view as `new`."""
    if not any(map(has_tokens, old)):
        return {}
    result: dict[int, Axis] = {}
    for old_dims, new_dims in groups(old, new):
        if _same(old, old_dims, new, new_dims):
            result.update(_paired(axes, old, old_dims, new, new_dims))
            continue
        held = _held(axes, old, old_dims)
        if not held:
            continue
        ((dim, axis),) = list(held.items())[:1]
        if len(held) == 1 and axis.kind == "ok" and sum(has_tokens(old[d]) for d in old_dims) == 1:
            result.update(_redistribute(axis, dim, old, old_dims, new, new_dims))
        else:
            # parts of one odd dimension stay in order when they are joined again (blocks of a padded row)
            loose = ODD if all(axis.kind == "odd" for axis in held.values()) else PERM
            result.update({dim: loose for dim in new_dims if new[dim] != 1})
    return result


def _held(axes: dict[int, Axis], old: Shape, dims: Dims) -> dict[int, Axis]:
    """The token axes of a group whose dimensions are merged or split.

    Along a uniform dimension of T every row is the same, but rows of several elements are not uniform once they lie in
    one dimension: from here on it is an axis like any other. A uniform dimension that is only split stays uniform.
    """
    held = {dim: axes[dim] for dim in dims if dim in axes}
    if held or any(not has_tokens(old[dim]) and old[dim] != 1 for dim in dims):
        for dim in dims:
            if dim not in held and has_tokens(old[dim]):
                held[dim] = fitted(Axis(inner=tokens_multiple(old[dim]) or 1), old[dim])
    return held


@cache
def groups(old: Shape, new: Shape) -> tuple[tuple[Dims, Dims], ...]:
    """Split both shapes into the shortest runs of dimensions with equal products."""
    alike = 0  # last dimensions that stay as they are, whatever is in front of them
    while alike < min(len(old), len(new)) and old[-1 - alike] == new[-1 - alike]:
        alike += 1
    ends = len(old) - alike, len(new) - alike
    pairs = [((ends[0] + k,), (ends[1] + k,)) for k in range(alike)]
    return (*_prefix_groups(old[: ends[0]], new[: ends[1]]), *pairs)


def _prefix_groups(old: Shape, new: Shape) -> list[tuple[Dims, Dims]]:
    found: list[tuple[Dims, Dims]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = old[i : i + 1], new[j : j + 1]
        while not _equal(_product(left), _product(right)):
            longer = i + len(left) < len(old), j + len(right) < len(new)
            if longer[0] and (_smaller(_product(left), _product(right)) or not longer[1]):
                left = old[i : i + len(left) + 1]
            elif longer[1]:
                right = new[j : j + len(right) + 1]
            else:
                break
        found.append((tuple(range(i, i + len(left))), tuple(range(j, j + len(right)))))
        i, j = i + len(left), j + len(right)
    return found


def _product(sizes: Sequence[Size]) -> Size:
    product: Size = 1
    for size in sizes:
        product = product * size
    return product


def _equal(left: Size, right: Size) -> bool:
    return left == right or bool(sympy.expand(left - right) == 0)


def _smaller(left: Size, right: Size) -> bool:
    """Compare at a large T: all factors but T are small numbers."""
    large = [
        sympy.sympify(size).subs(dict.fromkeys(sympy.sympify(size).free_symbols, 1000003))
        for size in (left, right)
    ]
    return bool(large[0] < large[1])


def _same(old: Shape, old_dims: Dims, new: Shape, new_dims: Dims) -> bool:
    """Only dimensions of size 1 come or go."""
    return [old[d] for d in old_dims if old[d] != 1] == [new[d] for d in new_dims if new[d] != 1]


def _paired(
    axes: dict[int, Axis], old: Shape, old_dims: Dims, new: Shape, new_dims: Dims
) -> dict[int, Axis]:
    old_real = [d for d in old_dims if old[d] != 1]
    new_real = [d for d in new_dims if new[d] != 1]
    return {n: axes[o] for o, n in zip(old_real, new_real, strict=True) if o in axes}


def _redistribute(
    axis: Axis, held: int, old: Shape, old_dims: Dims, new: Shape, new_dims: Dims
) -> dict[int, Axis]:
    """Move the one token axis of a group: find the new dimension of which T is a factor."""
    before = axis.outer
    for dim in old_dims[: old_dims.index(held)]:
        before *= int(old[dim])
    prefix = 1
    for dim in new_dims:
        if has_tokens(new[dim]):
            factor, outer = tokens_multiple(new[dim]), before // prefix
            if factor is not None and before % prefix == 0 and factor % outer == 0:
                return {dim: Axis(outer, factor // outer)}
            break
        prefix *= int(new[dim])
    return {dim: PERM for dim in new_dims if new[dim] != 1}


@rule("transpose", "t", "permute", "movedim", "numpy_T", "mT", "adjoint")
def permute(facts: Facts) -> Value:
    source = facts.tensor(0, "self")
    value = facts.value(source)
    order = _order(facts, len(facts.shape(source)))
    return Value(
        tuple(sorted((order.index(dim), axis) for dim, axis in value.axes)), value.mixed, value.why
    )


def _order(facts: Facts, ndim: int) -> list[int]:
    """order[new dimension] = old dimension."""
    order = list(range(ndim))
    if facts.name == "permute":
        return _listed(facts, facts.argument(1, "dims"))
    if facts.name == "movedim":
        old, new = (
            _listed(facts, facts.argument(i, n)) for i, n in ((1, "source"), (2, "destination"))
        )
        rest = iter([d for d in order if d not in old])
        return [old[new.index(d)] if d in new else next(rest) for d in order]
    if facts.name == "numpy_T":
        return order[::-1]
    if facts.name in ("t", "mT", "adjoint"):
        first, second = (ndim - 2, ndim - 1) if ndim > 1 else (0, 0)
    else:
        first, second = facts.dim(facts.argument(1, "dim0")), facts.dim(facts.argument(2, "dim1"))
    if ndim:
        order[first], order[second] = order[second], order[first]
    return order


def _listed(facts: Facts, dims: object) -> list[int]:
    return [facts.dim(dim) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]


@rule(
    "unsqueeze",
    "squeeze",
    "view_as_complex",
    "view_as_real",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
)
def resize(facts: Facts) -> Value:
    """Dimensions of size 1 come or go; a complex number is a last dimension of two."""
    source = facts.tensor(0, "self")
    value, old, new = facts.value(source), facts.shape(source), facts.out_shape
    if facts.name == "view_as_complex":
        old = old[:-1]
    elif facts.name == "view_as_real":
        new = new[:-1]
    return make(reshape_axes(dict(value.axes), old, new), value.mixed, value.why)


@rule("expand", "expand_as", "broadcast_to", sizes=True)
def expand(facts: Facts) -> Value:
    """New or stretched dimensions are uniform: no axis."""
    source = facts.tensor(0, "self")
    value = facts.value(source)
    shift = len(facts.out_shape) - len(facts.shape(source))
    return Value(tuple((dim + shift, axis) for dim, axis in value.axes), value.mixed, value.why)


@rule("repeat", "tile", sizes=True)
def repeat(facts: Facts) -> Value:
    """The whole dimension again and again: the copies join `outer`."""
    source = facts.tensor(0, "self")
    value, new = facts.value(source), facts.out_shape
    old = (1,) * (len(new) - len(facts.shape(source))) + facts.shape(source)
    known = {dim + len(new) - len(facts.shape(source)): axis for dim, axis in value.axes}
    axes = {}
    for dim, (before, after) in enumerate(zip(old, new, strict=True)):
        axis = _repeated(known.get(dim), before, after)
        if axis is not None:
            axes[dim] = axis
    return make(axes, value.mixed, value.why or "repeats rows an unknown number of times")


def _repeated(axis: Axis | None, before: Size, after: Size) -> Axis | None:
    """The axis of a dimension of `before` elements that was repeated to `after`."""
    if before == after or (
        axis is None and (not has_tokens(after) or has_tokens(before) or before == 1)
    ):
        return axis
    multiple = tokens_multiple(after)
    if axis is None:  # a row of several elements, once or more often a token
        assert isinstance(before, int)
        return Axis(multiple // before, before) if multiple and multiple % before == 0 else ODD
    size = axis.outer * axis.inner
    if axis.kind != "ok" or multiple is None or multiple % size:
        return PERM
    return Axis(axis.outer * (multiple // size), axis.inner)


@rule("repeat_interleave")
def repeat_interleave(facts: Facts) -> Result:
    """Each element a fixed number of times: the copies join `inner`."""
    source, repeats, dim = (
        facts.node.args[0],
        facts.argument(1, "repeats"),
        facts.argument(2, "dim"),
    )
    if not isinstance(repeats, int) or dim is None:
        return facts.unknown("repeats rows an unknown number of times")
    value, at = facts.value(source), facts.dim(dim)
    axes = {
        d: Axis(axis.outer, axis.inner * repeats) if d == at and axis.kind == "ok" else axis
        for d, axis in value.axes
    }
    return make(axes, value.mixed, value.why)
