"""Cuts a rewritten graph into steps, so that equal layers share one body.

    graph of L equal layers  ->  [prologue, first layer, layer, layer, ..., epilogue]

A step is a body, a small graph without weights of its own, and the values of the whole graph that it is called with.
Steps with the same operations on weights of the same shapes have the same body, which therefore is compiled once.
A layer's last operations, those behind its last matrix product, go to the step behind it: the sum that ends a layer and
the norm that begins the next are then one kernel.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn

aten = torch.ops.aten

_SIZES = (aten.sym_size.int, aten.sym_numel.default)
_PRODUCTS = frozenset("linear matmul bmm mm addmm baddbmm einsum convolution conv1d".split())


@dataclass(frozen=True)
class Step:
    """One call: `body(*inputs) -> results`, by nodes of the whole graph.

    `on_host` is a module whose forward is Python code that reads values: it cannot be compiled or recorded.
    """

    body: nn.Module
    inputs: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    path: str
    on_host: bool = False


@dataclass
class _Cluster:
    """Nodes that become one step, in order."""

    label: str
    nodes: list[fx.Node]

    @property
    def on_host(self) -> bool:
        return self.nodes[0].op == "call_module"


def cut(module: fx.GraphModule) -> list[Step]:
    """The steps of `module`, whose placeholders are tensors, in an order that they can run in."""
    clusters = _clusters(module.graph)
    _move_tails(clusters)
    owner = {node: cluster_at for cluster_at, c in enumerate(clusters) for node in c.nodes}
    bodies: dict[str, nn.Module] = {}
    return [
        _host_step(cluster, module)
        if cluster.on_host
        else _Builder(module).step(cluster, at, owner, bodies)
        for at, cluster in enumerate(clusters)
        if cluster.nodes
    ]


def _clusters(graph: fx.Graph) -> list[_Cluster]:
    """Runs of nodes of one layer, as long as the order of evaluation allows."""
    order = {node: at for at, node in enumerate(graph.nodes) if _computes(node)}
    before = _dependencies(order)
    missing = {node: len(nodes) for node, nodes in before.items()}
    after: dict[fx.Node, list[fx.Node]] = {node: [] for node in order}
    for node, nodes in before.items():
        for needed in nodes:
            after[needed].append(node)
    at_place = {at: node for node, at in order.items()}
    ready: dict[str, list[int]] = {}
    for node in order:
        if not missing[node]:
            heapq.heappush(ready.setdefault(_label(node), []), order[node])
    clusters: list[_Cluster] = []
    while ready:
        label = min(ready, key=lambda name: ready[name][0])
        clusters.append(_Cluster(label, []))
        while ready.get(label):
            node = at_place[heapq.heappop(ready[label])]
            clusters[-1].nodes.append(node)
            for user in after[node]:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready.setdefault(_label(user), []), order[user])
        del ready[label]
    return clusters


def _computes(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method", "call_module") and not _is_size(node)


def _is_size(node: object) -> bool:
    """A node that holds a size: it is computed anew wherever it is needed, from the tensors it is a size of."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    if node.target in _SIZES:
        return True
    inputs = node.all_input_nodes
    is_atens = isinstance(node.target, torch._ops.OpOverload)
    return bool(inputs) and not is_atens and all(map(_is_size, inputs))


def _dependencies(order: Mapping[fx.Node, int]) -> dict[fx.Node, set[fx.Node]]:
    """What has to run before each node: what it reads, and earlier users of a tensor that one of them writes."""
    last_user: dict[fx.Node, fx.Node] = {}
    before: dict[fx.Node, set[fx.Node]] = {}
    written = {tensor for node in order for tensor in _written(node)}
    for node in order:
        needed = {leaf for leaf in _operands(node) if _computes(leaf)}
        for tensor in node.all_input_nodes:
            if tensor in written:
                if tensor in last_user:
                    needed.add(last_user[tensor])
                last_user[tensor] = node
        before[node] = needed
    return before


def _operands(node: fx.Node) -> list[fx.Node]:
    """Tensors that a node reads, those behind its sizes included."""
    found: list[fx.Node] = []
    for operand in node.all_input_nodes:
        found.extend(_operands(operand) if _is_size(operand) else [operand])
    return found


def _written(node: fx.Node) -> list[fx.Node]:
    """Operands that a node writes into; of a module, all that are inputs of the graph."""
    if node.op == "call_module":
        return [operand for operand in node.all_input_nodes if operand.op == "placeholder"]
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    named = dict(zip((a.name for a in schema.arguments), node.args)) | dict(node.kwargs)
    return [
        named[a.name]
        for a in schema.arguments
        if a.alias_info is not None
        and a.alias_info.is_write
        and isinstance(named.get(a.name), fx.Node)
    ]


def _label(node: fx.Node) -> str:
    """The layer that a node belongs to: its module path up to the first number, "" outside the layers."""
    while node.target is operator.getitem:
        (node,) = node.all_input_nodes
    if node.op == "call_module":
        return f"module {node.target}"
    return layer_of(node.meta.get("path") or "")


