"""Weights that a grafted graph reads and Dynamo's graph does not: those of modules that were kept whole.

A replayed region that runs such a module is given the module's parameters, so that gradients reach them:

    before   region(rows, ...):           module_leaf(x, key)
    after    region(rows, ..., weights):  run_with_weights(x, key, weights)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from torch import fx, nn

from .graph import CapturedGraph
from .module_leaf import ModuleCall, is_module_leaf, run_with_weights
from .replay import Replay

Held: TypeAlias = tuple[nn.Module, str]
"""A module, and the name of a tensor that it holds."""


def added_weights(
    captured: CapturedGraph, known: Mapping[str, object], root: nn.Module | None
) -> dict[str, Held]:
    """Attributes of a rewritten graph that passes made of weights in `root`, the model; not those in `known`."""
    found: dict[str, Held] = {}
    for attribute, name in captured.weight_names.items():
        path, _, last = name.rpartition(".")
        if attribute in known or root is None:
            continue
        try:
            owner = root.get_submodule(path)
        except AttributeError:
            continue
        if getattr(owner, last, None) is captured.weights[attribute]:
            found[attribute] = owner, last
    return found


def expose_weights(region: Replay, node: fx.Node) -> dict[str, Held]:
    """Give the region, which `node` runs, the parameters of the modules in it, as attributes of the node's graph."""
    graph, within = node.graph, region.subgraph.graph
    holder = graph.owning_module
    assert holder is not None
    found: dict[str, Held] = {}
    for leaf in [n for n in within.nodes if is_module_leaf(n)]:
        call: ModuleCall = leaf.meta["leaf"]
        inputs = []
        for weight, places in call.parameters:
            name = f"own_{sum(n.op == 'get_attr' for n in graph.nodes)}_{len(found)}"
            holder.register_parameter(name, weight)
            with graph.inserting_before(node):
                read = graph.get_attr(name)
            read.meta.update(shape=tuple(weight.shape), dtype=weight.dtype, path="", source="")
            node.args = (*node.args, read)
            last = within.find_nodes(op="placeholder")[-1]
            with within.inserting_after(last):
                inputs.append(within.placeholder(name))
            found[name] = places[0]
        with within.inserting_before(leaf):
            new = within.call_function(run_with_weights, (*leaf.args, inputs))
        new.meta.update(leaf.meta)
        leaf.replace_all_uses_with(new)
        within.erase_node(leaf)
    region.subgraph.recompile()
    return found
