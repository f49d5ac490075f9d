"""The captured graph and the facts every other file reads off its nodes.

Convention: `node.meta["val"]` is export's fake tensor (symbolic sizes), and these keys are filled in at capture and by
every rewrite:

    meta["shape"]   tuple of int | sympy expression in TOKENS (None for a node with several outputs)
    meta["dtype"]   torch.dtype (None for a node that is no single tensor)
    meta["path"]    module path in the wrapped model, "model.layers.3.self_attn"
    meta["source"]  "modeling_llama.py:123: attn = softmax(...)", the line of the model's own code
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

TOKENS = sympy.Symbol("T", integer=True, positive=True)
"""The number of tokens in the packed row: the one symbol that sizes of a captured graph are made of."""

Size: TypeAlias = int | sympy.Expr


@dataclass
class CapturedGraph:
    """An exported, functional ATen graph of one forward pass over a packed row.

    Placeholders are `input_ids` and `position_ids`, both int64 [1, T]; every weight is a `get_attr` node. The output
    is one node: logits [1, T, vocab]. `weights` maps the attribute name to the tensor (the model's own storage).
    """

    module: fx.GraphModule
    weights: MutableMapping[str, torch.Tensor]
    weight_names: MutableMapping[str, str] = field(default_factory=dict)
    min_tokens: int = 1
    max_tokens: int | None = None

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def logits(self) -> fx.Node:
        """The node that holds logits [1, T, vocab]."""
        (result,) = self.graph.output_node().args[0]
        return result

    def add_weight(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """A node that reads the weight with this full name in the model, new or as there is one already."""
        known = {full: attribute for attribute, full in self.weight_names.items()}
        if name not in known:
            attribute = self._hold("w_" + name, tensor)
            self.weights[attribute], self.weight_names[attribute] = tensor, name
            known[name] = attribute
        return self._reader(known[name], tensor)

    def add_constant(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """A node that reads a tensor of the graph's own, which is no weight of the model."""
        return self._reader(self._hold("c_" + name, tensor), tensor)

    def _hold(self, name: str, tensor: torch.Tensor) -> str:
        """Registers the tensor under a name like this, and says which."""
        plain = re.sub(r"\W", "_", name)
        attribute, taken = plain, 1
        while hasattr(self.module, attribute):
            taken += 1
            attribute = f"{plain}_{taken}"
        if isinstance(tensor, torch.nn.Parameter):
            self.module.register_parameter(attribute, tensor)
        else:
            self.module.register_buffer(attribute, tensor, persistent=False)
        return attribute

    def _reader(self, attribute: str, tensor: torch.Tensor) -> fx.Node:
        for node in self.graph.nodes:
            if node.op == "get_attr" and node.target == attribute:
                return node
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_before(first):
            node = self.graph.get_attr(attribute)
        node.meta.update(shape=tuple(tensor.shape), dtype=tensor.dtype, path="", source="")
        return node


def shape_of(node: fx.Node) -> tuple[Size, ...]:
    """Sizes of a single-tensor node, in TOKENS."""
    shape = node.meta["shape"]
    assert shape is not None, f"{node.format_node()} is not one tensor"
    return shape


def is_row(node: fx.Node) -> bool:
    """Whether a tensor is one row, or a number: added to many rows, it is the same for each."""
    return all(size == 1 for size in shape_of(node)[:-1])


def token_count(graph: fx.Graph) -> fx.Node:
    """The node that holds T, of which a graph in normal form has one."""
    return next(n for n in graph.nodes if n.op == "call_function" and n.meta.get("size") == TOKENS)


def is_aten(node: object, *names: str) -> bool:
    """True if `node` calls an ATen operator of one of these names, any overload: `is_aten(n, "view", "reshape")`."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == "aten"
        and target._opname in names
    )


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator's node by the names in its schema, defaults filled in."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    given = dict(zip([argument.name for argument in schema], node.args))
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    return {**defaults, **given, **node.kwargs}


def _name(target: object) -> str:
    """An operator's in full; of a function of Python's, as getitem, its own alone."""
    is_operator = isinstance(target, torch._ops.OpOverload)
    return str(target) if is_operator else getattr(target, "__name__", str(target))


def describe(node: fx.Node) -> str:
    """Where a node comes from, for reasons and errors: operation, module path, source line."""
    parts = [_name(node.target) if node.op == "call_function" else node.op]
    if node.meta.get("path"):
        parts.append(f"in {node.meta['path']}")
    if node.meta.get("source"):
        parts.append(f"at {node.meta['source']}")
    return " ".join(parts)
