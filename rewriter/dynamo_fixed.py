"""Where Dynamo's trace fixed a size of input_ids, or counted blocks of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy

from .capture import about_layout
from .opaque import Untraceable
from .sizes import guard_interval


def what_fixes(sizes: Sequence[Any], path_of_guard: Callable[[int], str]) -> Untraceable | None:
    """The first guard on one of these sizes, [batch, tokens], that no interval around the traced number satisfies."""
    batch, tokens = (getattr(size, "node", None) for size in sizes)
    for node, other in ((tokens, batch), (batch, None)):
        if node is None or not isinstance(node._expr, sympy.Symbol):
            continue
        guards = node.shape_env.guards
        one = {} if other is None else dict.fromkeys(_names(other._expr, guards), sympy.S.One)
        alike = dict.fromkeys(_names(node._expr, guards), node._expr)
        for index, guard in enumerate(guards):
            expr = guard.expr.xreplace({**one, **alike})
            if expr.free_symbols != {node._expr} or about_layout(guard):
                continue
            if guard_interval(expr, node._expr, int(node.hint)) is None:
                problem = f"it holds only where {expr} ({node._expr} is a size of input_ids)"
                return Untraceable(path_of_guard(index), problem, str(guard.sloc))
    return None


def _names(symbol: sympy.Symbol, guards: list[Any]) -> set[sympy.Symbol]:
    """All symbols that the guards say are equal to this one."""
    found, size = {symbol}, 0
    while size != len(found):
        size = len(found)
        for guard in guards:
            pair = guard.expr.args if isinstance(guard.expr, sympy.Eq) else ()
            if all(isinstance(one, sympy.Symbol) for one in pair) and found & set(pair):
                found |= set(pair)
    return found
