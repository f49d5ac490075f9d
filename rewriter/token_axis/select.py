"""Operations that pick parts of tensors or join them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from regraft.rewriter.graph import Size

from .analysis import A_VALUE, Facts, Result, rule
from .value import (
    ODD,
    PERM,
    Axis,
    Value,
    fitted,
    has_tokens,
    make,
    same_place,
    together,
    tokens_multiple,
)


def cut_axis(value: Value, dim: int, size: Size, why: str) -> Value:
    """`value` after a cut, pad or join that leaves `size` elements along its token dimension `dim`.

    Exactly T elements in their old order count as rows again, but mixed: which row is where is no longer known.
    """
    axes = dict(value.axes)
    axis = axes.pop(dim, Axis())
    loose = axis.kind == "perm" or axis.outer * axis.inner != 1
    if has_tokens(size) and tokens_multiple(size) == 1 and not loose:
        axes[dim] = Axis()
    elif has_tokens(size):
        axes[dim] = PERM if loose else ODD
    return make(axes, True, value.why or why)


def _dropped(value: Value, dim: int, why: str) -> Value:
    """One element of dimension `dim`."""
    result = together([(value, lambda d: None if d == dim else d - (d > dim))])
    return result.mix(why) if dim in dict(value.axes) else result


@rule("select")
def select(facts: Facts) -> Value:
    source = facts.tensor(0, "self")
    return _dropped(
        facts.value(source), facts.dim(facts.argument(1, "dim"), source), "picks one token"
    )


@rule("unbind")
def unbind(facts: Facts) -> Result:
    source = facts.tensor(0, "self")
    dim = facts.dim(facts.argument(1, "dim", 0), source)
    return (_dropped(facts.value(source), dim, "picks single tokens"),) * len(facts.out_shapes)


@rule("slice", "narrow", "narrow_copy", "slice_copy", sizes=True)
def slice_(facts: Facts) -> Value:
    source = facts.tensor(0, "self")
    dim = facts.dim(facts.argument(1, "dim", 0), source)
    value, before, after = facts.value(source), facts.shape(source)[dim], facts.out_shape[dim]
    axis = dict(value.axes).get(dim)
    if axis is not None:
        whole = before == after and facts.argument(4, "step", 1) == 1 and axis.kind == "ok"
        return value if whole else cut_axis(value, dim, after, "slice along tokens")
    if has_tokens(before):  # along a uniform dimension
        return value
    if has_tokens(after):
        return cut_axis(value, dim, after, "slice of a constant by the number of tokens")
    return value.mix(A_VALUE) if isinstance(facts.argument(2, "start"), fx.Node) else value


@rule(
    "split",
    "split_with_sizes",
    "chunk",
    "tensor_split",
    "unsafe_split",
    "unsafe_chunk",
    "split_with_sizes_copy",
    sizes=True,
)
def split(facts: Facts) -> Result:
    source = facts.tensor(0, "self")
    dim = facts.dim(facts.argument(2, "dim", 0), source)
    value, size = facts.value(source), facts.shape(source)[dim]
    by_tokens = not has_tokens(size) and len(facts.operands) > 1
    if dim in dict(value.axes) or by_tokens:
        axes = {**dict(value.axes), dim: PERM}
        value = make(axes, True, value.why or (A_VALUE if by_tokens else "split along tokens"))
    return (value,) * len(facts.out_shapes)


@rule("cat")
def cat(facts: Facts) -> Value:
    dim = facts.dim(facts.argument(1, "dim", 0))
    parts = [part for part in facts.tensors if 0 not in facts.shape(part)]
    joined = together((facts.value(part), same_place) for part in parts)
    pieces = facts.node.args[0]
    assert isinstance(pieces, (list, tuple))
    if len(pieces) > 1 and has_tokens(facts.out_shape[dim]):
        return cut_axis(joined, dim, facts.out_shape[dim], "cat along tokens")
    return joined


@rule("stack")
def stack(facts: Facts) -> Value:
    dim = facts.dim(facts.argument(1, "dim", 0))
    return together((facts.value(part), lambda d: d + (d >= dim)) for part in facts.tensors)


@rule("pad", "constant_pad_nd", sizes=True)
def pad(facts: Facts) -> Value:
    source, amounts = facts.tensor(0, "self"), facts.argument(1, "pad")
    assert isinstance(amounts, (list, tuple))
    value, shape = facts.value(source), facts.out_shape
    for i in range(len(amounts) // 2):
        dim, pair = len(shape) - 1 - i, amounts[2 * i : 2 * i + 2]
        if list(pair) == [0, 0]:
            continue
        if has_tokens(shape[dim]):
            value = cut_axis(value, dim, shape[dim], "pads tokens")
        elif any(isinstance(amount, fx.Node) for amount in pair):
            value = value.mix(A_VALUE)
    return value


@rule("embedding", "index_select", "take")
def lookup(facts: Facts) -> Value:
    """Rows of a table by index. A table that depends on tokens is looked up across tokens."""
    table = facts.tensor(0, "self")
    index = facts.tensor(2 if facts.name == "index_select" else 1, "index")
    dim = facts.dim(facts.argument(1, "dim"), table) if facts.name == "index_select" else 0
    sizes, grown = facts.shape(table), len(facts.shape(index)) - 1
    if facts.name == "take":  # from the flattened table
        sized, kept = (
            any(map(has_tokens, sizes)),
            Value((), facts.value(table).mixed, facts.value(table).why),
        )
    else:
        sized, kept = has_tokens(sizes[dim]) if sizes else False, facts.value(table)
    places = [
        (facts.value(index), lambda d: d + dim),
        (kept, lambda d: None if d == dim else d + grown if d > dim else d),
    ]
    result = together(places)
    return result.mix("indexes along tokens") if sized else result


@rule("index", "_unsafe_index")
def index(facts: Facts) -> Result:
    """x[i, None, j, ...]: indexed dimensions go, the index tensors' joint shape comes in."""
    source, indices = facts.tensor(0, "self"), facts.argument(1, "indices")
    assert isinstance(indices, (list, tuple))
    picks = {dim: i for dim, i in enumerate(indices) if isinstance(i, fx.Node)}
    if not picks or any(
        "int" not in str(i.meta["dtype"]) or i.meta["dtype"].itemsize == 1 for i in picks.values()
    ):
        return facts.unknown("selects tokens by a mask")
    value, shape, out = facts.value(source), facts.shape(source), facts.out_shape
    joint = max(len(facts.shape(i)) for i in picks.values())
    used = sorted(picks)
    adjacent = used == list(range(used[0], used[0] + len(used)))
    start = used[0] if adjacent else 0  # where the joint shape comes in

    def remaining(dim: int) -> int | None:
        place = dim - sum(u < dim for u in used)
        return None if dim in picks else place + joint if place >= start else place

    def of_index(tensor: fx.Node) -> tuple[Value, Callable[[int], int | None]]:
        shift = start + joint - len(facts.shape(tensor))
        return facts.value(tensor), lambda dim: dim + shift

    joined = together([(value, remaining), *map(of_index, picks.values())])
    axes = {dim: fitted(axis, out[dim]) for dim, axis in joined.axes}
    along = any(has_tokens(shape[dim]) for dim in used)
    return make(axes, joined.mixed or along, joined.why or "index along tokens")


