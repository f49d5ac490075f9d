"""What the inputs of a Dynamo graph are: token ids, positions, a padding mask, weights, sizes, and the rest."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch._dynamo.symbolic_convert import InstructionTranslator

from .pattern import Declined

TOKEN_NAMES = ("input_ids", "attention_mask", "position_ids")
"""Names of transformers' arguments; an input of another name is never taken for one of these."""

_LAST_KEY = re.compile(r"\['(\w+)'\]$")
_POSITION = re.compile(r"\['args'\]\[(\d+)\]$")
_OF_A_MODULE = re.compile(r"\._(parameters|buffers|modules)\[")


@dataclass(frozen=True)
class Inputs:
    """The placeholders of a graph `[B, T]` by what they are.

    batch, tokens   the sizes of input_ids: a symbol, or an int where Dynamo fixed it
    floats          Python floats that Dynamo passes in: they are guarded to what they are now
    others          tensors of no known meaning; what depends on them is computed on the batch as it is
    """

    input_ids: fx.Node
    batch: int | sympy.Symbol
    tokens: int | sympy.Symbol
    attention_mask: fx.Node | None = None
    position_ids: fx.Node | None = None
    weights: tuple[fx.Node, ...] = ()
    sizes: tuple[fx.Node, ...] = ()
    floats: tuple[fx.Node, ...] = ()
    others: tuple[fx.Node, ...] = ()

    @property
    def rows(self) -> tuple[fx.Node, ...]:
        """The inputs with one entry per token."""
        return tuple(
            n for n in (self.input_ids, self.attention_mask, self.position_ids) if n is not None
        )


def source_name(node: fx.Node) -> str:
    """Where Dynamo got an input from: "L['kwargs']['input_ids']"."""
    source = getattr(node, "_dynamo_source", None) or node.meta["grapharg"].source
    name = source.name
    return str(name() if callable(name) else name)


def example_of(node: fx.Node) -> Any:
    """Dynamo's fake value of a node; None for one that has none."""
    return node.meta.get("example_value")


def read_inputs(module: fx.GraphModule, examples: Sequence[Any]) -> Inputs | Declined:
    """Sort the placeholders of `module`; declined if this is no forward pass over token ids `[B, T]`."""
    found = _Sorted()
    arguments = _positional_names()
    for node, example in zip(module.graph.find_nodes(op="placeholder"), examples, strict=True):
        found.add(node, example, arguments)
    ids = found.tokens.get("input_ids")
    if ids is None:
        return Declined("no input is called input_ids")
    shape = example_of(ids).shape
    if len(shape) != 2:
        return Declined(f"input_ids has {len(shape)} dimensions, not [B, T]", ids)
    for name, node in found.tokens.items():
        problem = _misshapen(name, example_of(node), shape)
        if problem:
            return Declined(problem, node)
    batch, tokens = (plain(size) for size in shape)
    return Inputs(
        ids,
        batch,
        tokens,
        found.tokens.get("attention_mask"),
        found.tokens.get("position_ids"),
        tuple(found.weights),
        tuple(found.sizes),
        tuple(found.floats),
        tuple(found.others),
    )


_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")


def mark_dynamic(tensor: torch.Tensor) -> Callable[[], None]:
    """Tell Dynamo that the sizes of a tensor may change, until what is returned is called. The caller's own marks stay,
    and are then the only ones.
    """
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    if any(hasattr(tensor, mark) for mark in _MARKS) or not dims:
        return lambda: None
    torch._dynamo.maybe_mark_dynamic(tensor, dims)

    def unmark() -> None:
        for mark in _MARKS:
            if hasattr(tensor, mark):
                delattr(tensor, mark)

    return unmark


def plain(size: int | torch.SymInt) -> Any:
    """A size as an int, where it is known to be one number, or as a sympy expression."""
    if isinstance(size, int):
        return size
    expr = size.node.expr
    return int(expr) if expr.is_number else expr


def _misshapen(name: str, example: torch.Tensor, expected: Sequence[Any]) -> str:
    """What is wrong with an input that should have one entry per token. Comparing symbolic sizes makes Dynamo guard
    that they are equal.
    """
    shape = example.shape
    if len(shape) == 2 and shape[1] == expected[1]:
        if shape[0] == expected[0] or (name == "position_ids" and shape[0] == 1):
            return f"{name} holds {example.dtype}" if example.dtype.is_floating_point else ""
    return f"{name} has shape {[*shape]}, expected {[*expected]}"


@dataclass
class _Sorted:
    tokens: dict[str, fx.Node] = field(default_factory=dict)
    weights: list[fx.Node] = field(default_factory=list)
    sizes: list[fx.Node] = field(default_factory=list)
    floats: list[fx.Node] = field(default_factory=list)
    others: list[fx.Node] = field(default_factory=list)

    def add(self, node: fx.Node, example: Any, arguments: Sequence[str]) -> None:
        fake = example_of(node)
        source = source_name(node)
        if isinstance(fake, (torch.SymInt, int)):
            self.sizes.append(node)
        elif not isinstance(fake, torch.Tensor):
            self.others.append(node)
        elif not node.meta["grapharg"].is_tensor:  # a Python float, as a tensor
            self.floats.append(node)
        elif isinstance(example, nn.Parameter) or _OF_A_MODULE.search(source):
            self.weights.append(node)
        else:
            name = _argument_name(source, arguments)
            known = name in TOKEN_NAMES and name not in self.tokens
            if known:
                self.tokens[name] = node
            else:
                self.others.append(node)


def _argument_name(source: str, arguments: Sequence[str]) -> str:
    """The name under which a call passes an input."""
    if (named := _LAST_KEY.search(source)) is not None:
        return named[1]
    if (placed := _POSITION.search(source)) is not None and int(placed[1]) < len(arguments):
        return arguments[int(placed[1])]
    return ""


def _positional_names() -> tuple[str, ...]:
    """Parameter names of the traced method, to which positional arguments belong; none for a plain function."""
    owner = traced_module()
    if owner is None:
        return ()
    return tuple(inspect.signature(type(owner).forward).parameters)[1:]


def traced_module() -> nn.Module | None:
    """The module whose method Dynamo is tracing; None for a plain function."""
    owner = InstructionTranslator.current_tx().output.root_tx.f_locals.get("self")
    return owner if isinstance(owner, nn.Module) else None
