"""Checkpointed parts of a Dynamo graph, which are graphs of their own, as plain nodes.

    tag_activation_checkpoint(body, *args)  ->  the nodes of body

That a part is computed twice, to save memory, changes none of its results. What the rewritten graph keeps for its
backward is for the inner backend to decide.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx


def inlined(module: fx.GraphModule) -> fx.GraphModule:
    """A copy with such parts in place, its inputs in the same order; the module itself if it has none."""
    if not any(_is_part(node) for node in module.graph.nodes):
        return module
    graph = fx.Graph()
    result = _copy(graph, module, "", None)
    graph.output(result)
    graph.lint()
    return fx.GraphModule(module, graph)


def nodes_within(module: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of a graph and of its checkpointed parts."""
    for node in module.graph.nodes:
        yield node
        if _is_part(node):
            yield from nodes_within(_body(module, node))


def _is_part(node: fx.Node) -> bool:
    return node.target is torch.ops.higher_order.tag_activation_checkpoint


def _body(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    attribute = node.args[0]
    assert isinstance(attribute, fx.Node) and attribute.op == "get_attr"
    body = module.get_submodule(str(attribute.target))
    assert isinstance(body, fx.GraphModule)
    return body


def _copy(
    graph: fx.Graph, module: fx.GraphModule, path: str, given: Sequence[Any] | None
) -> fx.node.Argument:
    """Copy the nodes of `module`, an attribute `path` of the whole, whose inputs are `given`. Returns its results."""
    copies: dict[fx.Node, Any] = {}
    inputs = None if given is None else iter(given)
    for node in module.graph.nodes:
        if node.op == "placeholder" and inputs is not None:
            copies[node] = next(inputs)
        elif node.op == "output":
            return fx.map_arg(node.args[0], copies.__getitem__)
        elif _is_part(node):
            operands = fx.map_arg(node.args[1:], copies.__getitem__)
            inner = f"{path}{node.args[0].target}."
            copies[node] = _copy(graph, _body(module, node), inner, operands)
        elif node.target is operator.getitem and isinstance(copies[node.args[0]], (tuple, list)):
            copies[node] = copies[node.args[0]][node.args[1]]
        elif node.op != "get_attr" or not all(_is_part(user) for user in node.users):
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                copies[node].target = path + str(node.target)
    raise AssertionError("a graph without an output")
