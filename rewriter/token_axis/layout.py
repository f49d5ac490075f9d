"""Views: the same elements under other coordinates. Decided by integers, since T is a single symbol.

In row-major order, reshaping keeps the product of the sizes before a dimension. Where the old and the new shape have a
common prefix product, the dimensions up to there form a group; within a group with one token axis the factors of
`outer * T * inner` are redistributed, and the rows stay in order exactly if T is one factor of some new dimension.
"""

from __future__ import annotations

import sympy
from torch import fx

from ..graph import Size
from .analysis import Facts, rule
from .value import ODD, PERM, Axis, Value, has_tokens, make, tokens_multiple

Dims = list[int]


@rule("view", "_unsafe_view", "reshape", "flatten", "unflatten", "_reshape_alias", "view_as")
def view(facts: Facts) -> Value:
    (source, *_) = facts.operands
    value = facts.value(source)
    if value.is_fixed:
        return value
    axes = reshape_axes(dict(value.axes), facts.shape(source), facts.out_shape)
    return make(axes, value.mixed, value.why or "rows are reordered by a view")


def reshape_axes(
    axes: dict[int, Axis], old: tuple[Size, ...], new: tuple[Size, ...]
) -> dict[int, Axis]:
    """Where the token axes of a tensor of shape `old` are after a row-major view as `new`."""
    result: dict[int, Axis] = {}
    for old_dims, new_dims in groups(old, new):
        held = [dim for dim in old_dims if dim in axes]
        if not held:
            continue
        if len(old_dims) == len(new_dims) == 1 or _same(old, old_dims, new, new_dims):
            result.update(_paired(axes, old, old_dims, new, new_dims))
        elif len(held) == 1 and axes[held[0]].kind == "ok" and _one_factor(old, old_dims):
            result.update(_redistribute(axes[held[0]], held[0], old, old_dims, new, new_dims))
        else:
            kinds = {axes[dim].kind for dim in held}
            loose = PERM if len(held) > 1 or "perm" in kinds else ODD
            result.update({dim: loose for dim in new_dims if new[dim] != 1})
    return result


