"""Operations that place values into a copy of a tensor, and those whose result's order depends on values."""

from __future__ import annotations

from .analysis import Facts, Result, rule
from .select import differ
from .value import Axis, Value, fitted, has_tokens, make, same_place, together, tokens_multiple


def _placed(facts: Facts, joined: Value, dim: int, *, mixed: bool, why: str) -> Value:
    """Along `dim` each place may hold any of what was placed; along the others elements stay at their place."""
    axes = {d: fitted(axis, facts.out_shape[d]) for d, axis in joined.axes if d != dim}
    if has_tokens(facts.out_shape[dim]):
        axes[dim] = fitted(Axis(), facts.out_shape[dim])
    return make(axes, joined.mixed or mixed, joined.why or why)


@rule("scatter", "scatter_add", "scatter_reduce")
def scatter(facts: Facts) -> Result:
    """out[.., index[e], ..] = source[e] along `dim`."""
    target, index = facts.tensor(0, "self"), facts.tensor(2, "index")
    parts = [part for part in facts.tensors if len(facts.shape(part)) == len(facts.out_shape)]
    if index not in parts or any(facts.shape(part) for part in facts.tensors if part not in parts):
        return facts.unknown("scatter of one element")
    dim = facts.dim(facts.argument(1, "dim"), target)
    joined = together((facts.value(part), same_place) for part in parts)
    sizes = list(zip(*map(facts.shape, parts), strict=True))
    along = any(map(has_tokens, sizes[dim]))
    cut = any(differ(of_dim) for d, of_dim in enumerate(sizes) if d != dim)
    number = any(not facts.value(part).is_fixed for part in facts.tensors if part not in parts)
    return _placed(facts, joined, dim, mixed=along or cut or number, why="scatter along tokens")


@rule("index_add", "index_copy", "index_fill")
def scatter_slices(facts: Facts) -> Result:
    """out[.., index[i], ..] = source[.., i, ..] along `dim`, the index one list for all other dimensions."""
    target, index = facts.tensor(0, "self"), facts.tensor(2, "index")
    source = facts.argument(3, "source")
    if not facts.value(index).is_fixed or any(map(has_tokens, facts.shape(index))):
        return facts.unknown(f"{facts.name} by token")
    dim = facts.dim(facts.argument(1, "dim"), target)
    parts = [part for part in (target, source) if len(facts.shape(part)) == len(facts.out_shape)]
    joined = together((facts.value(part), same_place) for part in parts)
    if len(parts) == 1 and not facts.value(source).is_fixed:
        return facts.unknown(f"{facts.name} of a number that depends on tokens")
    along = any(has_tokens(facts.shape(part)[dim]) for part in parts)
    return _placed(facts, joined, dim, mixed=along, why=f"{facts.name} along tokens")


@rule("slice_scatter", "select_scatter")
def scatter_part(facts: Facts) -> Value:
    """A slice of the first operand is replaced by the second."""
    target, source = facts.tensor(0, "self"), facts.tensor(1, "src")
    dim = facts.dim(facts.argument(2, "dim", 0), target)
    shift = facts.name == "select_scatter"
    parts = [
        (facts.value(target), same_place),
        (facts.value(source), lambda d: d + (shift and d >= dim)),
    ]
    along = has_tokens(facts.shape(target)[dim])
    return _placed(facts, together(parts), dim, mixed=along, why=f"{facts.name} along tokens")


@rule(
    "index_put",
    "_unsafe_index_put",
    "masked_scatter",
    "nonzero",
    "masked_select",
    "_local_scalar_dense",
    "item",
)
def by_value(facts: Facts) -> Result:
    """Where the values go depends on other values."""
    return facts.unknown(f"{facts.name} places values by value")


@rule("unfold")
def windows(facts: Facts) -> Result:
    """One window per token is a row per token, mixed; of a padded row too (a region may close here)."""
    source = facts.tensor(0, "self")
    dim = facts.dim(facts.argument(1, "dimension"), source)
    if not has_tokens(facts.shape(source)[dim]):
        return facts.unknown("windows beside tokens")
    axes = {d: axis for d, axis in facts.value(source).axes if d != dim}
    one_each = tokens_multiple(facts.out_shape[dim]) == 1
    axes[dim] = Axis() if one_each else Axis(kind="odd")
    return make(axes, True, "windows over tokens")


@rule("im2col", "as_strided")
def regathered(facts: Facts) -> Result:
    return facts.unknown("windows over tokens")
