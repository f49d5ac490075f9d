"""Operations that pick, place or join parts of tensors."""

from __future__ import annotations

from torch import fx

from .analysis import Facts, Result, rule
from .elementwise import combine
from .layout import first_operand
from .value import ODD, PERM, Axis, Value, fitted, has_tokens, join, make, tokens_multiple


def cut_axis(value: Value, dim: int, size: object, why: str) -> Value:
    """`value` after a cut, pad or join that leaves `size` elements along its token dimension `dim`.

    Exactly T elements in their old order count as rows again, but mixed: which row is where is no longer known.
    """
    axes = dict(value.axes)
    loose = axes[dim].kind == "perm" or axes[dim].outer * axes[dim].inner != 1
    if not has_tokens(size):
        del axes[dim]
    elif tokens_multiple(size) == 1 and not loose:  # type: ignore[arg-type]
        axes[dim] = Axis()
    else:
        axes[dim] = PERM if loose else ODD
    return make(axes, True, value.why or why)


@rule("select")
def select(facts: Facts) -> Value:
    source = first_operand(facts)
    dim = facts.dim(facts.argument(1, "dim"), source)
    value = facts.value(source)
    axes = {d - (d > dim): axis for d, axis in value.axes if d != dim}
    picked = any(d == dim for d, _ in value.axes)
    return make(axes, value.mixed or picked, value.why or "picks one token")


@rule("slice", "narrow", "narrow_copy", "slice_copy")
def slice_(facts: Facts) -> Value:
    source = first_operand(facts)
    dim = facts.dim(facts.argument(1, "dim", 0), source)
    value, before, after = facts.value(source), facts.shape(source)[dim], facts.out_shape[dim]
    if dim in dict(value.axes):
        step = facts.argument(4, "step", 1)
        if before == after and step == 1 and dict(value.axes)[dim].kind == "ok":
            return value
        return cut_axis(value, dim, after, "slice along tokens")
    if has_tokens(after) and not has_tokens(before):
        axes = {**dict(value.axes), dim: fitted(Axis(), after)}
        return make(axes, True, value.why or "slice of a constant by the number of tokens")
    return value


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk", "split_with_sizes_copy")
def split(facts: Facts) -> Result:
    source = first_operand(facts)
    dim = facts.dim(facts.argument(2, "dim", 0), source)
    value = facts.value(source)
    count = len(facts.node.meta["val"])
    if dim in dict(value.axes):
        return (make({**dict(value.axes), dim: PERM}, True, value.why or "split along tokens"),) * count
    return (value,) * count


@rule("unbind")
def unbind(facts: Facts) -> Result:
    source = first_operand(facts)
    dim = facts.dim(facts.argument(1, "dim", 0), source)
    value = facts.value(source)
    axes = {d - (d > dim): axis for d, axis in value.axes if d != dim}
    picked = any(d == dim for d, _ in value.axes)
    result = make(axes, value.mixed or picked, value.why or "picks single tokens")
    return (result,) * len(facts.node.meta["val"])


@rule("cat", "concatenate", "concat")
def cat(facts: Facts) -> Value:
    tensors = facts.node.args[0]
    assert isinstance(tensors, (list, tuple))
    dim = facts.dim(facts.argument(1, "dim", 0))
    parts = [t for t in tensors if isinstance(t, fx.Node) and 0 not in facts.shape(t)]
    along = any(has_tokens(facts.shape(part)[dim]) for part in parts)
    axes: dict[int, Axis] = {}
    mixed, why = False, ""
    for part in parts:
        value = facts.value(part)
        mixed, why = mixed or value.mixed, why or value.why
        for d, axis in value.axes:
            joined = join(axes.get(d), axis)
            assert joined is not None
            axes[d] = joined
    result = make(axes, mixed, why)
    if along and len(parts) > 1 and (dim in axes or has_tokens(facts.out_shape[dim])):
        axes.setdefault(dim, Axis())
        return cut_axis(make(axes, mixed, why), dim, facts.out_shape[dim], "cat along tokens")
    return result


@rule("stack")
def stack(facts: Facts) -> Value:
    dim = facts.dim(facts.argument(1, "dim", 0))
    axes: dict[int, Axis] = {}
    mixed, why = False, ""
    for part in facts.operands:
        value = facts.value(part)
        mixed, why = mixed or value.mixed, why or value.why
        for d, axis in value.axes:
            at = d + (d >= dim)
            joined = join(axes.get(at), axis)
            assert joined is not None
            axes[at] = joined
    return make(axes, mixed, why)


