"""What windows of tokens become once their rows are weighed into one: entries, each a function of its own window.

    entry[w] = f(pooled[w], w)          a norm, a rotation by the window's position, any operation on one row

f is lifted out of the graph with a token in the place of each window, and is accepted if the token-axis analysis
proves that it then is row-local: an entry that reads another window's is declined.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from regraft.rewriter.graph import TOKENS, Size, is_aten, shape_of
from regraft.rewriter.indexing import Element, arguments, size_value, sizes_of, trace
from regraft.rewriter.integers import ZERO, Index, Quotient, plain
from regraft.rewriter.pattern import Declined, Grafting
from regraft.rewriter.token_axis import analyse
from regraft.rewriter.token_axis.regions import verdict

from .compressed_windows import Windows, read_windows, shares_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Entries:
    """Entries [.., D] at `node`, as a function of the windows that they are made of: see `Lifted`."""

    windows: Windows
    node: fx.Node
    lifted: Lifted
    token_dim: int
    feature_dim: int
    width: int

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["dtype"]


def read_entries(element: Element, entry: Index, feature: Index) -> Entries | Declined:
    """The entries of which `element` is one, by the number of its window; `feature` counts along an entry."""
    node, place = trace(*element)[-1]
    dims = [[dim for dim, at in enumerate(place) if at == index] for index in (entry, feature)]
    rest = [at for at in place if at not in (entry, feature)]
    if any(len(found) != 1 for found in dims) or any(at != ZERO for at in rest):
        return Declined("entries are not laid out as rows", node, 0.6)
    (token_dim,), (feature_dim,) = dims
    sizes = sizes_of(node)
    if sizes[token_dim] != entry.size or sizes[feature_dim] != feature.size:
        return Declined("entries are a part of a larger tensor", node, 0.6)
    rate = entry.size.args[1]
    body = _body(node)
    if isinstance(body, Declined):
        return body
    pooled, nodes = body
    windows = read_windows(pooled, int(rate))
    if isinstance(windows, Declined):
        return windows
    lifted = _Lifting(windows).lift(node, nodes)
    if isinstance(lifted, Declined):
        return lifted
    return Entries(windows, node, lifted, token_dim, feature_dim, int(sizes[feature_dim]))


def _body(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | Declined:
    """The one sum of weighed rows behind an entry, and the nodes between the two, in no order."""
    pooled: dict[fx.Node, None] = {}
    nodes: dict[fx.Node, None] = {}
    others: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        current = pending.pop()
        if current in nodes or current in pooled:
            continue
        if current.op == "placeholder":
            others[current] = None
            continue
        if shares_of(current) is not None:
            pooled[current] = None
            continue
        nodes[current] = None
        if current.op == "call_function" and "size" not in current.meta:
            pending.extend(current.all_input_nodes)
    if len(pooled) != 1:
        return Declined(f"entries are made of {len(pooled)} weighed sums", node, 0.6)
    if others:
        read = ", ".join(str(other.target) for other in others)
        return Declined(f"entries depend on {read} beside their windows", node, 0.6)
    return next(iter(pooled)), list(nodes)


@dataclass(frozen=True)
class Lifted:
    """`graph`: a function of `pooled` [.., T, .., D] and position_ids; `output` is its last node."""

    graph: fx.Graph
    pooled: fx.Node
    positions: fx.Node
    output: fx.Node
    weights: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Reading nodes of the lifted graph -> those of the model's."""

    def copy(self, pooled: fx.Node, grafting: Grafting) -> fx.Node:
        """The function in the model's graph, of `pooled` [T, D]."""
        known = {
            self.pooled: pooled,
            self.positions: grafting.inputs["position_ids"],
            **self.weights,
        }
        for node in self.graph.nodes:
            if node in known or node.op == "output":
                continue
            with grafting.graph.inserting_before(grafting.region.closer):
                known[node] = grafting.graph.node_copy(node, lambda old: known[old])
            grafting.made.append(known[node])
        return known[self.output]


