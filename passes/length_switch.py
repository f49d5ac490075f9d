"""A choice by the length of the whole row (longrope) -> the same choice by the length of each request.

    before   inv_freq = where(max(position_ids) + 1 > L, long, short);  angles = position_ids * inv_freq
    after    angles = where(extent > L, position_ids * long, position_ids * short)       extent: each request's length

In a packed row one long request would change its neighbours' rotary embedding. The region is evaluated under both
outcomes, which is exact since it depends on the row through that one condition alone. A request whose length passes L
is recomputed from its start by the runtime. Not for a length that is used as a number (dynamic NTK scaling).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from regraft.kernels.spread import spread
from regraft.rewriter.graph import TOKENS, is_aten, shape_of
from regraft.rewriter.pattern import Declined, Grafting, Pass, Region

COMPARISONS = {"gt": int.__gt__, "ge": int.__ge__, "lt": int.__lt__, "le": int.__le__}


@dataclass(frozen=True)
class Switch:
    """`condition` = (max(position_ids) + offset) compared with `bound`; the region reads the maximum only there."""

    region: Region
    condition: fx.Node
    offset: int
    bound: int

    def holds(self, length: int) -> bool:
        name = self.condition.target._opname
        return COMPARISONS[name](length - 1 + self.offset, self.bound)


def pattern(region: Region) -> Switch | Declined:
    maxima = [
        node for node in region.nodes if is_aten(node, "max", "amax") and _over_all_positions(node)
    ]
    if len(maxima) != 1:
        return Declined("the region does not read the largest position", region.closer)
    value, offset = maxima[0], 0
    while True:
        users = [user for user in value.users if user in region.nodes]
        if len(users) != 1:
            return Declined("the largest position is used more than once", value, progress=0.4)
        (user,) = users
        step = _added(user)
        if step is None:
            break
        value, offset = user, offset + step
    if not is_aten(user, *COMPARISONS) or not isinstance(user.args[1], int):
        return Declined(
            "the largest position is not only compared with a number", user, progress=0.5
        )
    return Switch(region, user, offset, user.args[1])


def _over_all_positions(node: fx.Node) -> bool:
    return shape_of(node) == () if node.meta["shape"] is not None else False


def _added(node: fx.Node) -> int | None:
    """c where node = operand + c."""
    if is_aten(node, "add", "sub") and isinstance(node.args[1], int) and not node.kwargs:
        return node.args[1] if is_aten(node, "add") else -node.args[1]
    return None


def check(switch: Switch) -> Switch | Declined:
    inputs = {str(node.target) for node in switch.region.inputs}
    if inputs != {"position_ids"}:
        return Declined("the choice depends on more than positions", switch.condition, progress=0.6)
    others = [why for why in switch.region.causes if not why.startswith(("max over", "amax over"))]
    if others:
        return Declined(f"the region also mixes by {others[0]}", switch.region.closer, progress=0.7)
    return switch


def rewrite(switch: Switch, grafting: Grafting) -> None:
    aten = torch.ops.aten
    closer = switch.region.closer
    outcomes = [_outcome(switch, value, grafting) for value in (True, False)]
    extents, starts = grafting.sequence("extents"), grafting.sequence("cu_seqlens")
    positions = grafting.inputs["position_ids"]
    shape = shape_of(closer)
    dim = next(d for d, size in enumerate(shape) if size == TOKENS)
    lengths = grafting.call(
        spread._opoverload, extents, starts, positions, shape=(1, TOKENS), dtype=torch.int64
    )
    largest = grafting.call(
        aten.add.Tensor, lengths, switch.offset - 1, shape=(1, TOKENS), dtype=torch.int64
    )
    chosen = grafting.call(
        switch.condition.target, largest, switch.bound, shape=(1, TOKENS), dtype=torch.bool
    )
    layout = [TOKENS if d == dim else 1 for d in range(len(shape))]
    sizes = [-1 if d == dim else 1 for d in range(len(shape))]
    chosen = grafting.call(
        aten.reshape.default, chosen, sizes, shape=tuple(layout), dtype=torch.bool
    )
    merged = grafting.call(
        aten.where.self, chosen, *outcomes, shape=shape, dtype=closer.meta["dtype"]
    )
    grafting.replace(closer, merged)
    first = next(n for n in range(1, switch.bound + 3) if switch.holds(n) != switch.holds(1))
    grafting.switch_lengths.append(first - 1)
    grafting.mask = f"chosen by length > {first - 1}"


def _outcome(switch: Switch, value: bool, grafting: Grafting) -> fx.Node:
    """The region with the condition decided."""
    decided = grafting.call(
        torch.ops.aten.full.default,
        [],
        value,
        dtype=torch.bool,
        shape=(),
        device=switch.condition.meta["val"].device,
    )
    decided.meta["dtype"] = torch.bool
    copies = {switch.condition: decided}
    for node in switch.region.nodes:
        if any(operand in copies for operand in node.all_input_nodes) and node not in copies:
            with grafting.graph.inserting_before(switch.region.closer):
                copies[node] = grafting.graph.node_copy(node, lambda old: copies.get(old, old))
    return copies[switch.region.closer]


PASS = Pass("length_switch", "position", "spread", pattern, check, rewrite)
