"""A module that selects blocks of tokens by a loop over queries -> a mask of what index_block_topk selects.

    before   module_leaf([x [1, T, C], ..., mask [1, 1, T, T]]) -> [1, 1, T, T]:  for each query, the top-k of scores of
             whole blocks, and the tokens after the last whole block
    after    what the module computes of every token; each block's key, of a window of its tokens' rows; the operator

How blocks are scored is read off runs of the module's own forward (passes/block_scores.py). That what it selects are
the best blocks by these scores and the tokens after them, and nothing else, is measured on random rows against its own
forward, at lengths around one block, two blocks, and more of them than are selected. Of equal scores any may be taken.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from regraft.kernels.causal_conv import causal_window
from regraft.rewriter.attention_core import Core
from regraft.rewriter.elements import Elements
from regraft.rewriter.formulas import Cell, cases, in_one_request, number
from regraft.rewriter.graph import TOKENS, is_aten, shape_of
from regraft.rewriter.indexing import Coordinates
from regraft.rewriter.integers import ZERO, Expr, compare
from regraft.rewriter.leaf_trace import LeafTrace, trace_leaf
from regraft.rewriter.leaves import LeafUnsupported
from regraft.rewriter.masks import is_possible, shorten
from regraft.rewriter.module_leaf import ModuleCall, Slot, is_module_leaf
from regraft.rewriter.pattern import Declined, Grafting
from regraft.rewriter.scores import Axes, is_masked

from .block_leaf import Leaf
from .block_program import Value
from .block_scores import ROUNDING, Blocks, Rows, read_blocks
from .expert_program import tensors_in
from .indexed_scores import node_named
from .leaf_copy import copy_leaf
from .leaf_rows import own_state, sequences
from .module_calls import with_numbers

aten = torch.ops.aten

FEWEST_TRACED = 7


@dataclass(frozen=True)
class BlockIndexer:
    """What selects blocks: a module leaf, what it was found to do, and its calls as graphs.

    `rows` gives what the module computes of every token, side by side ([T, width]); `keys` the key of each window.
    """

    leaf: fx.Node
    call: ModuleCall
    looked_at: Leaf
    blocks: Blocks
    rows: LeafTrace
    keys: LeafTrace

    @property
    def topk(self) -> fx.Node:
        """The node that selects."""
        return self.leaf

    @property
    def note(self) -> str:
        """What a reader of the report should know."""
        how = "with weights at random" if self.looked_at.call is not self.call else "not proven"
        return f"how the module scores and selects blocks was measured on its own runs, {how}"


def find_blocks(core: Core, masked: float) -> tuple[Core, BlockIndexer] | Declined:
    """The attention as if to every earlier key, and what selects among them."""
    graph = core.closer.graph
    cells = {cell: node_named(cell, graph) for cell in core.score.atoms(Cell)}
    cells = {cell: node for cell, node in cells.items() if _is_of_leaf(node)}
    if len(cells) != 1:
        return Declined(f"the mask reads {len(cells)} modules that were kept whole", core.closer)
    ((cell, selection),) = cells.items()
    if selection.meta["dtype"] != torch.bool or _place(cell.args[1:]) != (core.axes.q, core.axes.k):
        return Declined("the module does not say which keys each query sees", selection, 0.4)
    left_out, chosen = (core.score.xreplace({cell: sympy.Integer(seen)}) for seen in (0, 1))
    if not all(
        is_masked(leaf, masked) or not is_possible(when, core.axes.q, core.axes.k)
        for when, leaf in cases(in_one_request(number(left_out)))
    ):
        return Declined("keys that are not selected have scores", selection, 0.4)
    indexer = _read_leaf(selection.args[0], selection.args[1], core.axes, masked)
    return indexer if isinstance(indexer, Declined) else (replace(core, score=chosen), indexer)


def _is_of_leaf(node: fx.Node) -> bool:
    return node.target is operator.getitem and is_module_leaf(node.args[0])


def _place(coordinates: Iterable[Expr]) -> tuple[Expr, ...]:
    return tuple(at for at in coordinates if at != ZERO)


def _read_leaf(leaf: fx.Node, result: int, axes: Axes, masked: float) -> BlockIndexer | Declined:
    """What the module selects, measured."""
    call = leaf.meta["leaf"]
    masks = _read_masks(leaf, axes, masked)
    if isinstance(masks, Declined):
        return masks
    measurable = with_numbers(call, only_buffers=False)
    given = leaf.args[0]
    looked_at = Leaf(
        measurable, tuple(shape_of(node) for node in given), tuple(node.meta["dtype"] for node in given),
        masks, result,
    )  # fmt: skip
    if looked_at.device.type == "meta":
        return Declined("what the module selects is measured: weights needed", leaf, 0.5)
    if call.writes or Slot.SIZE in call.arguments:
        return Declined("the module takes a size or keeps something of its own", leaf, 0.5)
    try:
        blocks = read_blocks(looked_at)
        indexer = BlockIndexer(
            leaf, call, looked_at, blocks, _trace_rows(looked_at, given, blocks), _trace_keys(looked_at, blocks)
        )  # fmt: skip
        _measure(indexer)
    except LeafUnsupported as problem:
        return Declined(str(problem), leaf, 0.6)
    return indexer


def _read_masks(
    leaf: fx.Node, axes: Axes, masked: float
) -> dict[int, tuple[float, float]] | Declined:
    """For each argument that is no row per token, what it holds where k <= q and elsewhere."""
    masks: dict[int, tuple[float, float]] = {}
    for i, node in enumerate(leaf.args[0]):
        shape = shape_of(node)
        if shape[:2] == (1, TOKENS) and len(shape) == 3 and node.meta["dtype"].is_floating_point:
            continue
        if tuple(size for size in shape if size != 1) != (TOKENS, TOKENS):
            return Declined("the module is called with neither rows nor masks", node, 0.4)
        rest = iter((axes.q, axes.k))
        place = tuple(next(rest) if size == TOKENS else ZERO for size in shape)
        values = _two_values(node, place, axes)
        if isinstance(values, Declined):
            return values
        masks[i] = values
    if len(masks) == len(leaf.args[0]):
        return Declined("the module is called with no rows", leaf, 0.4)
    return masks


def _two_values(node: fx.Node, place: Coordinates, axes: Axes) -> tuple[float, float] | Declined:
    value = in_one_request(number(Elements(node.graph).at(node, place)))
    earlier = compare(axes.k, "<=", axes.q)
    found: list[set[Any]] = [set(), set()]
    for when, leaf in cases(value):
        for values, side in zip(found, (earlier, sympy.Not(earlier))):
            if is_possible(sympy.And(when, side), axes.q, axes.k):
                values.add(leaf)
    if any(len(values) != 1 or not next(iter(values)).is_number for values in found):
        return Declined(
            f"the module is called with a mask that is not causal: {shorten(value)}", node, 0.5
        )
    there, elsewhere = (float(values.pop()) for values in found)
    return there, elsewhere


class _Found(Exception):
    """Everything was computed that was to be."""


class _Until(TorchFunctionMode):
    """Takes values out of a run that goes as a recorded one went, and ends it there."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self._functions, self._count = blocks.functions, 0
        self._missing = {rows.value for rows in blocks.computed}
        self.found: dict[Value, Tensor] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        outputs = tensors_in(result)
        if not outputs:
            return result
        if self._functions[self._count] != function:
            raise LeafUnsupported("the module's code does not go the same way over other lengths")
        for value in [v for v in self._missing if v.call == self._count]:
            self.found[value] = outputs[value.output]
        self._missing -= self.found.keys()
        self._count += 1
        if not self._missing:
            raise _Found
        return result