class _Lifting:
    """Copies nodes into a graph of their own in which a token stands for each window."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows
        self.count = Quotient(TOKENS, windows.rate)
        self.graph = fx.Graph()
        self.meta = {key: windows.node.meta.get(key, "") for key in ("path", "source")}
        self.positions = self.graph.placeholder("position_ids")
        self.positions.meta.update(shape=(1, TOKENS), dtype=torch.int64, path="", source="")
        # whose result it is matters to the analysis: rows of an operator
        self.pooled = self._call(
            torch.ops.regraft.pool_windows.default,
            (),
            (TOKENS, windows.width),
            windows.values.dtype,
        )
        self.tokens: fx.Node | None = None
        self.numbers: fx.Node | None = None
        self.weights: dict[fx.Node, fx.Node] = {}

    def lift(self, last: fx.Node, nodes: list[fx.Node]) -> Lifted | Declined:
        """The nodes up to `last`, if they are a function of each window by itself."""
        copies = {self.windows.node: self._shaped(self.windows.node)}
        for node in (n for n in last.graph.nodes if n in nodes):
            copy = self._copy(node, copies)
            if isinstance(copy, Declined):
                return copy
            copies[node] = copy
        output = copies[last]
        self.graph.output((output,))
        proof = verdict(analyse(self.graph))
        if not proof.proven:
            return Declined(f"an entry is no function of its own window: {proof}", last, 0.7)
        return Lifted(self.graph, self.pooled, self.positions, output, self.weights)

    def _shaped(self, node: fx.Node) -> fx.Node:
        """The operator's rows in the layout of the weighed sum: the feature is its last dimension."""
        shape = self._shape(node)
        sizes = [-1 if size == TOKENS else size for size in shape]
        return self._call(aten.reshape.default, (self.pooled, sizes), shape, node.meta["dtype"])

    def _copy(self, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node | Declined:
        if node.op == "get_attr":
            copy = self.graph.get_attr(str(node.target))
            copy.meta.update(node.meta)
            self.weights[copy] = node
            return copy
        if "size" in node.meta:
            return self._size(node)
        if is_aten(node, "arange"):
            return self._numbers(node)
        copy = self.graph.node_copy(node, lambda old: copies[old])
        copy.meta = {key: node.meta[key] for key in ("dtype", "path", "source")}
        copy.meta["shape"] = None if node.meta["shape"] is None else self._shape(node)
        return copy

    def _size(self, node: fx.Node) -> fx.Node | Declined:
        if size_value(node) != self.count:
            return Declined(f"entries are made with the number {node.meta['size']}", node, 0.6)
        if self.tokens is None:
            self.tokens = self.graph.call_function(aten.sym_size.int, (self.positions, 1))
            self.tokens.meta.update(self.meta, shape=None, dtype=None, size=TOKENS)
        return self.tokens

    def _numbers(self, node: fx.Node) -> fx.Node | Declined:
        """arange over windows -> the number of the window that a token is in."""
        counts = [size_value(arg) for arg in arguments(node)]
        if counts != [self.count] or node.meta["dtype"] != torch.int64:
            return Declined("entries count something else than windows", node, 0.6)
        if self.numbers is None:
            shape = (TOKENS,)
            at = self._call(aten.select.int, (self.positions, 0, 0), shape, torch.int64)
            of = (at, self.windows.rate)
            self.numbers = self._call(aten.floor_divide.default, of, shape, torch.int64)
        return self.numbers

    def _shape(self, node: fx.Node) -> tuple[Size, ...]:
        return tuple(TOKENS if plain(size) == self.count else size for size in shape_of(node))

    def _call(
        self, target: Any, args: tuple[Any, ...], shape: tuple[Size, ...], dtype: torch.dtype
    ) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta.update(self.meta, shape=shape, dtype=dtype)
        return node
