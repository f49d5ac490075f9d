"""In-place operations of a Dynamo graph, and what shares memory with what they write into."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property

import torch
from torch import fx

from .dynamo_inputs import example_of
from .untouched import storage_key


class Writes:
    """The in-place operations of a graph by the memory that they write into."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._graph = module.graph
        self._by_memory: dict[int, list[fx.Node]] = defaultdict(list)
        for node in module.graph.nodes:
            memory = memory_of(node.args[0]) if is_in_place(node) else None
            if memory is not None:
                self._by_memory[memory].append(node)

    def into(self, node: fx.Node) -> list[fx.Node]:
        """The operations that write into the memory of a node's value, before or after it is computed."""
        memory = memory_of(node)
        return self._by_memory.get(memory, []) if memory is not None else []

    @cached_property
    def inputs(self) -> list[fx.Node]:
        """The inputs of the graph that it writes into."""
        return [node for node in self._graph.find_nodes(op="placeholder") if self.into(node)]

    def spread(self, found: set[fx.Node]) -> None:
        """Add to `found` what depends on it: by its operands, or through memory that something of it writes into."""
        size = -1
        while size != len(found):
            size = len(found)
            memories = {memory_of(node.args[0]) for node in found if is_in_place(node)} - {None}
            for node in self._graph.nodes:
                if _any(found, node.all_input_nodes) or memory_of(node) in memories:
                    found.add(node)


def _any(found: set[fx.Node], nodes: Iterable[fx.Node]) -> bool:
    return any(node in found for node in nodes)


def is_in_place(node: fx.Node) -> bool:
    """Whether a node writes into its first argument: `x.add_(y)`, `x[i] = y`."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.op == "call_function" and node.target is operator.setitem:
        return True
    if node.op not in ("call_method", "call_function"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def memory_of(node: object) -> int | None:
    """A number for the memory that a node's value lies in, which its views share; None for what is no tensor."""
    value = example_of(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    while torch._C._functorch.is_functorch_wrapped_tensor(value):  # within vmap
        value = torch._C._functorch.get_unwrapped(value)
    return storage_key(value)