def _trace_rows(leaf: Leaf, given: tuple[fx.Node, ...], blocks: Blocks) -> LeafTrace:
    """[T, width] of all that the module computes of every token, before it begins to select."""
    if len({rows.dtype for rows in blocks.computed}) != 1:
        raise LeafUnsupported("what the module computes of every token is of several dtypes")

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        until = _Until(blocks)
        try:
            with until:
                leaf.call.forward(*args, **kwargs)
        except _Found:
            pass
        return torch.cat([rows.flat(until.found[rows.value]) for rows in blocks.computed], -1)

    return trace_leaf(replace(leaf.call, forward=forward), given, 0, FEWEST_TRACED)


def _trace_keys(leaf: Leaf, blocks: Blocks) -> LeafTrace:
    """[T, E] of windows [T, width, size] of each source."""
    sources, size = blocks.sources, blocks.size

    def forward(*windows: Tensor) -> Tensor:
        rows = {s.value: w.transpose(1, 2).flatten(0, 1) for s, w in zip(sources, windows)}
        return blocks.keys(leaf.call.module, rows, windows[0].shape[0])

    graph, given = fx.Graph(), []
    for i, source in enumerate(sources):
        given.append(graph.placeholder(f"windows{i}"))
        given[-1].meta.update(shape=(TOKENS, source.width, size), dtype=source.dtype)
    call = replace(
        leaf.call, forward=forward, arguments=(Slot.TENSOR,) * len(sources),
        argument_spec=pytree.tree_structure(((0,) * len(sources), {})),
    )  # fmt: skip
    taken = {size, *(source.width for source in sources)}
    tokens = next(n for n in range(FEWEST_TRACED, FEWEST_TRACED + len(taken) + 1) if n not in taken)
    return trace_leaf(call, tuple(given), 0, tokens)


