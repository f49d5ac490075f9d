"""Runs the rules over a graph. An operation without a rule is unknown, and unknown is never row-local."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from regraft.rewriter.graph import Size, shape_of

from .value import FIXED, PERM, ROWS, Axis, Value, has_tokens, join, make

Result = Value | tuple[Value, ...]
Rule = Callable[["Facts"], Result]

RULES: dict[str, Rule] = {}
"""ATen operator name (without overload) -> rule. Filled by the rule files."""

OPERATOR_RULES: dict[str, Rule] = {}
"""Qualified name of any other operator -> rule, e.g. "regraft::paged_attention"."""

SIZED: set[str] = set()
"""ATen operators whose rule knows what a size in T means as an argument: `reshape` does, `mul` does not."""

TOKEN_INPUTS = ("input_ids", "position_ids")
A_VALUE = "the number of tokens is used as a value"
RETURNED = "rows_returned"
"""Key of a node's meta: no rule says so, but its rows are one per token again (see rewriter/returned_rows.py)."""
ROW_WISE = "row_wise"
"""Key of a node's meta: no rule says so, but it keeps rows apart (see rewriter/row_wise.py). Per number of a result
that is read, the dimension of its rows; or a text that says why it does not."""


def rule(*names: str, sizes: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for ATen operators of these names. `sizes`: see SIZED."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, f"two rules for aten.{name}"
            RULES[name] = function
        if sizes:
            SIZED.update(names)
        return function

    return register


class Unforeseen(Exception):
    """A form of an operator's arguments that its rule does not know."""


@dataclass(frozen=True)
class Facts:
    """What a rule may look at: the node, its operands' values and shapes."""

    node: fx.Node
    values: dict[fx.Node, Result]

    @property
    def name(self) -> str:
        """The operator's name without namespace and overload."""
        return str(getattr(self.node.target, "_opname", self.node.target))

    @property
    def schema(self) -> Any:
        """The ATen operator's schema."""
        target: Any = self.node.target
        return target._schema

    def argument(self, position: int, name: str, default: object = None) -> object:
        """An argument given by position or keyword."""
        if position < len(self.node.args):
            return self.node.args[position]
        return self.node.kwargs.get(name, default)

    def tensor(self, position: int, name: str) -> fx.Node:
        """An argument that must be a tensor."""
        found = self.argument(position, name)
        if not isinstance(found, fx.Node):
            raise Unforeseen(f"{name} of {self.node.target} is no tensor")
        return found

    def value(self, operand: object) -> Value:
        """The value of an operand; a Python number is fixed, and so is a size in T as long as it is only a size."""
        if not isinstance(operand, fx.Node):
            return FIXED
        value = self.values[operand]
        if not isinstance(value, Value):
            raise Unforeseen(f"{operand} has several outputs")
        return value

    def shape(self, operand: object) -> tuple[Size, ...]:
        if isinstance(operand, fx.Node) and operand.meta.get("shape") is not None:
            return shape_of(operand)
        return ()

    @property
    def out_shape(self) -> tuple[Size, ...]:
        return shape_of(self.node)

    @property
    def has_many(self) -> bool:
        """The node returns a tuple of tensors."""
        return isinstance(self.node.meta.get("val"), (list, tuple))

    @property
    def out_shapes(self) -> list[tuple[Size, ...]]:
        """Shape of each result; () for one that is no tensor, or that nobody reads."""
        if not self.has_many:
            return [self.node.meta.get("shape") or ()]
        read = {
            user.args[1]: user.meta.get("shape")
            for user in self.node.users
            if user.target is operator.getitem
        }
        return [read.get(i) or () for i in range(len(self.node.meta["val"]))]

    @property
    def operands(self) -> list[fx.Node]:
        """Tensor operands and sizes in T, lists included."""
        return self.node.all_input_nodes

    @property
    def tensors(self) -> list[fx.Node]:
        """Operands that are one tensor."""
        return [operand for operand in self.operands if operand.meta.get("shape") is not None]

    def dim(self, dim: object, operand: object = None) -> int:
        """A dimension argument as a non-negative index into `operand` (default: the result)."""
        if not isinstance(dim, int):
            raise Unforeseen(f"dimension {dim} is not a number")
        ndim = len(self.shape(operand)) if operand is not None else len(self.out_shape)
        return dim + ndim if dim < 0 else dim

    def unknown(self, why: str) -> Result:
        """Any element may depend on any token, in any order; unless nothing that is read has to do with tokens."""
        tensors = self.tensors
        why = next((value.why for operand in tensors if (value := self.value(operand)).mixed), why)
        constant = len(tensors) == len(self.operands) and all(
            self.value(operand).is_fixed and not any(map(has_tokens, self.shape(operand)))
            for operand in tensors
        )
        results = [self._unknown(shape, constant, why) for shape in self.out_shapes]
        return tuple(results) if self.has_many else results[0]

    def _unknown(self, shape: tuple[Size, ...], constant: bool, why: str) -> Value:
        axes = {dim: PERM for dim, size in enumerate(shape) if has_tokens(size)}
        return FIXED if constant and not axes else make(axes, True, why)


@dataclass
class Analysis:
    """The result: a value per node, and the cuts made where mixed rows are taken as rows again.

    `values` are what users of a node see: at a cut, rows. `uncut` holds what the rule said at those nodes.
    """

    graph: fx.Graph
    values: dict[fx.Node, Result] = field(default_factory=dict)
    uncut: dict[fx.Node, Value] = field(default_factory=dict)
    positional: set[fx.Node] = field(default_factory=set)
    history: set[fx.Node] = field(default_factory=set)
    unruled: list[fx.Node] = field(default_factory=list)
    """Calls without a rule."""

    @property
    def unknown(self) -> dict[str, fx.Node]:
        """The first call of each operator without a rule."""
        return {str(node.target): node for node in reversed(self.unruled)}

    def value(self, node: fx.Node) -> Value:
        value = self.values[node]
        return value if isinstance(value, Value) else FIXED

    def is_cut(self, node: fx.Node) -> bool:
        """True where mixed rows leave a region."""
        return node in self.uncut

    def is_wide(self, node: fx.Node) -> bool:
        """True if the node holds neither rows nor a constant: scores, masks, statistics, a tuple of such."""
        value = self.values[node]
        parts = value if isinstance(value, tuple) else (value,)
        return any(not (part.is_fixed or part.is_row_local) for part in parts)


def analyse(graph: fx.Graph) -> Analysis:
    """Values of all nodes. Rows that were mixed are cut: their users see rows, and `uncut` keeps why they were not.

    A graph is proven when nothing that its output needs is cut, wide or unknown (see regions.verdict).
    """
    from . import contract, create, elementwise, layout, operators, place, reduce, select, within  # noqa: F401 (their rules)

    analysis = Analysis(graph)
    for node in graph.nodes:
        result = _evaluate(node, analysis)
        analysis.values[node] = _cut(node, result, analysis)
        _trace_history(node, analysis)
    return analysis


def _evaluate(node: fx.Node, analysis: Analysis) -> Result:
    if node.op == "placeholder":
        shape = node.meta.get("shape") or ()
        return ROWS if node.target in TOKEN_INPUTS and len(shape) == 2 else FIXED
    if node.op in ("get_attr", "output"):
        return FIXED
    facts = Facts(node, analysis.values)
    found = _rule_for(node, facts)
    if found is None:
        analysis.unruled.append(node)
        measured = node.meta.get(ROW_WISE, "")
        return facts.unknown(f"no rule for {node.target}{measured and ', and '}{measured}")
    try:
        result = found(facts)
    except Unforeseen as reason:
        result = facts.unknown(str(reason))
    stray = "" if is_grafted(node) else _stray_operand(node, facts)
    if not stray:
        return result
    return (
        result.mix(stray)
        if isinstance(result, Value)
        else tuple(part.mix(stray) for part in result)
    )


def _row_wise(facts: Facts) -> Result:
    """A call that was seen to keep rows apart: one dimension of all that it reads and returns has the tokens."""
    tokens: Axis | None = None
    mixed, why = False, ""
    for operand in facts.tensors:
        value = facts.value(operand)
        mixed, why = mixed or value.mixed, why or value.why
        for _, axis in value.axes:
            tokens = join(tokens, axis)
    dims: dict[int, int] = facts.node.meta[ROW_WISE]
    results = tuple(
        make({dims[number]: tokens} if number in dims and tokens else {}, mixed, why)
        for number in range(len(facts.out_shapes))
    )
    return results if facts.has_many else results[0]


def is_grafted(node: fx.Node) -> bool:
    """One of Regraft's own operators, or a replayed region: what is told where each sequence begins."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace == "regraft" and not is_leaf(node)
    return node.op == "call_module"


def is_leaf(node: fx.Node) -> bool:
    """A function or a module that capture kept whole."""
    name = getattr(node.target, "_opname", "")
    return name.startswith("leaf_") or name == "module_leaf"


def _stray_operand(node: fx.Node, facts: Facts) -> str:
    """What a plain operation reads that is neither rows nor constant: caches, metadata, T as a number."""
    for operand in facts.operands:
        if operand.op == "placeholder" and operand.target not in TOKEN_INPUTS:
            return f"reads {operand.target} outside of an operator"
        if holds_size(operand, facts.values) and isinstance(node.target, torch._ops.OpOverload):
            if facts.name not in SIZED and not is_leaf(node):
                return A_VALUE
    return ""


def holds_size(node: fx.Node, values: dict[fx.Node, Result]) -> bool:
    """The node is a Python number (a size, or what was computed from one), not a tensor or a tuple of tensors."""
    return (
        node.meta.get("shape") is None
        and node.op == "call_function"
        and not isinstance(values[node], tuple)
    )


def _rule_for(node: fx.Node, facts: Facts) -> Rule | None:
    target = node.target
    if isinstance(node.meta.get(ROW_WISE), dict):
        return _row_wise
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace == "aten":
            return RULES.get(target._opname)
        if target.namespace != "regraft":
            return None
        return (
            OPERATOR_RULES.get(target._schema.name)
            or OPERATOR_RULES["leaf" if is_leaf(node) else "grafted"]
        )
    if node.op == "call_module":  # the one kind of submodule in a graph is a replayed region
        return OPERATOR_RULES["grafted"]
    if isinstance(target, str):
        return None
    named = OPERATOR_RULES.get(f"{target.__module__}.{target.__name__}")
    if named is None and node.meta.get("shape") is None and not facts.tensors:
        return OPERATOR_RULES["size arithmetic"]
    return named


def _cut(node: fx.Node, result: Result, analysis: Analysis) -> Result:
    """Mixed rows in order, and nothing else that grows with the row: from here on they are rows again."""
    if isinstance(result, tuple) or not result.mixed:
        return result
    shape = node.meta.get("shape") or ()
    if node.meta.get(RETURNED):
        result = replace(
            result, axes=tuple((d, Axis()) for d, n in enumerate(shape) if has_tokens(n))
        )
    if not result.has_row_shape:
        return result
    if any(has_tokens(size) for dim, size in enumerate(shape) if dim != result.token_dim):
        return result
    analysis.uncut[node] = result
    return Value(result.axes)


def _trace_history(node: fx.Node, analysis: Analysis) -> None:
    """Which values come from positions alone, and which still carry mixing that must not be stored as a row.

    What depends on positions only is cheap to recompute inside a region; indices and flags may be clamped to the
    length of the row, so they are recomputed there too. Floats that were cut are rows to be stored.
    """
    if node.op == "placeholder" and node.target == "position_ids":
        analysis.positional.add(node)
    if node.op in ("placeholder", "get_attr", "output") or is_grafted(node):
        return
    operands = node.all_input_nodes
    tokens = [operand for operand in operands if not _is_fixed(operand, analysis)]
    if all(operand in analysis.positional for operand in tokens):
        analysis.positional.add(node)
    if node in analysis.positional or not is_float(node):
        mixes = node in analysis.uncut or analysis.is_wide(node)
        if mixes or any(operand in analysis.history for operand in operands):
            analysis.history.add(node)


def is_float(node: fx.Node) -> bool:
    """Holds floating-point numbers. False for a tuple, whose parts are looked at one by one."""
    dtype = node.meta.get("dtype")
    return dtype is not None and bool(dtype.is_floating_point or dtype.is_complex)


def _is_fixed(node: fx.Node, analysis: Analysis) -> bool:
    value = analysis.values[node]
    return isinstance(value, Value) and value.is_fixed and node not in analysis.uncut
