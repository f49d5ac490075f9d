"""A module leaf looked into after all: its forward over rows so short that its loop over blocks runs once.

What the trace says holds up to that length only. Whoever makes more of it has to show that it holds beyond.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from .capture import quiet
from .errors import first_line
from .export import export
from .graph import TOKENS, CapturedGraph, shape_of
from .leaves import LeafUnsupported
from .lift import lift
from .module_leaf import ModuleCall, Slot, owned_tensors
from .normal_form import normalize
from .sizes import FAR, Interval, holds
from .token_axis.value import has_tokens
from .untouched import untouched

ROWS, MODULE = "rows.", "module."
"""Prefixes of weight names in a traced leaf: tables of rows that stand for arguments, and the module's own."""


@dataclass(frozen=True)
class LeafTrace:
    """One result of a module leaf as a graph `input_ids [1, T], others -> result`.

    Argument number i of shape [1, T, C] is `embedding(tables[i], input_ids)`, so that the analysis sees rows; any
    other argument is a placeholder in `others`.
    """

    captured: CapturedGraph
    tables: Mapping[int, str]
    others: Mapping[int, str]

    def weight_name(self, attribute: str, path: str) -> str:
        """The full name, in the model, of a weight of the module at `path`."""
        name = self.captured.weight_names[attribute].removeprefix(MODULE)
        return f"{path}.{name}" if path else name


def trace_leaf(call: ModuleCall, given: tuple[fx.Node, ...], result: int, tokens: int) -> LeafTrace:
    """Trace the module, called with `given`, over `tokens` tokens, T symbolic around that. `result` counts tensors.

    Raises LeafUnsupported if the call is of a kind, or the module does something, that no graph can stand for.
    """
    if call.writes or Slot.SIZE in call.arguments:
        raise LeafUnsupported(
            f"{call.path} takes a size or keeps something of its own between calls"
        )
    alone = _Alone(call, given, result, tokens)
    program = _export(alone, tokens)
    symbol, where = _length(program, tokens)
    captured = lift(program, alone, "", symbol, where)
    normalize(captured.module)
    own = {MODULE + name for name in _tensor_names(call.module)}
    read = {str(node.target) for node in captured.graph.nodes if node.op == "get_attr"}
    for attribute in read:
        name = captured.weight_names[attribute]
        if name not in own and not name.startswith(ROWS):
            raise LeafUnsupported(f"{call.path} reads {name}, which it does not hold itself")
    if captured.module.meta["writes"]:
        raise LeafUnsupported(f"{call.path} writes into {captured.module.meta['writes']}")
    attributes = {full: attribute for attribute, full in captured.weight_names.items()}
    tables = {int(i): attributes[f"{ROWS}{i}.weight"] for i in alone.rows}
    others = {i: f"others_{at}" for at, i in enumerate(alone.others)}
    return LeafTrace(captured, tables, others)


class _Alone(nn.Module):
    """The traced call. A size is T or a number; the module's own forward may ask for nothing else."""

    def __init__(
        self, call: ModuleCall, given: tuple[fx.Node, ...], result: int, tokens: int
    ) -> None:
        super().__init__()
        self.module = call.module
        self.call = call
        self.result = result
        self.training = False
        self.rows = nn.ModuleDict()
        self.others: dict[int, torch.Tensor] = {}
        self.device = next(
            (t.device for _, _, t in owned_tensors(call.module)), torch.device("cpu")
        )
        for i, node in enumerate(given):
            shape, dtype = shape_of(node), node.meta["dtype"]
            if any(has_tokens(size) and size != TOKENS for size in shape):
                raise LeafUnsupported(f"{call.path} is called with a tensor of shape {[*shape]}")
            if len(shape) == 3 and shape[:2] == (1, TOKENS) and dtype.is_floating_point:
                self.rows[str(i)] = nn.Embedding(
                    tokens, int(shape[2]), device=self.device, dtype=dtype
                )
            else:
                sizes = [tokens if size == TOKENS else int(size) for size in shape]
                self.others[i] = torch.zeros(sizes, device=self.device, dtype=dtype)

    def forward(self, input_ids: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        feed: dict[int, torch.Tensor] = dict(zip(self.others, others, strict=True))
        for tensor in others:
            sizes: tuple[Any, ...] = tuple(tensor.shape)
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    torch._check(size == input_ids.shape[1])
        feed |= {int(i): table(input_ids) for i, table in self.rows.items()}
        tensors = iter([feed[i] for i in sorted(feed)])
        flat = [next(tensors) if a is Slot.TENSOR else a for a in self.call.arguments]
        args, kwargs = pytree.tree_unflatten(flat, self.call.argument_spec)
        output = self.call.forward(*args, **kwargs)
        found = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        return found[self.result]

    def example(self, tokens: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        ids = torch.zeros(1, tokens, dtype=torch.long, device=self.device)
        return ids, list(self.others.values())


def _export(alone: _Alone, tokens: int) -> ExportedProgram:
    module, call = alone.module, alone.call
    ids, others = alone.example(tokens)
    grows = [{d: Dim.AUTO for d, size in enumerate(t.shape) if size == tokens} for t in others]
    try:
        with untouched(module), call.settings(module), torch.no_grad():
            with quiet():
                program = export(alone, (ids, others), ({1: Dim.AUTO}, grows))
                return program.run_decompositions({})
    except (RuntimeError, ValueError, IndexError) as error:  # what a length or a branch can cause
        raise LeafUnsupported(
            f"{call.path} cannot be traced over {tokens} tokens: {first_line(error)}"
        ) from error


def _length(program: ExportedProgram, tokens: int) -> tuple[sympy.Symbol, Interval]:
    """Export's symbol for the number of tokens, and in which interval the trace is right."""
    ids = next(node for node in program.graph.nodes if node.target == "input_ids")
    length = ids.meta["val"].shape[1]
    if not isinstance(length, torch.SymInt):
        raise LeafUnsupported(f"the trace is of {tokens} tokens and no other number")
    return length.node.expr, _around(tokens, length.node.expr, length.node.shape_env)


def _around(tokens: int, symbol: sympy.Symbol, env: ShapeEnv) -> Interval:
    """Lengths from `tokens` up at which every guard on T holds; of lower ones nothing is asked."""
    guards = [guard.expr for guard in env.guards if guard.expr.free_symbols == {symbol}]

    def all_hold(length: int) -> bool:
        return all(holds(guard, symbol, length) for guard in guards)

    high = tokens
    while high < FAR and all_hold(2 * high):
        high *= 2
    if high >= FAR:
        return Interval(2)
    beyond = 2 * high
    while beyond - high > 1:
        middle = (high + beyond) // 2
        high, beyond = (middle, beyond) if all_hold(middle) else (high, middle)
    return Interval(2, high)


def _tensor_names(module: nn.Module) -> set[str]:
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return {name for name, _ in (*parameters, *buffers)}
