"""For how many tokens a Dynamo graph holds, once its batch has become one row."""

from __future__ import annotations

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .capture import about_layout
from .dynamo_inputs import Inputs, example_of
from .pattern import Declined
from .sizes import Interval, guard_interval


def dynamo_interval(inputs: Inputs) -> Interval | Declined:
    """Where the guards of Dynamo's own trace hold for a batch of one.

    Dynamo took each branch that the model's code has on a size once and for all, and guards on it.
    """
    tokens = example_of(inputs.input_ids).shape[1]
    assert isinstance(tokens, torch.SymInt) and isinstance(inputs.tokens, sympy.Symbol)
    one = {inputs.batch: sympy.Integer(1)} if isinstance(inputs.batch, sympy.Symbol) else {}
    return interval_of(tokens.node.shape_env, inputs.tokens, tokens.node.hint, one)


def interval_of(
    shape_env: ShapeEnv,
    symbol: sympy.Symbol,
    example: int,
    given: dict[sympy.Symbol, sympy.Integer] | None = None,
) -> Interval | Declined:
    """The interval around `example` in which every guard on `symbol` alone holds, other symbols being as `given`."""
    where = Interval(2)  # a trace takes sizes 0 and 1 apart from all others
    for guard in shape_env.guards:
        expr = shape_env.replace(guard.expr).xreplace(given or {})
        if expr.free_symbols != {symbol} or about_layout(guard):
            continue
        interval = guard_interval(expr, symbol, example)
        if interval is None:
            return Declined(
                f"the graph holds only where {expr} ({symbol} tokens): {_first_line(guard.sloc)}"
            )
        where = where.meet(interval)
    return where


def _first_line(text: object) -> str:
    return str(text).strip().partition("\n")[0]