@rule("pad", "constant_pad_nd")
def pad(facts: Facts) -> Value:
    source = first_operand(facts)
    amounts = facts.argument(1, "pad")
    assert isinstance(amounts, (list, tuple))
    value, shape = facts.value(source), facts.shape(source)
    for i in range(len(amounts) // 2):
        dim = len(shape) - 1 - i
        if dim in dict(value.axes) and (amounts[2 * i] != 0 or amounts[2 * i + 1] != 0):
            value = cut_axis(value, dim, facts.out_shape[dim], "pads tokens")
    return value


@rule("embedding", "index_select", "take")
def embedding(facts: Facts) -> Value:
    """Rows of a table by index. A table that depends on tokens is looked up across tokens."""
    name = facts.node.target._opname  # type: ignore[union-attr]
    table = first_operand(facts)
    index = facts.argument({"embedding": 1, "index_select": 2, "take": 1}[name], "indices")
    if not isinstance(index, fx.Node):
        index = facts.node.kwargs.get("index")
    assert isinstance(index, fx.Node)
    dim = facts.dim(facts.argument(1, "dim"), table) if name == "index_select" else 0
    values, picks = facts.value(table), facts.value(index)
    axes = {}
    for d, axis in picks.axes:
        axes[d + dim] = axis
    grown = len(facts.shape(index)) - 1
    picked = name == "take" and not values.is_fixed
    for d, axis in values.axes:
        if d == dim:
            picked = True
            continue
        axes[d + grown if d > dim else d] = axis
    sized = has_tokens(facts.shape(table)[dim]) if facts.shape(table) else False
    mixed = values.mixed or picks.mixed or picked or sized
    return make(axes, mixed, values.why or picks.why or "indexes along tokens")


@rule("index", "_unsafe_index")
def index(facts: Facts) -> Value:
    """x[i, None, j, ...]: indexed dimensions go, the index tensors' joint shape comes in."""
    source = first_operand(facts)
    indices = facts.argument(1, "indices")
    assert isinstance(indices, (list, tuple))
    used = [d for d, i in enumerate(indices) if isinstance(i, fx.Node)]
    tensors = [indices[d] for d in used]
    if any(facts.node_dtype_is_bool(t) for t in tensors) or not used:
        axes = {d: PERM for d, size in enumerate(facts.out_shape) if has_tokens(size)}
        return make(axes, True, "selects tokens by a mask")
    joint = max(len(facts.shape(t)) for t in tensors)
    together = used == list(range(used[0], used[0] + len(used)))
    start = used[0] if together else 0
    value, shape = facts.value(source), facts.shape(source)
    axes, mixed, why = _joint_axes(facts, tensors, joint, start)
    place = 0
    for dim in range(len(shape)):
        if dim in used:
            if dim in dict(value.axes) or has_tokens(shape[dim]):
                mixed, why = True, why or "index along tokens"
            continue
        at = place + joint if (not together or place >= start) else place
        if dim in dict(value.axes):
            axes[at] = fitted(dict(value.axes)[dim], facts.out_shape[at])
        place += 1
    return make(axes, mixed or value.mixed, value.why or why)


def _joint_axes(
    facts: Facts, tensors: list[fx.Node], joint: int, start: int
) -> tuple[dict[int, Axis], bool, str]:
    axes: dict[int, Axis] = {}
    mixed, why = False, ""
    for tensor in tensors:
        value = facts.value(tensor)
        mixed, why = mixed or value.mixed, why or value.why
        shift = start + joint - len(facts.shape(tensor))
        for d, axis in value.axes:
            joined = join(axes.get(d + shift), axis)
            assert joined is not None
            axes[d + shift] = joined
    return axes, mixed, why


@rule("gather", "take_along_dim")
def gather(facts: Facts) -> Value:
    source = first_operand(facts)
    names = ("indices", 1, 2) if facts.node.target._opname == "take_along_dim" else ("index", 2, 1)  # type: ignore[union-attr]
    index_node = facts.argument(names[1], names[0])
    assert isinstance(index_node, fx.Node)
    dim = facts.dim(facts.argument(names[2], "dim"), source)
    value, picks = facts.value(source), facts.value(index_node)
    axes = dict(picks.axes)
    for d, axis in value.axes:
        if d == dim:
            continue
        joined = join(axes.get(d), axis)
        assert joined is not None
        axes[d] = fitted(joined, facts.out_shape[d])
    along = has_tokens(facts.shape(source)[dim])
    return make(axes, value.mixed or picks.mixed or along, value.why or picks.why or "gather along tokens")


@rule("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill", "slice_scatter", "select_scatter")
def scatter(facts: Facts) -> Value:
    """Places values into a copy of the first operand along `dim`."""
    source = first_operand(facts)
    name = facts.node.target._opname  # type: ignore[union-attr]
    position = 2 if name in ("slice_scatter", "select_scatter") else 1
    dim = facts.dim(facts.argument(position, "dim", 0), source)
    size = facts.out_shape[dim]
    axes: dict[int, Axis] = {}
    mixed, why = False, ""
    for operand in facts.operands:
        if operand.meta.get("shape") is None:
            continue
        value = facts.value(operand)
        mixed, why = mixed or value.mixed, why or value.why
        if name.startswith("index_") and operand is not source and len(facts.shape(operand)) == 1:
            if not value.is_fixed:
                mixed, why = True, why or f"{name} by token"
            continue
        for d, axis in value.axes:
            at = d + (d >= dim) if name == "select_scatter" and operand is not source else d
            joined = join(axes.get(at), axis)
            assert joined is not None
            axes[at] = joined
    if has_tokens(size):
        axes[dim] = fitted(Axis(), size)
        return make(axes, True, why or "scatter along tokens")
    axes.pop(dim, None)
    return make({d: fitted(a, facts.out_shape[d]) for d, a in axes.items()}, mixed, why)


@rule("index_put", "_unsafe_index_put", "masked_scatter", "nonzero", "masked_select", "_local_scalar_dense", "item")
def unordered(facts: Facts) -> Value:
    """Where the values go depends on other values: nothing is known unless all is fixed."""
    fixed = all(facts.value(operand).is_fixed for operand in facts.operands)
    shape = facts.shape(facts.node)
    axes = {d: PERM for d, size in enumerate(shape) if has_tokens(size)}
    if fixed and not axes:
        return Value()
    return make(axes, True, f"{facts.node.target} places values by value")


@rule("unfold", "im2col", "as_strided")
def unfold(facts: Facts) -> Value:
    value = facts.value(first_operand(facts))
    if value.is_fixed and not any(has_tokens(size) for size in facts.out_shape):
        return value
    axes = {d: PERM for d, size in enumerate(facts.out_shape) if has_tokens(size)}
    return make(axes, True, "windows over tokens")


