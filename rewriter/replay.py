"""Replay: serve any causal region exactly, without knowing what it computes.

A region is a pure function of its per-token inputs. Their rows are kept in paged pools, and the unmodified subgraph is
run over each sequence's whole history, keeping only the new rows. Exact, and slow: the cost of a step grows with the
history. What makes it valid is one testable property, prefix stability:

    R(x[:n])[:m] == R(x[:m])        for all m <= n
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from .declare import RowSpec
from .graph import shape_of
from .pattern import Grafting, Region
from .replay_cut import cheapest_inputs
from .token_axis.analysis import Analysis

METADATA = ("cu_seqlens", "context_lens", "block_table", "slot_mapping")


@dataclass(frozen=True)
class RowLayout:
    """Where the tokens are in a row input, and what one row is."""

    dim: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    pool: str

    def rows_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """[..., T, ...] -> [T, *row]."""
        return tensor.movedim(self.dim, 0)

    def rebuild(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, *row] -> the layout of the graph."""
        return rows.movedim(0, self.dim).contiguous()


class Replay(nn.Module):
    """The operator that a replayed region becomes. `forward(*row_inputs, *pools, *METADATA)` -> the closer's value.

    Inputs named None in `layouts` are position_ids: a request's positions are 0, 1, 2, ..., so they are not stored.
    """

    def __init__(
        self, subgraph: fx.GraphModule, layouts: Sequence[RowLayout | None], out_dim: int, path: str
    ) -> None:
        super().__init__()
        self.subgraph = subgraph
        self.layouts = tuple(layouts)
        self.out_dim = out_dim
        self.path = path
        self.min_tokens = 1

    def run(self, rows: Sequence[torch.Tensor | None], num_tokens: int) -> torch.Tensor:
        """The region over one whole sequence of `num_tokens`; rows [T, *row] per stored input."""
        padded = max(num_tokens, self.min_tokens)
        arguments = []
        device = next((r.device for r in rows if r is not None), None)
        for layout, value in zip(self.layouts, rows, strict=True):
            if layout is None:
                arguments.append(torch.arange(padded, device=device)[None])
                continue
            assert value is not None
            if padded > num_tokens:  # causal, so what comes after the sequence is of no account
                value = torch.cat([value, value[-1:].expand(padded - num_tokens, *value.shape[1:])])
            arguments.append(layout.rebuild(value))
        result = self.subgraph(padded, *arguments)
        return result.narrow(self.out_dim, 0, num_tokens)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        stored = [layout for layout in self.layouts if layout is not None]
        values = tensors[: len(stored)]
        pools = tensors[len(stored) : 2 * len(stored)]
        cu_seqlens, context_lens, block_table, slot_mapping = tensors[2 * len(stored) :]
        for layout, value, pool in zip(stored, values, pools, strict=True):
            pool.view(-1, *layout.shape)[slot_mapping] = layout.rows_first(value).to(pool.dtype)
        outputs = []
        starts, contexts = cu_seqlens.tolist(), context_lens.tolist()
        page_size = pools[0].shape[1] if pools else 1
        for i, context in enumerate(contexts):
            new = starts[i + 1] - starts[i]
            if new == 0:
                continue
            total = context + new
            index = torch.arange(total, device=slot_mapping.device)
            slots = block_table[i, index // page_size].long() * page_size + index % page_size
            held = iter([pool.view(-1, *row.shape)[slots] for pool, row in zip(pools, stored, strict=True)])
            rows = [None if layout is None else next(held) for layout in self.layouts]
            outputs.append(self.run(rows, total).narrow(self.out_dim, context, new))
        packed = torch.cat(outputs, self.out_dim)
        return self._with_padding(packed, slot_mapping.shape[0])

    def _with_padding(self, packed: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Rows of no sequence (the runner's padding) are zeros."""
        missing = num_tokens - packed.shape[self.out_dim]
        if not missing:
            return packed
        shape = list(packed.shape)
        shape[self.out_dim] = missing
        return torch.cat([packed, packed.new_zeros(shape)], self.out_dim)


def graft_replay(region: Region, analysis: Analysis, grafting: Grafting) -> Replay:
    """Replace the region by a Replay module: cut its inputs where storing is cheapest, declare their rows."""
    nodes, inputs = cheapest_inputs(region, analysis)
    layouts: list[RowLayout | None] = []
    for node in inputs:
        if node.op == "placeholder" and node.target == "position_ids":
            layouts.append(None)
            continue
        dim = analysis.value(node).token_dim
        sizes = shape_of(node)
        row = tuple(int(size) if d != dim else 0 for d, size in enumerate(sizes))
        row = tuple(size for d, size in enumerate(row) if d != dim)
        layouts.append(RowLayout(dim, row, node.meta["dtype"], f"row:{node.name}"))
    subgraph = extract(region.closer, nodes, inputs, grafting.graph.owning_module)
    module = Replay(subgraph, layouts, analysis.uncut[region.closer].token_dim, region.path)
    _insert(region, module, inputs, grafting)
    return module


def _insert(region: Region, module: Replay, inputs: list[fx.Node], grafting: Grafting) -> None:
    owner = grafting.graph.owning_module
    name = f"replay_{sum(isinstance(m, Replay) for m in owner.modules())}"
    owner.add_submodule(name, module)
    stored = [(n, layout) for n, layout in zip(inputs, module.layouts, strict=True) if layout]
    pools = [grafting.shared_row_pool(RowSpec(row.pool, row.shape, row.dtype)) for _, row in stored]
    metadata = [grafting.sequence(field) for field in METADATA]
    closer = region.closer
    with grafting.graph.inserting_before(closer):
        node = grafting.graph.call_module(name, (*[n for n, _ in stored], *pools, *metadata))
    node.meta.update(closer.meta)
    grafting.replace(closer, node)


def extract(
    closer: fx.Node, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], owner: fx.GraphModule
) -> fx.GraphModule:
    """The region as a function `(num_tokens, *inputs) -> closer`, reading the same weights."""
    graph = fx.Graph()
    tokens = graph.placeholder("num_tokens")
    copies: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        if node in copies:
            continue
        if _counts_tokens(node):
            copies[node] = tokens
            continue
        copy = graph.node_copy(node, lambda old: copies[old])
        if copy.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            # rows rebuilt from a pool have other strides than the traced ones
            copy.target = torch.ops.aten.reshape.default
        copies[node] = copy
    graph.output(copies[closer])
    return fx.GraphModule(owner, graph)


def _counts_tokens(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.meta.get("shape") is None and isinstance(value, torch.SymInt) and _is_tokens(value)


def _is_tokens(value: torch.SymInt) -> bool:
    return value.node.expr.is_Symbol


def prefix_error(replay: Replay, rows: Sequence[torch.Tensor | None], lengths: Sequence[int]) -> dict[int, float]:
    """How far the region is from prefix stability: per length m, max |R(x[:n])[:m] - R(x[:m])| over max(1, |R|).

    inf where the region cannot run at that length at all.
    """
    total = next(row.shape[0] for row in rows if row is not None)
    whole = replay.run(rows, total)
    scale = max(1.0, float(whole.abs().max())) if whole.is_floating_point() else 1.0
    errors = {}
    for length in lengths:
        cut = [None if row is None else row[:length] for row in rows]
        part = replay.run(cut, length)
        difference = (whole.narrow(replay.out_dim, 0, length) - part).abs().max()
        errors[length] = float(difference) / scale
    return errors