@torch.no_grad()
def _measure(indexer: BlockIndexer) -> None:
    """Raise LeafUnsupported if the module selects anything but the best blocks and the tokens after them."""
    blocks, leaf = indexer.blocks, indexer.looked_at
    size = blocks.size
    more = (blocks.count + 2) * size + size // 2 + 1
    lengths = (1, size - 1, size, size + 1, 2 * size, 3 * size - 1, more, more)
    for seed, length in enumerate(lengths):
        rows = leaf.rows(length, seed)
        if seed == len(lengths) - 1:  # once more with every other block of zeros: equal scores
            at = torch.arange(length, device=leaf.device) // size % 2
            rows = {i: row * at[:, None].to(row) for i, row in rows.items()}
        seen = leaf.run(leaf.given(rows)).reshape(length, length)
        problem = _unlike(blocks, seen, _scores(indexer, rows))
        if problem:
            raise LeafUnsupported(f"over {length} tokens the module {problem}")


def _scores(indexer: BlockIndexer, rows: dict[int, Tensor]) -> Tensor:
    """[T, blocks] by the graphs that are to stand for the module."""
    blocks, parts = indexer.blocks, dict[Value, Tensor]()
    length = next(iter(rows.values())).shape[1]
    computed = _run(indexer.rows, rows, length)
    widths = [part.width for part in blocks.computed]
    parts |= {r.value: part for r, part in zip(blocks.computed, computed.split(widths, 1))}
    parts |= {Value(-1, i): row[0] for i, row in rows.items()}
    windows = {}
    for i, source in enumerate(blocks.sources):
        part = parts[source.value]
        before = part.new_zeros(blocks.size - 1, part.shape[1])
        windows[i] = torch.cat([before, part]).unfold(0, blocks.size, 1)
    keys = _run(indexer.keys, windows, length)[blocks.size - 1 :: blocks.size].double()
    query = parts[blocks.query.value].double().unflatten(1, (blocks.heads, -1))
    products = query @ keys.t()
    products = products.relu() if blocks.relu else products
    if blocks.weights is not None:
        products = products * parts[blocks.weights.value].double().unsqueeze(2)
    return products.sum(1) * blocks.scale


def _run(trace: LeafTrace, given: dict[int, Tensor], length: int) -> Tensor:
    module, values = trace.captured.module, dict[str, Tensor]()
    for i, tensor in given.items():
        if i in trace.tables:
            module.get_parameter(trace.tables[i]).data = tensor[0]
        else:
            values[trace.others[i]] = tensor
    device = next(iter(given.values())).device
    ids = torch.arange(length, device=device)[None]
    inputs = [node for node in trace.captured.graph.nodes if node.op == "placeholder"]
    result: Tensor = module(*[values.get(str(n.target), ids) for n in inputs])[0]
    return result


