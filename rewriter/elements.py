"""The value of one tensor element as a formula: what a mask or a score is, not how it was computed.

`Elements.at(node, coordinates)` reads the graph backwards. Moves of elements are undone (rewriter/indexing.py),
arithmetic, comparisons and selections become sympy (rewriter/element_rules.py), `position_ids` becomes `pos(i)`. What
it cannot or need not follow (a projection, a matrix product, a top-k) stays a `Cell`: that element of that node.
"""

from __future__ import annotations

import operator
import weakref
from typing import Any

import sympy
import torch
from torch import fx

from .element_rules import RULES, OpaqueError, Rule
from .formulas import Cell, Choose, Value, constant, is_condition, number, pos
from .indexing import Coordinates, branches, broadcast, size_value, sizes_of, step_back
from .integers import ZERO, Condition, Expr, compare

_memo: weakref.WeakKeyDictionary[fx.Graph, dict[tuple[str, Coordinates], Value]] = (
    weakref.WeakKeyDictionary()
)


class Elements:
    """Formulas of the elements of one graph.

    All layers share the mask's subgraph, so formulas are remembered for as long as the graph lives. They name nodes by
    name; replacing a node by one of equal value leaves them true.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._known = _memo.setdefault(graph, {})

    def at(self, node: fx.Node, coordinates: Coordinates) -> Value:
        """The element of `node` at `coordinates`: a number, or a condition where the tensor is boolean."""
        key = (node.name, coordinates)
        if key not in self._known:
            self._known[key] = self._read(node, coordinates)
        return self._known[key]

    def _read(self, node: fx.Node, coordinates: Coordinates) -> Value:
        moved = step_back(node, coordinates)
        if moved is not None:
            return self.at(*moved)
        if node.op == "placeholder" and node.target == "position_ids":
            return pos(coordinates[-1])
        if node.op == "get_attr":
            value = _stored_value(node, coordinates)
            return self.cell(node, coordinates) if value is None else value
        rule = _rule(node)
        if rule is None:
            return self._merged(node, coordinates)
        try:
            return rule(self, node, coordinates)
        except OpaqueError:
            return self.cell(node, coordinates)

    def cell(self, node: fx.Node, coordinates: Coordinates) -> Value:
        """The element as an unknown."""
        unknown = Cell(sympy.Symbol(node.name), *coordinates)
        return sympy.Ne(unknown, ZERO) if node.meta["dtype"] == torch.bool else unknown

    def operand(self, argument: Any, coordinates: Coordinates) -> Value:
        """An argument of an elementwise operation: a tensor to broadcast, a size, or a Python scalar."""
        if isinstance(argument, fx.Node):
            if argument.meta.get("shape") is not None:
                return self.at(argument, broadcast(coordinates, sizes_of(argument)))
            size = size_value(argument)
            if size is None:
                raise OpaqueError
            return size
        if not isinstance(argument, (int, float)):
            raise OpaqueError
        return constant(argument)

    def _merged(self, node: fx.Node, coordinates: Coordinates) -> Value:
        """A concatenation whose pieces cannot be told apart by the ranges of the coordinates."""
        parts = [(when, self.at(part, place)) for when, part, place in branches(node, coordinates)]
        if not parts:
            return self.cell(node, coordinates)
        if all(is_condition(value) for _, value in parts):
            return sympy.Or(*(sympy.And(when, value) for when, value in parts))
        merged = number(parts[-1][1])
        for when, value in reversed(parts[:-1]):
            merged = Choose(when, number(value), merged)
        return merged


def _rule(node: fx.Node) -> Rule | None:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    return RULES.get(node.target._opname) if node.target.namespace == "aten" else None


def _stored_value(node: fx.Node, coordinates: Coordinates) -> Value | None:
    """The value of a stored constant of one element, or of a stored band mask (not of a weight, which may change)."""
    module = node.graph.owning_module
    tensor = None if module is None else operator.attrgetter(str(node.target))(module)
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, torch.nn.Parameter):
        return None
    if tensor.device.type == "meta":
        return None
    if tensor.numel() == 1:
        return constant(tensor.item())
    if tensor.dtype == torch.bool and tensor.dim() >= 2 and tensor[..., 0, 0].numel() == 1:
        return _band(tensor.reshape(tensor.shape[-2:]), *coordinates[-2:])
    return None


def _band(mask: torch.Tensor, row: Expr, column: Expr) -> Condition | None:
    """`low <= row - column <= high`, if that is what a square boolean matrix says."""
    size = mask.shape[0]
    if mask.shape[1] != size:
        return None
    low, high = (_last_true(side) for side in (mask[0], mask[:, 0]))
    if low is None or high is None:
        return None
    index = torch.arange(size, device=mask.device)
    distance = index[:, None] - index
    if not torch.equal(mask, (distance <= high) & (distance >= -low)):
        return None
    limits = [compare(row - column, ">=", sympy.Integer(-low))] if low < size - 1 else []
    limits += [compare(row - column, "<=", sympy.Integer(high))] if high < size - 1 else []
    return sympy.And(*limits)


def _last_true(values: torch.Tensor) -> int | None:
    found = values.nonzero()
    return int(found[-1]) if len(found) else None
