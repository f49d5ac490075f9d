"""Where a Dynamo graph is cut in two: rows per token, which are grafted, and what is made of them.

What a graph returns is often not one row per token: a loss, a cache whose states are one per sequence, the last
token's logits. Such results are computed by the graph's own nodes, unchanged, on the batch `[B, T]`; they start from
values with one row per token, and only these come from the grafted graph.

What no weight has a part in is never taken from the grafted graph: a mask, or the numbers of the sequences in a packed
row, say how tokens lie to each other, for a graph behind a break to read, and there are none in a row by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from .dynamo_inputs import Inputs, example_of, plain
from .dynamo_writes import Writes, is_in_place
from .pattern import Declined


@dataclass(frozen=True)
class Place:
    """Where the batch and the tokens are in a value of the batch's graph. `batch_dim` is None for a batch of one."""

    batch_dim: int | None
    token_dim: int

    def rows_first(self, value: Tensor) -> Tensor:
        """The same value of the packed row, whose batch is one, as rows [N, ...]."""
        if self.batch_dim is None:
            return value.movedim(self.token_dim, 0)
        return value.movedim((self.batch_dim, self.token_dim), (0, 1))[0]

    def place(self, rows: Tensor) -> Tensor:
        """[B, T, ...] as the batch's graph has it."""
        if self.batch_dim is None:
            return rows[0].movedim(0, self.token_dim)
        return rows.movedim((0, 1), (self.batch_dim, self.token_dim))


@dataclass(frozen=True)
class Cut:
    """`rows` are the values to compute per token; `rest` what the graph computes from them and from its inputs.

    `writes` are those of `rest` that work in place, and `written` the graph's inputs that they write into.
    """

    rows: dict[fx.Node, Place]
    rest: frozenset[fx.Node]
    writes: frozenset[fx.Node]
    written: frozenset[fx.Node]


def cut(module: fx.GraphModule, inputs: Inputs) -> Cut | Declined:
    """Cut as late as possible: at the last values that have one row per token, and that nothing writes into."""
    writes = Writes(module)
    unknown = unknown_nodes(module, inputs)
    weighed = set(inputs.weights)
    writes.spread(weighed)
    rows: dict[fx.Node, Place] = {}
    rest: set[fx.Node] = set()
    pending = list(module.graph.output_node().all_input_nodes)
    pending += [node for written in writes.inputs for node in writes.into(written)]
    while pending:
        node = pending.pop()
        if node.op in ("placeholder", "get_attr") or node in rows or node in rest:
            continue
        writers = writes.into(node)
        apart = node in unknown or node not in weighed or writers
        place = None if apart else place_of(node, inputs)
        if place is not None:
            rows[node] = place
        else:
            rest.add(node)
            pending.extend([*node.all_input_nodes, *writers])
    if not rows:
        return Declined("nothing that it returns is computed per token")
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    by_place = dict(sorted(rows.items(), key=lambda row: order[row[0]]))
    in_place = frozenset(node for node in rest if is_in_place(node))
    return Cut(by_place, frozenset(rest), in_place, frozenset(writes.inputs))


def unknown_nodes(module: fx.GraphModule, inputs: Inputs) -> set[fx.Node]:
    """What depends on an input of no known meaning."""
    found = set(inputs.others)
    Writes(module).spread(found)
    return found


def place_of(node: fx.Node, inputs: Inputs) -> Place | None:
    """Where a value has its batch and tokens; None if it is not one row of fixed size per token."""
    value = example_of(node)
    if not isinstance(value, torch.Tensor):
        return None
    sizes = [plain(size) for size in value.shape]
    tokens = [dim for dim, size in enumerate(sizes) if size == inputs.tokens]
    single = inputs.batch == 1  # then no dimension is needed for it, and any of size 1 may be one
    batch = [None] if single else [dim for dim, size in enumerate(sizes) if size == inputs.batch]
    if len(tokens) != 1 or len(batch) != 1:
        return None
    others = [size for dim, size in enumerate(sizes) if dim not in (tokens[0], batch[0])]
    return Place(batch[0], tokens[0]) if all(isinstance(size, int) for size in others) else None


def remainder(module: fx.GraphModule, found: Cut) -> fx.GraphModule:
    """The rest of the graph: `(*inputs of the graph, *rows) -> its outputs`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        copies[node] = graph.placeholder(node.name)
    for node in found.rows:
        copies[node] = graph.placeholder(f"rows_of_{node.name}")
    for node in module.graph.nodes:
        if node in found.rest or node.op == "get_attr":
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], lambda n: copies[n]))
    kept = {copies[node] for node in found.writes}
    graph.eliminate_dead_code(lambda node: node.is_impure() or node in kept)
    return fx.GraphModule(module, graph)