def _unlike(blocks: Blocks, seen: Tensor, scores: Tensor) -> str:
    """What is wrong with the keys that queries see, [T, T], for scores [T, blocks]; nothing if they are the best."""
    length, size = len(seen), blocks.size
    at = torch.arange(length, device=seen.device)
    whole = (at + 1) // size
    tail = (at >= (whole * size)[:, None]) & (at <= at[:, None])
    last = torch.arange(scores.shape[1], device=seen.device) * size + size - 1
    ended = last <= at[:, None]
    inside = (
        seen[:, : scores.shape[1] * size].unflatten(1, (-1, size))
        if len(last)
        else seen[:, :0, None]
    )
    chosen = inside.all(2) & ended
    said = chosen.repeat_interleave(size, 1)
    said = torch.nn.functional.pad(said, (0, length - said.shape[1])) | tail
    if not torch.equal(said, seen):
        return "selects other than whole blocks and the tokens after them"
    if not torch.equal(chosen.sum(1), whole.clamp(max=blocks.count)):
        return f"does not select {blocks.count} blocks wherever there are as many"
    if not len(last):
        return ""
    worst = scores.masked_fill(~chosen, torch.inf).amin(1)
    best_left = scores.masked_fill(chosen | ~ended, -torch.inf).amax(1)
    off = (best_left - worst).clamp(min=0).amax() / scores.abs().amax().clamp(min=1e-30)
    return (
        "" if float(off) <= ROUNDING else f"does not select the best blocks: {float(off):.1e} off"
    )


def select(indexer: BlockIndexer, pool_name: str, grafting: Grafting) -> fx.Node:
    """[T, K] int32: the tokens that the module selects."""
    blocks, size = indexer.blocks, indexer.blocks.size
    parts = _parts(indexer, grafting)
    windows = {}
    for i, source in enumerate(blocks.sources):
        state = own_state(grafting, "block", (source.width, size - 1), source.dtype)
        windows[i] = grafting.call(
            causal_window._opoverload, parts[source.value], size, 1, state, *sequences(grafting),
            shape=(TOKENS, source.width, size), dtype=source.dtype,
        )  # fmt: skip
    key = _copied(indexer.keys, indexer.call, windows, grafting)
    dtype = blocks.query.dtype
    query = grafting.call(
        aten.unflatten.int, parts[blocks.query.value], 1, [blocks.heads, blocks.key_width],
        shape=(TOKENS, blocks.heads, blocks.key_width), dtype=dtype,
    )  # fmt: skip
    pool = grafting.row_pool(pool_name, (blocks.key_width,), blocks.key_dtype)
    return grafting.call(
        torch.ops.regraft.index_block_topk.default, query, key,
        parts[blocks.weights.value] if blocks.weights else None, pool,
        *grafting.sequences(), size, blocks.count, blocks.scale, blocks.relu,
        shape=(TOKENS, blocks.count * size + size - 1), dtype=torch.int32,
    )  # fmt: skip


def _parts(indexer: BlockIndexer, grafting: Grafting) -> dict[Value, fx.Node]:
    """[T, width] of each argument and of each thing that the module computes of every token."""
    given, parts = indexer.leaf.args[0], dict[Value, fx.Node]()
    whole = _copied(indexer.rows, indexer.call, dict(enumerate(given)), grafting)
    start = 0
    for rows in indexer.blocks.computed:
        end, shape = start + rows.width, (TOKENS, rows.width)
        parts[rows.value] = grafting.call(
            aten.slice.Tensor, whole, 1, start, end, shape=shape, dtype=rows.dtype
        )
        start = end
    for i, node in enumerate(given):
        if Value(-1, i) in {source.value for source in _used(indexer.blocks)}:
            shape = (TOKENS, shape_of(node)[2])
            parts[Value(-1, i)] = grafting.call(
                aten.select.int, node, 0, 0, shape=shape, dtype=node.meta["dtype"]
            )
    return parts


def _copied(
    trace: LeafTrace, call: ModuleCall, given: Mapping[int, fx.Node], grafting: Grafting
) -> fx.Node:
    """The trace's result in the model's graph, for arguments by number."""
    tables = {attribute: given[i] for i, attribute in trace.tables.items()}
    others = {name: given[i] for i, name in trace.others.items()}
    inputs: dict[fx.Node, fx.Node] = {}
    for node in trace.captured.graph.nodes:
        if node.op == "placeholder":
            inputs[node] = others.get(str(node.target), grafting.inputs["input_ids"])
        elif is_aten(node, "embedding") and str(node.args[0].target) in tables:
            inputs[node] = tables[str(node.args[0].target)]
    return copy_leaf(trace, call.module, call.path, inputs, grafting)


def _used(blocks: Blocks) -> tuple[Rows, ...]:
    return (blocks.query, *([blocks.weights] if blocks.weights else []), *blocks.sources)