def layer_of(path: str) -> str:
    """`model.layers.3.mlp.up_proj` -> `model.layers.3`; "" for a path without a number."""
    parts = path.split(".")
    return next((".".join(parts[: i + 1]) for i, p in enumerate(parts) if p.isdigit()), "")


def _move_tails(clusters: Sequence[_Cluster]) -> None:
    for one, two in pairwise(clusters):
        if not one.label or one.on_host or two.on_host:
            continue
        cut_at = len(one.nodes)
        while cut_at and not _is_product(one.nodes[cut_at - 1]):
            cut_at -= 1
        if cut_at == 0:
            continue
        moved = set(one.nodes[cut_at:])
        for at in reversed(range(cut_at, len(one.nodes))):
            node = one.nodes[at]
            if node.target is operator.getitem and node.all_input_nodes[0] not in moved:
                cut_at = max(cut_at, at + 1)
        two.nodes[:0] = one.nodes[cut_at:]
        del one.nodes[cut_at:]


def _is_product(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace != "aten" or target._opname in _PRODUCTS


def _host_step(cluster: _Cluster, module: fx.GraphModule) -> Step:
    (node,) = cluster.nodes
    assert not node.kwargs and all(isinstance(a, fx.Node) for a in node.args), node.format_node()
    body = module.get_submodule(str(node.target))
    return Step(body, tuple(node.all_input_nodes), (node,), node.meta.get("path") or "", True)


@dataclass
class _Builder:
    """Builds one step and the text by which equal bodies are recognised."""

    module: fx.GraphModule
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inputs: list[fx.Node] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    weights: dict[str, fx.Node] = field(default_factory=dict)

    def step(
        self,
        cluster: _Cluster,
        at: int,
        owner: Mapping[fx.Node, int],
        bodies: dict[str, nn.Module],
    ) -> Step:
        """The step of cluster number `at`. `owner` says which cluster computes a node; `bodies` are known ones."""
        placeholders = self._place_inputs(cluster, owner, at)
        for node in cluster.nodes:
            self._copy(node)
        results = tuple(
            node for node in cluster.nodes if any(_is_outside(u, at, owner) for u in node.users)
        )
        output = tuple(self.copies[node] for node in results)
        self.graph.output(output)
        key = "\n".join([*placeholders, *self.lines, str([n.name for n in output])])
        if key not in bodies:
            self.graph.lint()
            bodies[key] = fx.GraphModule(nn.Module(), self.graph)
        return Step(bodies[key], tuple(self.inputs), results, cluster.label)

    def _place_inputs(self, cluster: _Cluster, owner: Mapping[fx.Node, int], at: int) -> list[str]:
        described = []
        for node in cluster.nodes:
            for operand in _operands(node):
                if operand in self.copies or owner.get(operand) == at:
                    continue
                if operand.op == "get_attr":  # one tensor may have several nodes
                    first = self.weights.setdefault(str(operand.target), operand)
                    if first in self.copies:
                        self.copies[operand] = self.copies[first]
                        continue
                self.copies[operand] = self.graph.placeholder(f"in{len(self.inputs)}")
                self.inputs.append(operand)
                described.append(self._describe(operand))
        return described

    def _describe(self, node: fx.Node) -> str:
        """What the compiled code of a body depends on: of a weight its shape, of another input nothing."""
        if node.op != "get_attr":
            return "value"
        weight = attribute_of(self.module, str(node.target))
        return f"weight {weight.dtype} {list(weight.shape)} {weight.stride()}"

    def _copy(self, node: fx.Node) -> fx.Node:
        for operand in node.all_input_nodes:
            if operand not in self.copies:
                assert _is_size(operand), f"{node.format_node()} reads {operand} before it is there"
                self._copy(operand)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.copies[n])
        target: Any = node.target
        name = f"n{len(self.lines)}"
        if target is aten.sym_size.int:  # as a tracer would meet it in a program
            copy = self.graph.create_node("call_method", "size", args, kwargs, name)
        elif target is aten.sym_numel.default:
            copy = self.graph.create_node("call_method", "numel", args, kwargs, name)
        else:
            copy = self.graph.create_node(node.op, target, args, kwargs, name)
        copy.meta = {k: node.meta[k] for k in ("path", "source") if k in node.meta}
        self.copies[node] = copy
        self.lines.append(f"{copy.name} = {copy.op} {copy.target} {copy.args} {copy.kwargs}")
        return copy


def _is_outside(user: fx.Node, at: int, owner: Mapping[fx.Node, int]) -> bool:
    """Whether a value is read by another step, or is the result of the whole graph."""
    if user.op == "output":
        return True
    if _is_size(user):
        return any(_is_outside(later, at, owner) for later in user.users)
    return owner.get(user) != at


def attribute_of(module: nn.Module, target: str) -> torch.Tensor:
    """The tensor that a `get_attr` node of `module` reads."""
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value