@rule("gather", "take_along_dim")
def gather(facts: Facts) -> Result:
    """out[.., e, ..] = source[.., index[e], ..] along `dim`; along the others elements stay at their place."""
    source = facts.tensor(0, "self")
    by, at = (1, 2) if facts.name == "take_along_dim" else (2, 1)
    picks = facts.tensor(by, "indices" if by == 1 else "index")
    if facts.argument(at, "dim") is None or len(facts.shape(source)) != len(facts.shape(picks)):
        return facts.unknown("gather from a flattened tensor")
    dim = facts.dim(facts.argument(at, "dim"), source)
    sizes = list(zip(facts.shape(source), facts.shape(picks), strict=True))
    along = has_tokens(sizes[dim][0])
    cut = any(differ(pair) for d, pair in enumerate(sizes) if d != dim and 1 not in pair)
    joined = together(
        [(facts.value(picks), same_place), (facts.value(source), lambda d: None if d == dim else d)]
    )
    axes = {d: fitted(axis, facts.out_shape[d]) for d, axis in joined.axes}
    return make(axes, joined.mixed or along or cut, joined.why or "gather along tokens")


def differ(sizes: Sequence[Size]) -> bool:
    """Sizes of one dimension of which the smaller decides: then an element's own place matters, if T is in any."""
    return len(set(sizes)) > 1 and any(map(has_tokens, sizes))
