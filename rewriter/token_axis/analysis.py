"""Runs the rules over a graph. An operation without a rule is unknown, and unknown is never row-local."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx

from ..graph import TOKENS, Size, shape_of
from .value import FIXED, PERM, ROWS, Axis, Value, has_tokens, make

Result = Value | tuple[Value, ...]
Rule = Callable[["Facts"], Result]

RULES: dict[str, Rule] = {}
"""ATen operator name (without overload) -> rule. Filled by the rule files."""

OPERATOR_RULES: dict[str, Rule] = {}
"""Qualified name of any other operator -> rule, e.g. "regraft::paged_attention"."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for ATen operators of these names."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, f"two rules for aten.{name}"
            RULES[name] = function
        return function

    return register


@dataclass(frozen=True)
class Facts:
    """What a rule may look at: the node, its operands' values and shapes."""

    node: fx.Node
    values: dict[fx.Node, Result]

    def argument(self, position: int, name: str, default: object = None) -> object:
        """An argument given by position or keyword."""
        if position < len(self.node.args):
            return self.node.args[position]
        return self.node.kwargs.get(name, default)

    def value(self, operand: object) -> Value:
        """The value of an operand; a Python number is fixed, a size in T is a value that all rows share."""
        if not isinstance(operand, fx.Node):
            return FIXED
        value = self.values[operand]
        assert isinstance(value, Value), f"{operand} has several outputs"
        return value

    def shape(self, operand: object) -> tuple[Size, ...]:
        if isinstance(operand, fx.Node) and operand.meta.get("shape") is not None:
            return shape_of(operand)
        return ()

    @property
    def out_shape(self) -> tuple[Size, ...]:
        return shape_of(self.node)

    @property
    def operands(self) -> list[fx.Node]:
        """Tensor operands and sizes in T that are used as values, lists included."""
        return self.node.all_input_nodes

    def node_dtype_is_bool(self, operand: fx.Node) -> bool:
        return operand.meta.get("dtype") in (torch.bool, torch.uint8)

    def dim(self, dim: object, operand: object = None) -> int:
        """A dimension argument as a non-negative index into `operand` (default: the result)."""
        assert isinstance(dim, int), f"dimension {dim} is not a number"
        ndim = len(self.shape(operand)) if operand is not None else len(self.out_shape)
        return dim + ndim if dim < 0 else dim


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
    unknown: dict[str, fx.Node] = field(default_factory=dict)

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
    from . import contract, create, elementwise, layout, operators, reduce, select  # noqa: F401 (they register rules)

    analysis = Analysis(graph)
    for node in graph.nodes:
        result = _evaluate(node, analysis)
        analysis.values[node] = _cut(node, result, analysis)
        _trace_history(node, analysis)
    return analysis


def _evaluate(node: fx.Node, analysis: Analysis) -> Result:
    if node.op == "placeholder":
        shape = node.meta.get("shape") or ()
        return ROWS if node.target in ("input_ids", "position_ids") and len(shape) == 2 else FIXED
    if node.op in ("get_attr", "output"):
        return FIXED
    facts = Facts(node, analysis.values)
    found = _rule_for(node)
    if found is None:
        return _unknown(facts, analysis)
    return found(facts)


def _rule_for(node: fx.Node) -> Rule | None:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace == "aten":
            return RULES.get(target._opname)
        if target.namespace != "regraft":
            return None
        own = OPERATOR_RULES.get(target._schema.name)
        if own is not None:
            return own
        opaque = target._opname.startswith("leaf_") or target._opname == "module_leaf"
        return OPERATOR_RULES["opaque_leaf" if opaque else "grafted"]
    if isinstance(target, str):
        # the one kind of submodule in a graph is a replayed region, which takes the sequence boundaries
        return OPERATOR_RULES["grafted"] if node.op == "call_module" else None
    name = getattr(target, "token_axis_rule", None) or f"{target.__module__}.{target.__name__}"
    return OPERATOR_RULES.get(name)


def _unknown(facts: Facts, analysis: Analysis) -> Result:
    """No rule: whatever has a T in its size or comes from tokens may be in any order and depend on anything."""
    node = facts.node
    inputs = [analysis.values[operand] for operand in facts.operands]
    flat = [part for value in inputs for part in (value if isinstance(value, tuple) else (value,))]
    fixed = all(part.is_fixed for part in flat)
    values = node.meta.get("val")
    outputs = list(values) if isinstance(values, (list, tuple)) else None
    why = f"no rule for {node.target}"
    if outputs is not None:
        analysis.unknown.setdefault(str(node.target), node)
        return tuple(Value((), True, why) for _ in outputs)
    shape = facts.shape(node)
    axes = {dim: PERM for dim, size in enumerate(shape) if has_tokens(size)}
    if fixed and not axes:
        return FIXED
    analysis.unknown.setdefault(str(node.target), node)
    return make(axes, True, why)


def _cut(node: fx.Node, result: Result, analysis: Analysis) -> Result:
    if isinstance(result, tuple):
        return result
    if result.mixed and result.has_row_shape:
        analysis.uncut[node] = result
        return Value(result.axes)
    return result


def _trace_history(node: fx.Node, analysis: Analysis) -> None:
    """Which values come from positions alone, and which still carry mixing that must not be stored as a row.

    What depends on positions only is cheap to recompute inside a region; indices and flags may be clamped to the
    length of the row, so they are recomputed there too. Floats that were cut are rows to be stored.
    """
    operands = node.all_input_nodes
    if node.op == "placeholder":
        if node.target == "position_ids":
            analysis.positional.add(node)
        return
    if node.op in ("get_attr", "output"):
        return
    tokens = [n for n in operands if not _is_fixed(n, analysis)]
    if all(operand in analysis.positional for operand in tokens):
        analysis.positional.add(node)
    dtype = node.meta.get("dtype")
    is_float = dtype is not None and (dtype.is_floating_point or dtype.is_complex)
    if node in analysis.positional or not is_float:
        mixes = node in analysis.uncut or analysis.is_wide(node)
        if mixes or any(operand in analysis.history for operand in operands):
            analysis.history.add(node)


def _is_fixed(node: fx.Node, analysis: Analysis) -> bool:
    value = analysis.values[node]
    return isinstance(value, Value) and value.is_fixed and node not in analysis.uncut


__all__ = ["OPERATOR_RULES", "RULES", "TOKENS", "Analysis", "Axis", "Facts", "Result", "analyse", "rule"]
