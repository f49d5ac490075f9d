"""Rules for what is not ATen: tuple access, arithmetic on sizes, opaque leaves, and Regraft's own operators.

Regraft's operators are the only ones that may mix: they take the sequence boundaries. The others here are either
harmless or a place where a region closes.
"""

from __future__ import annotations

import torch
from torch import fx

from .analysis import OPERATOR_RULES, Facts, Result
from .value import FIXED, ROWS, Axis, Value, has_tokens, make, tokens_multiple

GRAFTED_PREFIX = "regraft::"


def getitem(facts: Facts) -> Value:
    source, position = facts.node.args
    assert isinstance(source, fx.Node)
    value = facts.values[source]
    if isinstance(value, tuple):
        assert isinstance(position, int)
        return value[position]
    return value


def size_arithmetic(facts: Facts) -> Value:
    return FIXED


def opaque_leaf(facts: Facts) -> Result:
    """A function or module that capture kept whole. It mixes; its first dimension of T elements are its rows."""
    values = facts.node.meta["val"]
    many = isinstance(values, (list, tuple))
    shapes = facts.node.meta.get("shapes") or [facts.node.meta.get("shape")]
    results = [_rows_of(shape) for shape in shapes]
    if all(facts.value(o).is_fixed for o in facts.operands) and not any(
        has_tokens(size) for shape in shapes for size in shape or ()
    ):
        results = [FIXED for _ in shapes]
    return tuple(results) if many else results[0]


def _rows_of(shape: object) -> Value:
    assert isinstance(shape, (list, tuple)) or shape is None
    dims = [d for d, size in enumerate(shape or ()) if has_tokens(size)]
    axes = {d: Axis() if tokens_multiple(shape[d]) == 1 else Axis(kind="perm") for d in dims}  # type: ignore[index]
    return make(axes, True, "opaque leaf")


def grafted(facts: Facts) -> Value:
    """Rows in, rows out: [N, ...] by the sequence boundaries the operator was given. Row inputs must be row-local."""
    for operand in facts.operands:
        value = facts.values[operand]
        if isinstance(value, Value) and not (value.is_fixed or value.is_row_local):
            return make(dict(value.axes), True, value.why or "a grafted operator reads mixed rows")
    (dim, *_) = [d for d, size in enumerate(facts.out_shape) if has_tokens(size)]
    return Value(((dim, Axis()),))


def expert_linear(facts: Facts) -> Value:
    """Row s of the result reads row s of the rows and of the expert ids, several rows a token or one."""
    x, weight, ids = facts.operands[:3]
    value, picks = facts.value(x), facts.value(ids)
    if dict(value.axes).get(0) != dict(picks.axes).get(0) or not facts.value(weight).is_fixed:
        return make({0: Axis(kind="perm")}, True, "rows and expert ids are not aligned")
    return make({0: axis for d, axis in value.axes if d == 0}, value.mixed or picks.mixed or len(value.axes) > 1, value.why)


for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow", "neg", "eq", "ne", "lt", "le", "gt", "ge"):
    OPERATOR_RULES[f"_operator.{_name}"] = size_arithmetic
for _name in ("sym_min", "sym_max", "sym_float", "sym_int", "sym_not", "sym_ite", "sym_sum"):
    OPERATOR_RULES[f"torch.{_name}"] = size_arithmetic
OPERATOR_RULES["_operator.getitem"] = getitem
OPERATOR_RULES["regraft::expert_linear"] = expert_linear
OPERATOR_RULES["grafted"] = grafted
OPERATOR_RULES["opaque_leaf"] = opaque_leaf

