"""Operators without a rule that are said to keep rows apart, as the products of quantised weights do.

A library's operator says nothing of what it does, and may be all that a linear map consists of. That row i of its
result depends on row i alone is taken on the word of who wraps the model, by name, and is measured all the same, on the
weights and the rows that it is given in the model: rows are cut off, put in another order, scaled and made NaN, and
those that are left must come out as they were. One that scales all rows by the largest of them, or looks for columns
with outliers in them, does not pass: it mixes tokens, as it does in the model itself. What is not named is measured
too, for the reason: a measurement is no proof, so it stays unknown.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

from .errors import RewriteError, first_line
from .graph import CapturedGraph, Size, describe
from .returned_rows import MeasuredRun, measured_text
from .token_axis.analysis import ROW_WISE, analyse
from .token_axis.value import has_tokens

ROUNDING = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}
"""Largest difference, as a part of the largest magnitude; integers must be equal."""

SCALE = 1000.0


@dataclass(frozen=True)
class Unruled:
    """A call without a rule whose operands and results have one dimension each of one size in tokens.

    `dims` are those of its operands that have one; `results` those of the results that are read, by number.
    """

    node: fx.Node
    dims: dict[fx.Node, int]
    results: dict[int, int]


def mark_row_wise(captured: CapturedGraph, names: Collection[str] = ()) -> dict[str, str]:
    """Mark the operators of these names that keep rows apart; for each operator without a rule what was measured.

    On the meta device nothing is measured and nothing marked, and nothing of a graph that is for short texts alone.
    RewriteError for a name of no operator without a rule.
    """
    nodes = [node for node in analyse(captured.graph).unruled if _has_tokens(node)]
    _check_names(names, {str(node.target) for node in nodes})
    text = measured_text(captured) if nodes else None
    if text is None:
        return {}
    calls = {node: _call_of(node) for node in nodes}
    found = _measure(captured, [c for c in calls.values() if isinstance(c, Unruled)], text)
    said: dict[str, str] = {}
    for node, call in calls.items():
        name = str(node.target)
        reason = call if isinstance(call, str) else found[node]
        if name not in names:
            reason = (
                reason
                or f"as measured it keeps rows apart: if you know that, say row_wise=({name!r},)"
            )
        node.meta[ROW_WISE] = reason if isinstance(call, str) or reason else call.results
        known = said.setdefault(name, "it keeps rows apart")
        if reason and known == "it keeps rows apart":
            said[name] = f"{reason}: {describe(node)}"
    return said


def _check_names(names: Collection[str], there: Collection[str]) -> None:
    for name in names:
        if name not in there:
            raise RewriteError(
                f"row_wise names {name!r}, and the model has no such operator without a rule",
                fix=f"leave it out; those there are: {', '.join(sorted(there)) or 'none'}",
            )


def _has_tokens(node: fx.Node) -> bool:
    return any(_token_dims(operand) for operand in node.all_input_nodes)


def _token_dims(node: fx.Node) -> list[tuple[int, Size]]:
    shape = node.meta.get("shape") or ()
    return [(dim, size) for dim, size in enumerate(shape) if has_tokens(size)]


def _call_of(node: fx.Node) -> Unruled | str:
    """The call, or why its rows cannot be told."""
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return "it writes, or is no operator"
    if any("size" in operand.meta for operand in node.all_input_nodes):
        return "it is given a number of tokens"
    results = _results(node)
    operands = {operand: _token_dims(operand) for operand in node.all_input_nodes}
    given = [dims for dims in operands.values() if dims]
    every = [*given, *(_token_dims(result) for result in results.values())]
    if any(len(dims) != 1 for dims in every) or len({dims[0][1] for dims in every}) != 1:
        return "its operands and results have not one row each for the same tokens"
    return Unruled(
        node,
        {operand: dims[0][0] for operand, dims in operands.items() if dims},
        {number: _token_dims(result)[0][0] for number, result in results.items()},
    )


def _results(node: fx.Node) -> dict[int, fx.Node]:
    """Those that are read, by number."""
    if not isinstance(node.meta.get("val"), (list, tuple)):
        return {0: node}
    return {int(u.args[1]): u for u in node.users if u.target is operator.getitem}


@torch.no_grad()
def _measure(
    captured: CapturedGraph, calls: list[Unruled], text: tuple[torch.Tensor, torch.Tensor]
) -> dict[fx.Node, str]:
    """Per call why it does not keep rows apart; calls of one operator with operands of one kind are measured once."""
    wanted = {call.node: call for call in calls}
    known: dict[object, str] = {}
    found: dict[fx.Node, str] = {}

    class Meter(MeasuredRun):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            call = wanted.get(n)
            if call is not None:
                args, kwargs = self.fetch_args_kwargs_from_env(n)
                kind = _kind(call)
                if kind not in known:
                    known[kind] = _mixes(call, self.env, args, kwargs)
                found[n] = known[kind]
            return value

    Meter(captured.module).run(*text)
    return found


def _kind(call: Unruled) -> object:
    """Equal for calls of one operator with operands of one kind."""
    operands = [(o.meta.get("shape"), o.meta.get("dtype")) for o in call.node.all_input_nodes]
    rest = tree_map_only(fx.Node, lambda _: None, (call.node.args, call.node.kwargs))
    return str((call.node.target, operands, rest, call.results))


def _mixes(call: Unruled, env: dict[fx.Node, Any], args: Any, kwargs: Any) -> str:
    """Why row i of a result depends on other rows than row i; empty if it does not."""
    rows = {id(env[operand]): dim for operand, dim in call.dims.items()}

    def run(change: Change) -> list[torch.Tensor]:
        def given(tensor: torch.Tensor) -> torch.Tensor:
            dim = rows.get(id(tensor))
            return tensor if dim is None else change(tensor, dim)

        changed_args, changed_kwargs = tree_map_only(torch.Tensor, given, (args, kwargs))
        result = call.node.target(*changed_args, **changed_kwargs)
        flat = result if isinstance(result, (list, tuple)) else [result]
        return [flat[number] for number in call.results]

    operand, dim = next(iter(call.dims.items()))
    before = run(_all)
    for what, change, expected, kept in _changes(env[operand].shape[dim] // 2):
        try:
            after = run(change)
        except RuntimeError as failure:
            return f"it fails on {what}: {first_line(failure)}"
        for one, two, at in zip(before, after, call.results.values()):
            error = _apart(expected(one, at), kept(two, at))
            if not error <= ROUNDING.get(one.dtype, 0.0):
                return f"it mixes rows ({what} changes others by {error:.1e})"
    return ""


def _apart(expected: torch.Tensor, got: torch.Tensor) -> float:
    """Largest difference as a part of the largest magnitude; of whole numbers, how many differ."""
    if not expected.is_floating_point():
        return float((expected != got).sum())
    one, two = expected.double(), got.double()
    error = float((one - two).abs().max())
    return error / float(one.abs().max()) if error else 0.0


Change = Callable[[torch.Tensor, int], torch.Tensor]


def _changes(half: int) -> list[tuple[str, Change, Change, Change]]:
    """What is done to rows, how, and which rows of the result before and after that must be the same."""
    parts = [partial(_part, start=at, length=n) for at, n in ((0, 1), (0, 7), (half, 1), (half, 9))]
    first, second = (partial(_part, start=at, length=half) for at in (0, half))
    return [
        *(("cutting rows off", part, part, _all) for part in parts),
        ("another order of rows", _turned, _turned, _all),
        ("scaling rows", partial(_times, start=0, length=half, factor=SCALE), second, second),
        ("scaling rows", partial(_times, start=half, length=half, factor=SCALE), first, first),
        ("making rows NaN", partial(_times, start=0, length=half, factor=math.nan), second, second),
        ("making rows NaN", partial(_times, start=half, length=half, factor=math.nan), first, first),
    ]  # fmt: skip


def _all(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor


def _part(tensor: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    return tensor.narrow(dim, start, length).contiguous()


def _turned(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.flip(dim)


def _times(tensor: torch.Tensor, dim: int, start: int, length: int, factor: float) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    tensor = tensor.clone()
    part = tensor.narrow(dim, start, length)
    # Numbers of a byte have no products of their own.
    part.copy_((part.float() if tensor.dtype.itemsize == 1 else part) * factor)
    return tensor
