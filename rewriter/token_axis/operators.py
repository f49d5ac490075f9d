"""Rules for what is not ATen: tuple access, arithmetic on sizes, opaque leaves, and Regraft's own operators.

Regraft's operators are the only ones that may mix: they take the sequence boundaries. The others here are either
harmless or a place where a region closes.
"""

from __future__ import annotations

from torch import fx

from regraft.rewriter.graph import Size

from .analysis import OPERATOR_RULES, Facts, Result
from .value import FIXED, Axis, Value, has_tokens, make, tokens_multiple


def getitem(facts: Facts) -> Result:
    source, position = facts.node.args
    assert isinstance(source, fx.Node)
    value = facts.values[source]
    if not isinstance(value, tuple):
        return facts.unknown("picks a part of a tensor")
    assert isinstance(position, int)
    return value[position]


def size_arithmetic(facts: Facts) -> Result:
    """A size made of sizes. One that was read from a tensor carries that tensor's mixing along."""
    if facts.tensors:
        return facts.unknown("Python arithmetic on tensors")
    mixed = [value for o in facts.operands if not (value := facts.value(o)).is_fixed]
    return mixed[0] if mixed else FIXED


def opaque_leaf(facts: Facts) -> Result:
    """A function or module that capture kept whole. It mixes; its first dimension of T elements are its rows."""
    free = facts.unknown("")
    parts = free if isinstance(free, tuple) else (free,)
    results = [
        part if part.is_fixed else _rows_of(shape)
        for part, shape in zip(parts, facts.out_shapes, strict=True)
    ]
    return tuple(results) if facts.has_many else results[0]


def _rows_of(shape: tuple[Size, ...]) -> Value:
    axes = {}
    for dim, size in enumerate(shape):
        if has_tokens(size):
            axes[dim] = Axis() if tokens_multiple(size) == 1 else Axis(kind="perm")
    return make(axes, True, "opaque leaf")


def grafted(facts: Facts) -> Result:
    """Rows in, rows out, by the sequence boundaries the operator was given. What it reads must be row-local.

    An operator has one row per token along the same dimension of what it reads and returns. A replayed region may have
    its rows in any layout, and says where they are in its result.
    """
    place = facts.node.meta.get("token_axis") or _rows_along(facts.out_shape)
    if place is None:
        return facts.unknown("a grafted operator without rows")
    for operand in facts.tensors:
        value = facts.value(operand)
        if not (value.is_fixed or value.is_row_local):
            return facts.unknown(
                value.why or "a grafted operator reads what is not one row per token"
            )
        if facts.node.op != "call_module" and value.is_row_local and value.axes != (place,):
            return facts.unknown("a grafted operator reads rows in another layout")
    return Value((place,))


def _rows_along(shape: tuple[Size, ...]) -> tuple[int, Axis] | None:
    """The first dimension of T elements."""
    return next(
        ((dim, Axis()) for dim, size in enumerate(shape) if tokens_multiple(size) == 1), None
    )


def expert_linear(facts: Facts) -> Value:
    """Row s of the result reads row s of the rows and of the expert ids, several rows a token or one."""
    x, weight, ids = (facts.tensor(i, n) for i, n in enumerate(("x", "weight", "expert_ids")))
    value, picks = facts.value(x), facts.value(ids)
    aligned = set(dict(value.axes)) <= {0} and value.axes == picks.axes
    if not aligned or not facts.value(weight).is_fixed or len(facts.tensors) > 3:
        return make({0: Axis(kind="perm")}, True, "rows and expert ids are not aligned")
    return make(dict(value.axes), value.mixed or picks.mixed, value.why or picks.why)


OPERATOR_RULES["_operator.getitem"] = getitem
OPERATOR_RULES["size arithmetic"] = size_arithmetic
OPERATOR_RULES["regraft::expert_linear"] = expert_linear
OPERATOR_RULES["regraft::stop_gradient"] = lambda facts: facts.value(facts.tensor(0, "x"))
OPERATOR_RULES["regraft::own_gradient"] = lambda facts: facts.value(facts.tensor(0, "result"))
OPERATOR_RULES["grafted"] = grafted
OPERATOR_RULES["leaf"] = opaque_leaf
