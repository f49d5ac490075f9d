"""What the passes over leaves share: a leaf's arguments as rows [T, ...], and the rows back in its
layout.

Layouts are written as words, one a dimension: "1 T H K" is a batch of one row, tokens, heads,
widths. T is the token axis; the other words stand for one size each, the same wherever they occur.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from regraft.rewriter.graph import TOKENS, shape_of
from regraft.rewriter.leaves import is_leaf, leaf_arguments
from regraft.rewriter.pattern import Declined, Grafting, Region

aten = torch.ops.aten

Sizes = dict[str, int]


@dataclass(frozen=True)
class Call:
    """A function of rows and weights that closes a region, with its arguments by name."""

    region: Region
    name: str
    arguments: Mapping[str, Any]

    @property
    def closer(self) -> fx.Node:
        return self.region.closer

    def node(self, name: str) -> fx.Node:
        """An argument that is a tensor."""
        node = self.arguments[name]
        assert isinstance(node, fx.Node), f"{name} of {self.name} is {node!r}"
        return node


def find_leaf(region: Region, name: str) -> Call | Declined:
    """The region as a call of the leaf with this kernel name."""
    if not is_leaf(region.closer, name):
        return Declined(f"not a call of {name}", region.closer)
    return Call(region, name, leaf_arguments(region.closer))


def bind_sizes(call: Call, layouts: Mapping[str, str]) -> Sizes | Declined:
    """Sizes by word, if every argument is laid out as said: rows as the region reads them, weights
    of no token.

    An argument that is None is left out.
    """
    sizes: Sizes = {}
    for name, layout in layouts.items():
        node = call.arguments[name]
        if node is None:
            continue
        declined = _bind(call, name, layout.split(), sizes)
        if declined is not None:
            return declined
    return sizes


def _bind(call: Call, name: str, words: list[str], sizes: Sizes) -> Declined | None:
    node = call.node(name)
    shape = shape_of(node)
    wrong = Declined(
        f"{call.name}: expected {name} as [{', '.join(words)}] {sizes or ''}, got {[*shape]}",
        node,
        0.5,
        fix=f"the function were called with {name} as [{', '.join(words)}]",
    )
    if len(shape) != len(words):
        return wrong
    for word, size in zip(words, shape):
        if word == "T":
            if size != TOKENS:
                return wrong
        elif (
            not isinstance(size, int) or sizes.setdefault(word, 1 if word == "1" else size) != size
        ):
            return wrong
    if "T" in words and node not in call.region.inputs:
        return Declined(
            f"{call.name}: {name} is not one row per token", node, 0.7,
            fix=f"what computes {name} read each token's own row alone",
        )  # fmt: skip
    if "T" not in words and _reads_tokens(node):
        return Declined(
            f"{call.name}: {name} depends on tokens", node, 0.7, fix=f"{name} were a weight"
        )
    return None


def _reads_tokens(node: fx.Node) -> bool:
    pending, seen = [node], set()
    while pending:
        current = pending.pop()
        if current.op == "placeholder":
            return True
        if current not in seen:
            seen.add(current)
            pending.extend(current.all_input_nodes)
    return False


def as_rows(call: Call, name: str, layout: str, grafting: Grafting) -> fx.Node | None:
    """The argument as [T, ...], its other dimensions in the layout's order, the batch of one
    dropped.
    """
    if call.arguments[name] is None:
        return None
    node, words = call.node(name), layout.split()
    shape, dtype = [*shape_of(node)], node.meta["dtype"]
    del shape[words.index("1")]
    batch = words.index("1")
    node = grafting.call(aten.select.int, node, batch, 0, shape=tuple(shape), dtype=dtype)
    words.remove("1")
    order = [words.index("T"), *(d for d, word in enumerate(words) if word != "T")]
    if order != sorted(order):
        shape = [shape[d] for d in order]
        node = grafting.call(aten.permute.default, node, order, shape=tuple(shape), dtype=dtype)
    return node


def replace_call(call: Call, rows: fx.Node, layout: str, grafting: Grafting) -> None:
    """Let the rows [T, ...] stand for the call's result, in its layout and dtype."""
    words = layout.split()
    words.remove("1")
    dtype = call.closer.meta["dtype"]
    if rows.meta["dtype"] != dtype:
        rows = grafting.call(aten._to_copy.default, rows, shape=shape_of(rows), dtype=dtype)
        rows.kwargs = {"dtype": dtype}
    grown = ["T", *(word for word in words if word != "T")]
    order = [grown.index(word) for word in words]
    if order != sorted(order):
        shape = tuple(shape_of(rows)[d] for d in order)
        rows = grafting.call(aten.permute.default, rows, order, shape=shape, dtype=dtype)
    batch = layout.split().index("1")
    shape = shape_of(call.closer)
    result = grafting.call(aten.unsqueeze.default, rows, batch, shape=shape, dtype=dtype)
    grafting.replace(call.closer, result)


def sequences(grafting: Grafting) -> tuple[fx.Node, fx.Node, fx.Node]:
    """cu_seqlens, context_lens, state_slots: the last arguments of every operator with a state."""
    names = ("cu_seqlens", "context_lens", "state_slots")
    first, second, third = (grafting.sequence(name) for name in names)
    return first, second, third


def own_state(grafting: Grafting, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
    """A state that no other call shares: a module may scan several heads, or be called several
    times.
    """
    taken, unique = 1, name
    while f"{grafting.region.path}:{unique}" in grafting.inputs:
        taken += 1
        unique = f"{name}.{taken}"
    return grafting.state_pool(unique, shape, dtype)
