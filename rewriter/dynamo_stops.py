"""Where a model stops a gradient: `detach`, or a computation under `torch.no_grad`."""

from __future__ import annotations

import torch
from torch import fx

from .dynamo_inputs import example_of
from .dynamo_writes import is_in_place

LENDING = ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like", "full_like", "new_empty",
           "new_zeros", "new_ones", "new_full", "size", "dim")  # fmt: skip
"""What reads no element of its operands."""


def stops(module: fx.GraphModule) -> frozenset[tuple[fx.Node, fx.Node]]:
    """Pairs (reader, operand) where the reader's result has a gradient and the operand, made of weights, has none.

    Empty for a graph that was traced without gradients.
    """
    of_weights: set[fx.Node] = set()
    found = []
    for node in module.graph.nodes:
        if _name(node) in LENDING:
            continue
        for operand in node.all_input_nodes:
            if needs_gradient(operand) or operand in of_weights:
                of_weights.add(node)
            if operand in of_weights and _is_constant(operand) and needs_gradient(node):
                if not (is_in_place(node) and node.args[0] is operand):
                    found.append((node, operand))
    return frozenset(found)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def needs_gradient(node: fx.Node) -> bool:
    """Whether a gradient flows to the value of a node in Dynamo's trace."""
    value = example_of(node)
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(part, torch.Tensor) and part.requires_grad for part in parts)


def _is_constant(node: fx.Node) -> bool:
    value = example_of(node)
    return (
        isinstance(value, torch.Tensor)
        and value.dtype.is_floating_point
        and not value.requires_grad
    )
