"""A rewritten graph without its caches: for whole sequences that leave nothing behind, as in training.

Each operator that keeps rows or states becomes its twin that does not, and a replayed region runs over each sequence
as it is. Weights become inputs of the graph, so that whoever calls it says which tensors they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn

from regraft.kernels.varlen import STATELESS

from .declare import PAGED_SEQUENCES
from .graph import named_arguments
from .own_weights import Held, expose_weights
from .pattern import Declined
from .pipeline import Rewriting
from .replay import Replay
from .stateless_replay import enlist, varlen_replay

aten = torch.ops.aten

SEQUENCE_INPUTS = ("input_ids", "position_ids", "cu_seqlens", "extents")
"""What the graph may take besides weights: see rewriter/declare.py. `extents` are the sequences' lengths."""


@dataclass(frozen=True)
class Stateless:
    """`module(*sequence inputs, *weights) -> the captured graph's outputs`.

    `sequence_inputs` names the first inputs, `weights` (attributes of the captured graph) the others, of which `own`
    are not among those that were to become inputs.
    """

    module: fx.GraphModule
    sequence_inputs: tuple[str, ...]
    weights: tuple[str, ...]
    replays: tuple[Replay, ...]
    own: Mapping[str, Held]


def stateless(state: Rewriting, weights: Mapping[str, object]) -> Stateless | Declined:
    """Turn the graph of `state` into its stateless form, in place. `weights`: attributes that become inputs."""
    graph, module = state.graph, state.captured.module
    if "cu_seqlens" not in state.inputs:
        state.inputs["cu_seqlens"] = state.new_input("cu_seqlens")
    names = {node: name for name, node in state.inputs.items()}
    replays: list[Replay] = []
    own: dict[str, Held] = {}
    for node in list(graph.nodes):
        if node.op == "call_module":
            region = module.get_submodule(str(node.target))
            assert isinstance(region, Replay)
            random = _random(region)
            if random is not None:
                return Declined("a region without an operator draws random numbers", random)
            own |= expose_weights(region, node)
            _replay(node, region, state.inputs)
            replays.append(region)
        elif any(
            operand in names and names[operand] not in SEQUENCE_INPUTS
            for operand in node.all_input_nodes
        ):
            declined = _twin(node)
            if declined is not None:
                return declined
    for node in graph.find_nodes(op="placeholder"):
        if not node.users and names[node] != "input_ids":
            graph.erase_node(node)
    taken = tuple(names[node] for node in graph.find_nodes(op="placeholder"))
    lifted = _weights_as_inputs(graph, {**weights, **own})
    for node in graph.find_nodes(op="get_attr"):
        if isinstance(getattr(module, str(node.target)), nn.Parameter):
            return Declined("a weight that is no input of Dynamo's graph", node)
    graph.lint()
    module.recompile()
    return Stateless(module, taken, lifted, tuple(replays), own)


def _twin(node: fx.Node) -> Declined | None:
    """Replace an operator by the one without caches."""
    twin = STATELESS.get(node.target._schema.name)
    if twin is None:
        return Declined("this operator has no form without a cache", node)
    given = named_arguments(node)
    with node.graph.inserting_before(node):
        call = node.graph.call_function(twin.operator, tuple(given[name] for name in twin.names))
    call.meta.update(node.meta)
    node.replace_all_uses_with(call)
    node.graph.erase_node(node)
    return None


def _weights_as_inputs(graph: fx.Graph, weights: Mapping[str, object]) -> tuple[str, ...]:
    """Placeholders for weights, behind the others; constants stay where they are."""
    last = graph.find_nodes(op="placeholder")[-1]
    lifted: dict[str, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name not in weights:
            continue
        if name not in lifted:
            with graph.inserting_after(last):
                last = lifted[name] = graph.placeholder(name)
            last.meta.update(node.meta)
        node.replace_all_uses_with(lifted[name])
        graph.erase_node(node)
        if hasattr(graph.owning_module, name):
            delattr(graph.owning_module, name)  # the caller's to keep alive
    return tuple(lifted)


def _random(region: Replay) -> fx.Node | None:
    """The first operation whose result a second run would not give again, as a gradient needs it."""
    for node in region.subgraph.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            continue
        if torch.Tag.nondeterministic_seeded in target.tags:
            if named_arguments(node).get("dropout_p", 1.0) != 0.0:
                return node
    return None


def _replay(node: fx.Node, region: Replay, inputs: Mapping[str, fx.Node]) -> None:
    """Run a replayed region over each sequence."""
    count, boundaries = len(region.stored), inputs["cu_seqlens"]
    weights = node.args[2 * count + len(PAGED_SEQUENCES) :]
    with node.graph.inserting_before(node):
        tokens = node.graph.call_function(aten.sym_size.int, (inputs["input_ids"], 1))
        call = node.graph.call_function(
            varlen_replay._opoverload,
            ([*node.args[:count], *weights], boundaries, tokens, enlist(region)),
        )
    call.meta.update(node.meta)
    node.replace_all_uses_with(call)
    node.graph.erase_node(node)
