"""Which rows a replayed region keeps: the cheapest cut through the row-local operations in front of it.

Views, repeats of heads and element-wise arithmetic are free to repeat inside the region; a projection is not. So a
region that reads keys repeated for every query head keeps the keys from before the repeat, and one that reads a
projection keeps the projection. Positions are never kept: a request counts them.
"""

from __future__ import annotations

import math

import networkx as nx
from torch import fx

from .graph import shape_of
from .pattern import Region
from .token_axis.analysis import Analysis, is_grafted
from .token_axis.regions import value_operands
from .token_axis.value import has_tokens

EXPENSIVE = frozenset(
    "linear matmul bmm mm addmm baddbmm einsum convolution conv1d scaled_dot_product_attention topk sort".split()
)
"""Operations that are not repeated over the whole history in each step."""

NEVER = 1 << 40
"""Bytes per token of what cannot be kept as one row per token."""


def cheapest_inputs(region: Region, analysis: Analysis) -> tuple[list[fx.Node], list[fx.Node]]:
    """Nodes of the enlarged region in graph order, and the rows it then reads."""
    order = {node: i for i, node in enumerate(analysis.graph.nodes)}
    if not region.inputs:
        return list(region.nodes), []
    flow = nx.DiGraph()
    reachable = _build(flow, region, analysis)
    _, (_, sink_side) = nx.minimum_cut(flow, "source", "sink")
    inputs = [
        node for node in reachable if ("out", node) in sink_side and ("in", node) not in sink_side
    ]
    inside = {node for node in reachable if ("in", node) in sink_side}
    nodes = set(region.nodes) | inside
    nodes |= _fixed_behind(nodes, inputs, analysis)
    return sorted(nodes - set(inputs), key=order.__getitem__), sorted(inputs, key=order.__getitem__)


def _build(flow: nx.DiGraph, region: Region, analysis: Analysis) -> list[fx.Node]:
    """Row-local nodes upstream of the region's inputs, each an edge whose capacity is its bytes per token."""
    pending = list(region.inputs)
    seen: dict[fx.Node, None] = {}
    for node in region.inputs:
        flow.add_edge(("out", node), "sink")
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen[node] = None
        price = _bytes(node, analysis)
        flow.add_edge(("in", node), ("out", node), capacity=price)
        operands = []
        if not (_is_source(node, analysis) or (_is_expensive(node) and price < NEVER)):
            operands = [n for n in value_operands(node) if not analysis.value(n).is_fixed]
        if not operands or not all(analysis.value(n).is_row_local for n in operands):
            flow.add_edge("source", ("in", node))
            continue
        for operand in operands:
            flow.add_edge(("out", operand), ("in", node))
            pending.append(operand)
    return list(seen)


def _is_source(node: fx.Node, analysis: Analysis) -> bool:
    """Not to be computed inside a region: inputs of the graph, grafted operators, what closes another region."""
    return node.op != "call_function" or analysis.is_cut(node) or is_grafted(node)


def _is_expensive(node: fx.Node) -> bool:
    return getattr(node.target, "_opname", "") in EXPENSIVE


def _bytes(node: fx.Node, analysis: Analysis) -> int:
    """Bytes per token of keeping this node's rows."""
    if node.op == "placeholder" and node.target == "position_ids":
        return 0
    if node in analysis.positional or node in analysis.history or node.meta.get("shape") is None:
        return NEVER
    ((dim, axis),) = analysis.value(node).axes
    sizes = [size for d, size in enumerate(shape_of(node)) if d != dim]
    if any(map(has_tokens, sizes)):
        return NEVER
    return math.prod(map(int, sizes)) * axis.outer * axis.inner * int(node.meta["dtype"].itemsize)


def _fixed_behind(nodes: set[fx.Node], inputs: list[fx.Node], analysis: Analysis) -> set[fx.Node]:
    """Weights, constants and sizes that the region's nodes read."""
    found: set[fx.Node] = set()
    pending = [operand for node in nodes for operand in node.all_input_nodes]
    while pending:
        node = pending.pop()
        if node in nodes or node in found or node in inputs or node.op == "placeholder":
            continue
        found.add(node)
        pending.extend(node.all_input_nodes)
    return found
