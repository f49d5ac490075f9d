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

from .declare import PAGED_SEQUENCES, RowSpec
from .errors import RewriteError
from .graph import TOKENS, describe, shape_of
from .pattern import Grafting, Region
from .replay_cut import cheapest_inputs
from .token_axis.analysis import Analysis
from .token_axis.value import Axis, has_tokens


@dataclass(frozen=True)
class RowLayout:
    """Where the tokens are in a tensor, and what one token's row is.

    Dimension `dim` has `outer * T * inner` elements. A row has the shape of the other dimensions, with `outer` and
    `inner` in place of `dim` where they are not 1.
    """

    dim: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    pool: str = ""
    outer: int = 1
    inner: int = 1

    @classmethod
    def of(cls, node: fx.Node, dim: int, axis: Axis, pool: str = "") -> RowLayout:
        """Raises RewriteError if a row is not of one size."""
        sizes = shape_of(node)
        others = [size for d, size in enumerate(sizes) if d != dim]
        if any(map(has_tokens, others)):
            raise RewriteError(
                f"a row of this value grows with the text: {describe(node)} has shape {[*sizes]}",
                path=node.meta.get("path", ""), source=node.meta.get("source", ""),
            )  # fmt: skip
        factors = [] if axis.outer * axis.inner == 1 else [axis.outer, axis.inner]
        row = [*others[:dim], *factors, *others[dim:]]
        return cls(dim, tuple(map(int, row)), node.meta["dtype"], pool, axis.outer, axis.inner)

    def rows_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """[..., outer * T * inner, ...] -> [T, *row]."""
        if self.outer * self.inner == 1:
            return tensor.movedim(self.dim, 0)
        return tensor.unflatten(self.dim, (self.outer, -1, self.inner)).movedim(self.dim + 1, 0)

    def rebuild(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, *row] -> the layout of the graph."""
        if self.outer * self.inner == 1:
            return rows.movedim(0, self.dim).contiguous()
        return rows.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2).contiguous()


class Replay(nn.Module):
    """The operator that a replayed region becomes.

    `forward(*row_inputs, *pools, *PAGED_SEQUENCES, *weights)` -> the closer's value on the packed row. Inputs that are
    None in `layouts` are position_ids: a request's positions are 0, 1, 2, ..., so they are not stored. Weights are
    arguments so that the graph reads the model's own tensors in one place.
    """

    def __init__(
        self, subgraph: fx.GraphModule, layouts: Sequence[RowLayout | None], result: RowLayout, path: str,
        min_tokens: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.subgraph = subgraph
        self.layouts = tuple(layouts)
        self.stored = tuple(layout for layout in layouts if layout is not None)
        self.result = result
        self.path = path
        self.min_tokens = min_tokens
        self.weights: tuple[torch.Tensor, ...] = ()
        """Of the last step."""
        self.probe: list[torch.Tensor | None] | None = None
        """Set to a list to keep the rows of the first sequence of the next step, for tests of the region."""

    def run(self, rows: Sequence[torch.Tensor | None], num_tokens: int) -> torch.Tensor:
        """The region over one whole sequence of `num_tokens`: rows [T, *row] per stored input -> [T, *row]."""
        padded = max(num_tokens, self.min_tokens)
        arguments = []
        device = next(
            (tensor.device for tensor in (*rows, *self.weights) if tensor is not None), None
        )
        for layout, value in zip(self.layouts, rows, strict=True):
            if layout is None:
                arguments.append(torch.arange(padded, device=device)[None])
                continue
            assert value is not None
            if padded > num_tokens:  # causal, so what comes after the sequence is of no account
                value = torch.cat([value, value[-1:].expand(padded - num_tokens, *value.shape[1:])])
            arguments.append(layout.rebuild(value))
        result = self.result.rows_first(self.subgraph(padded, *arguments, *self.weights))
        if len(result) < num_tokens:
            raise RuntimeError(f"{self.path} gives {len(result)} rows for {num_tokens} tokens")
        return result[:num_tokens]

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        count = len(self.stored)
        values, pools = tensors[:count], tensors[count : 2 * count]
        cu_seqlens, context_lens, block_table, slot_mapping = tensors[
            2 * count : 2 * count + len(PAGED_SEQUENCES)
        ]
        self.weights = tensors[2 * count + len(PAGED_SEQUENCES) :]
        for layout, value, pool in zip(self.stored, values, pools, strict=True):
            pool.view(-1, *layout.shape)[slot_mapping] = layout.rows_first(value).to(pool.dtype)
        outputs: list[torch.Tensor] = []
        starts, contexts = cu_seqlens.tolist(), context_lens.tolist()
        for i, context in enumerate(contexts):
            new = starts[i + 1] - starts[i]
            if new == 0:
                continue
            rows = self._history(pools, block_table[i], context + new)
            if self.probe is not None and not outputs:
                self.probe = rows
            outputs.append(self.run(rows, context + new)[context:])
        return self.result.rebuild(self._with_padding(outputs, slot_mapping))

    def _history(
        self, pools: Sequence[torch.Tensor], pages: torch.Tensor, total: int
    ) -> list[torch.Tensor | None]:
        """The rows of one whole sequence, one entry per input; None where positions are counted."""
        if not pools:
            return [None] * len(self.layouts)
        page_size = pools[0].shape[1]
        index = torch.arange(total, device=pages.device)
        slots = pages[index // page_size].long() * page_size + index % page_size
        rows = iter(
            [pool.view(-1, *row.shape)[slots] for pool, row in zip(pools, self.stored, strict=True)]
        )
        return [None if layout is None else next(rows) for layout in self.layouts]

    def _with_padding(
        self, outputs: list[torch.Tensor], slot_mapping: torch.Tensor
    ) -> torch.Tensor:
        """One packed row. Rows of no sequence (the runner's padding) are zeros."""
        missing = slot_mapping.shape[0] - sum(map(len, outputs))
        padding = torch.zeros(
            missing, *self.result.shape, dtype=self.result.dtype, device=slot_mapping.device
        )
        return torch.cat([*outputs, padding])


def graft_replay(
    region: Region, analysis: Analysis, grafting: Grafting, min_tokens: int = 1
) -> Replay:
    """Replace the region by a Replay module: cut its inputs where storing is cheapest, declare their rows."""
    nodes, inputs = cheapest_inputs(region, analysis)
    layouts: list[RowLayout | None] = []
    for node in inputs:
        if node.op == "placeholder" and node.target == "position_ids":
            layouts.append(None)
            continue
        ((dim, axis),) = analysis.value(node).axes
        layouts.append(RowLayout.of(node, dim, axis, f"row:{node.name}"))
    ((dim, axis),) = analysis.uncut[region.closer].axes
    subgraph, weights = extract(region.closer, nodes, inputs)
    result = RowLayout.of(region.closer, dim, axis)
    module = Replay(subgraph, layouts, result, region.path, int(min_tokens))
    _insert(region, module, inputs, weights, grafting)
    return module


def _insert(
    region: Region,
    module: Replay,
    inputs: list[fx.Node],
    weights: list[fx.Node],
    grafting: Grafting,
) -> None:
    owner = grafting.graph.owning_module
    assert owner is not None
    name = f"replay_{sum(isinstance(m, Replay) for m in owner.modules())}"
    owner.add_submodule(name, module)
    rows = [node for node, layout in zip(inputs, module.layouts, strict=True) if layout]
    pools = [
        grafting.shared_row_pool(RowSpec(row.pool, row.shape, row.dtype)) for row in module.stored
    ]
    metadata = grafting.sequences()
    closer = region.closer
    with grafting.graph.inserting_before(closer):
        node = grafting.graph.call_module(name, (*rows, *pools, *metadata, *weights))
    axis = Axis(module.result.outer, module.result.inner)
    node.meta.update(closer.meta, token_axis=(module.result.dim, axis))
    grafting.replace(closer, node)


def extract(
    closer: fx.Node, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The region as a function `(num_tokens, *inputs, *weights) -> closer`, and the weights that it reads."""
    weights = [node for node in nodes if node.op == "get_attr"]
    graph = fx.Graph()
    tokens = graph.placeholder("num_tokens")
    copies = {node: graph.placeholder(node.name) for node in (*inputs, *weights)}
    for node in nodes:
        if node in copies:
            continue
        if node.meta.get("size") == TOKENS:
            copies[node] = tokens
            continue
        copy = graph.node_copy(node, lambda old: copies[old])
        if copy.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            # rows rebuilt from a pool have other strides than the traced ones
            copy.target = torch.ops.aten.reshape.default
        copies[node] = copy
    graph.output(copies[closer])
    return fx.GraphModule(nn.Module(), graph), weights