def groups(old: tuple[Size, ...], new: tuple[Size, ...]) -> list[tuple[Dims, Dims]]:
    """Split both shapes into the shortest runs of dimensions with equal products."""
    found: list[tuple[Dims, Dims]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [], []
        product_left: Size = 1
        product_right: Size = 1
        if i < len(old):
            left.append(i)
            product_left, i = old[i], i + 1
        if j < len(new):
            right.append(j)
            product_right, j = new[j], j + 1
        while not _equal(product_left, product_right):
            if i < len(old) and (_smaller(product_left, product_right) or j >= len(new)):
                left.append(i)
                product_left, i = product_left * old[i], i + 1
            elif j < len(new):
                right.append(j)
                product_right, j = product_right * new[j], j + 1
            else:
                break
        found.append((left, right))
    return found


def _equal(left: Size, right: Size) -> bool:
    return bool(sympy.expand(left - right) == 0)


def _smaller(left: Size, right: Size) -> bool:
    """Compare at a large T: all factors but T are small numbers."""
    at = {symbol: 1_000_003 for size in (left, right) if has_tokens(size) for symbol in size.free_symbols}
    value = [sympy.sympify(size).subs(at) for size in (left, right)]
    return bool(value[0] < value[1])


def _same(old: tuple[Size, ...], old_dims: Dims, new: tuple[Size, ...], new_dims: Dims) -> bool:
    """Only dimensions of size 1 come or go."""
    return [old[d] for d in old_dims if old[d] != 1] == [new[d] for d in new_dims if new[d] != 1]


def _paired(
    axes: dict[int, Axis], old: tuple[Size, ...], old_dims: Dims, new: tuple[Size, ...], new_dims: Dims
) -> dict[int, Axis]:
    old_real = [d for d in old_dims if old[d] != 1] or old_dims[:1]
    new_real = [d for d in new_dims if new[d] != 1] or new_dims[:1]
    return {n: axes[o] for o, n in zip(old_real, new_real, strict=True) if o in axes}


def _one_factor(old: tuple[Size, ...], dims: Dims) -> bool:
    """Exactly one dimension of the group contains T."""
    return sum(has_tokens(old[dim]) for dim in dims) == 1


def _redistribute(
    axis: Axis, held: int, old: tuple[Size, ...], old_dims: Dims, new: tuple[Size, ...], new_dims: Dims
) -> dict[int, Axis]:
    """Move the one token axis of a group: find the new dimension of which T is a factor."""
    before: int = axis.outer
    for dim in old_dims:
        if dim < held:
            size = old[dim]
            assert not has_tokens(size)
            before *= int(size)
    prefix = 1
    for dim in new_dims:
        size = new[dim]
        if not has_tokens(size):
            prefix *= int(size)
            continue
        factor = tokens_multiple(size)
        if factor is None:
            break
        if before % prefix == 0 and factor % (before // prefix) == 0:
            outer = before // prefix
            return {dim: Axis(outer, factor // outer)}
        break
    return {dim: PERM for dim in new_dims if new[dim] != 1}


@rule("transpose", "t", "permute", "movedim", "swapaxes", "numpy_T", "mT", "adjoint")
def permute(facts: Facts) -> Value:
    source = facts.operands[0]
    value = facts.value(source)
    order = _order(facts, len(facts.shape(source)))
    return Value(
        tuple(sorted((order.index(dim), axis) for dim, axis in value.axes)), value.mixed, value.why
    )


def _order(facts: Facts, ndim: int) -> list[int]:
    """order[new dimension] = old dimension."""
    order = list(range(ndim))
    name = facts.node.target._opname  # type: ignore[union-attr]
    if name == "permute":
        dims = facts.argument(1, "dims")
        assert isinstance(dims, (list, tuple))
        return [facts.dim(dim) for dim in dims]
    if name == "movedim":
        source, target = facts.argument(1, "source"), facts.argument(2, "destination")
        old = [facts.dim(d) for d in ([source] if isinstance(source, int) else source)]  # type: ignore[union-attr]
        new = [facts.dim(d) for d in ([target] if isinstance(target, int) else target)]  # type: ignore[union-attr]
        rest = iter([d for d in order if d not in old])
        return [old[new.index(d)] if d in new else next(rest) for d in order]
    if name in ("t", "numpy_T", "mT", "adjoint"):
        if ndim >= 2:
            order[-2:] = order[:-3:-1]
        return order
    first = facts.dim(facts.argument(1, "dim0"))
    second = facts.dim(facts.argument(2, "dim1"))
    order[first], order[second] = order[second], order[first]
    return order


@rule("unsqueeze", "squeeze", "view_as_complex", "view_as_real", "atleast_1d", "atleast_2d", "atleast_3d")
def resize(facts: Facts) -> Value:
    """Dimensions of size 1 come or go; a complex number is a last dimension of two."""
    source = facts.operands[0]
    value, old, new = facts.value(source), facts.shape(source), facts.out_shape
    name = facts.node.target._opname  # type: ignore[union-attr]
    if name == "view_as_complex":
        old = old[:-1]
    elif name == "view_as_real":
        new = new[:-1]
    elif name == "unsqueeze":
        dim = facts.argument(1, "dim")
        assert isinstance(dim, int)
        at = dim + len(new) if dim < 0 else dim
        return Value(tuple((d + (d >= at), a) for d, a in value.axes), value.mixed, value.why)
    axes = reshape_axes(dict(value.axes), old, new)
    return make(axes, value.mixed, value.why)


@rule("expand", "expand_as", "broadcast_to")
def expand(facts: Facts) -> Value:
    """New or stretched dimensions are uniform: no axis."""
    source = facts.operands[0]
    value = facts.value(source)
    shift = len(facts.out_shape) - len(facts.shape(source))
    return Value(tuple((dim + shift, axis) for dim, axis in value.axes), value.mixed, value.why)


@rule("repeat", "tile")
def repeat(facts: Facts) -> Value:
    """Whole copies: index = copy * (outer * T * inner) + old index, so the copies join `outer`."""
    source = facts.operands[0]
    value, old, new = facts.value(source), facts.shape(source), facts.out_shape
    shift = len(new) - len(old)
    axes = {}
    for dim, axis in value.axes:
        before, after = tokens_multiple(old[dim]), tokens_multiple(new[dim + shift])
        if axis.kind == "ok" and before and after and after % before == 0:
            axes[dim + shift] = Axis(axis.outer * (after // before), axis.inner)
        else:
            axes[dim + shift] = PERM
    return make(axes, value.mixed, value.why or "repeats rows an unknown number of times")


@rule("repeat_interleave")
def repeat_interleave(facts: Facts) -> Value:
    """Each element a fixed number of times: the copies join `inner`."""
    source = facts.operands[0]
    value = facts.value(source)
    repeats, dim = facts.argument(1, "repeats"), facts.argument(2, "dim")
    if not isinstance(repeats, int) or dim is None:
        axes = {d: PERM for d, size in enumerate(facts.out_shape) if has_tokens(size)}
        return make(axes, True, "repeats rows an unknown number of times")
    at = facts.dim(dim)
    axes = dict(value.axes)
    if at in axes:
        axis = axes[at]
        axes[at] = Axis(axis.outer, axis.inner * repeats) if axis.kind == "ok" else axis
    return make(axes, value.mixed, value.why)


def first_operand(facts: Facts) -> fx.Node:
    """The tensor that a view-like operation reads."""
    source = facts.argument(0, "self")
    assert isinstance(source, fx.Node)
    return source
