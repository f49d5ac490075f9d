"""Formulas in a token's position, written into the graph: one number per row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from regraft.rewriter.graph import TOKENS
from regraft.rewriter.integers import Expr, Index, Quotient
from regraft.rewriter.pattern import Grafting

aten = torch.ops.aten

_FUNCTIONS: dict[type, Any] = {
    sympy.log: aten.log.default,
    sympy.exp: aten.exp.default,
    sympy.tanh: aten.tanh.default,
    sympy.Abs: aten.abs.default,
}
_FOLDS: dict[type, tuple[Any, Any]] = {
    sympy.Add: (aten.add.Tensor, aten.add.Scalar),
    sympy.Mul: (aten.mul.Tensor, aten.mul.Scalar),
    sympy.Max: (aten.maximum.default, aten.clamp_min.default),
    sympy.Min: (aten.minimum.default, aten.clamp_max.default),
}


def is_expressible(formula: Expr, position: Index) -> bool:
    """Whether `row_values` can write this formula."""
    if formula.is_number or formula == position:
        return True
    known = isinstance(formula, (*_FUNCTIONS, *_FOLDS, Quotient))
    power = formula.is_Pow and formula.exp.is_number
    return (known or power) and all(is_expressible(arg, position) for arg in formula.args)


def row_values(formula: Expr, position: Index, grafting: Grafting) -> fx.Node | float:
    """The formula's value for each token, float32 [T], or the number it is.

    `position` is the index of the token in its own request.
    """
    rows: fx.Node | None = None

    def call(target: Callable[..., Any], *args: Any) -> fx.Node:
        return grafting.call(target, *args, shape=(TOKENS,), dtype=torch.float32)

    def positions() -> fx.Node:
        nonlocal rows
        if rows is None:
            ids = grafting.inputs["position_ids"]
            rows = grafting.call(aten.select.int, ids, 0, 0, shape=(TOKENS,), dtype=torch.int64)
            rows = call(aten.mul.Scalar, rows, 1.0)
        return rows

    def write(e: Expr) -> fx.Node | float:
        if e.is_number:
            return float(e)
        if e == position:
            return positions()
        if isinstance(e, Quotient):
            return call(
                aten.floor.default, call(aten.div.Scalar, write(e.args[0]), float(e.args[1]))
            )
        if e.is_Pow:
            return call(aten.pow.Tensor_Scalar, write(e.base), float(e.exp))
        if type(e) in _FUNCTIONS:
            return call(_FUNCTIONS[type(e)], write(e.args[0]))
        of_rows, of_number = _FOLDS[e.func]
        first, *rest = sorted((write(arg) for arg in e.args), key=lambda v: isinstance(v, float))
        for value in rest:
            first = call(of_number if isinstance(value, float) else of_rows, first, value)
        return first

    return write(formula)
