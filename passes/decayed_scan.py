"""Linear attention weighted by a stored matrix of decays -> a recurrence, with a state per request.

    before   ((q k^T) * D[:, :, :T, :T]) v        q, k [1, H, T, D], v [1, H, T, V], D [1, H, B, B] a weight
    after    regraft.decayed_linear(q [T, H, D], k, v, decay [H], state, sequences) -> [T, H, V]

Where D[h, i, j] = decay_h ** (i - j) for i >= j, and 0 above. The graph itself is right for T <= B only.
The decay is computed from the weight at every step, so that it stays the model's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from regraft.kernels.decayed_linear import decayed_linear
from regraft.rewriter.graph import TOKENS, CapturedGraph, is_aten, named_arguments, shape_of
from regraft.rewriter.pattern import Declined, Grafting, Pass, Region
from regraft.rewriter.pipeline import GraphPass

from .leaf_rows import (
    Call,
    Sizes,
    as_rows,
    bind_sizes,
    own_state,
    replace_call,
    sequences,
)

aten = torch.ops.aten

LAYOUTS = {"query": "1 H T D", "key": "1 H T D", "value": "1 H T V"}
SPREADS_ZEROS = ("mul", "matmul", "bmm", "reshape", "expand", "transpose", "permute", "slice")


@dataclass(frozen=True)
class Plan:
    """A scan that the operator serves. `ages` [H]: at which distance each head's decay is read off."""

    call: Call
    sizes: Sizes
    ages: torch.Tensor


def pattern(region: Region) -> Call | Declined:
    """Scores times decays, times values."""
    closer = region.closer
    if not is_aten(closer, "matmul"):
        return Declined("not a product with values", closer)
    weighted, value = closer.args
    if not is_aten(weighted, "mul"):
        return Declined("not scores times decays", closer, 0.2)
    found = [(a, b) for a, b in (weighted.args, weighted.args[::-1]) if is_aten(a, "matmul")]
    if len(found) != 1:
        return Declined("not scores times decays", weighted, 0.2)
    ((scores, decays),) = found
    query, keys = scores.args
    if not _swaps_last_two(keys):
        return Declined("scores are not of queries and transposed keys", scores, 0.4)
    named = {"query": query, "key": keys.args[0], "value": value, "decays": decays}
    return Call(region, "linear attention", named)


def _swaps_last_two(node: Any) -> bool:
    return is_aten(node, "transpose") and {d % 4 for d in node.args[1:3]} == {2, 3}


def check(call: Call) -> Plan | Declined:
    """Rows of one dtype, and decays that are a constant factor per step and head."""
    region = call.region
    # The transposed keys are what the region reads; what they are made of is as good a row.
    swapped = [node.args[0] for node in region.inputs if _swaps_last_two(node)]
    given = Region(
        region.closer, region.nodes, (*region.inputs, *swapped), region.kind, region.path
    )
    call = Call(given, call.name, call.arguments)
    sizes = bind_sizes(call, LAYOUTS)
    if isinstance(sizes, Declined):
        return sizes
    if {call.node(name).meta["dtype"] for name in LAYOUTS} != {call.closer.meta["dtype"]}:
        return Declined("queries, keys and values are not of the result's dtype", call.closer, 0.6)
    stored = _stored_square(call.arguments["decays"])
    if isinstance(stored, Declined):
        return stored
    tensor = getattr(region.closer.graph.owning_module, stored.target)
    if tensor.shape[:-2] != (1, sizes["H"]) or tensor.shape[-1] != tensor.shape[-2]:
        return Declined(f"decays of shape {[*tensor.shape]} for {sizes['H']} heads", stored, 0.6)
    if tensor.is_meta:
        return Declined(
            "whether decays are a constant factor per step: weights needed", stored, 0.9
        )
    ages = read_off(tensor[0])
    if ages is None:
        return Declined("decays are not a constant factor per step", stored, 0.8)
    named = {**call.arguments, "decays": stored}
    return Plan(Call(given, call.name, named), sizes, ages)


def _stored_square(node: Any) -> fx.Node | Declined:
    """The weight of which `node` is the first T rows and columns."""
    sides: set[int] = set()
    source = node
    while is_aten(source, "slice"):
        cut = named_arguments(source)
        length = cut["end"].meta.get("size") if isinstance(cut["end"], fx.Node) else None
        if cut["start"] not in (None, 0) or cut["step"] != 1 or length != TOKENS:
            return Declined("decays are not the first T of a stored matrix", source, 0.6)
        sides.add(cut["dim"] % 4)
        source = cut["self"]
    if not isinstance(source, fx.Node) or source.op != "get_attr" or sides != {2, 3}:
        where = source if isinstance(source, fx.Node) else None
        return Declined("decays are not the first T of a stored matrix", where, 0.6)
    return source


def read_off(stored: torch.Tensor) -> torch.Tensor | None:
    """For decays [H, B, B] at which age [H] to read off each head's factor; None if there is none.

    The best place is where the decay has come down to 1/e: there a rounding error is a small part of the exponent.
    """
    decays = stored.detach().double().cpu()
    column = decays[:, :, 0]
    if column.shape[1] < 2:
        return None
    ages = (column[:, 1:] >= math.exp(-1)).sum(1).clamp(min=1)
    factors = column.gather(1, ages[:, None])
    distance = torch.arange(column.shape[1])
    distance = (distance[:, None] - distance[None, :])[None]
    logs = (factors.log() / ages[:, None])[..., None]
    expected = torch.where(distance >= 0, (logs * distance.clamp(min=0)).exp(), 0.0)
    close = (decays - expected).abs() <= 4 * torch.finfo(stored.dtype).eps
    decaying = ((factors > 0) & (factors <= 1)).all()  # of NaN neither is true
    return ages if bool(close.all() and decaying) else None


def rewrite(plan: Plan, grafting: Grafting) -> None:
    """Rows and decays into the operator, its rows back into the product's layout."""
    call, sizes = plan.call, plan.sizes
    rows = [as_rows(call, name, layout, grafting) for name, layout in LAYOUTS.items()]
    out = grafting.call(
        decayed_linear._opoverload,
        *rows,
        log_decay(plan, grafting),
        own_state(grafting, "state", (sizes["H"], sizes["D"], sizes["V"]), torch.float32),
        *sequences(grafting),
        shape=(TOKENS, sizes["H"], sizes["V"]),
        dtype=call.closer.meta["dtype"],
    )
    replace_call(call, out, LAYOUTS["value"], grafting)


def log_decay(plan: Plan, grafting: Grafting) -> fx.Node:
    """[H] float32: log(D[h, age_h, 0]) / age_h."""
    stored = plan.call.node("decays")
    _, heads, block, _ = shape_of(stored)
    dtype, single = stored.meta["dtype"], torch.float32
    held = getattr(grafting.captured.module, str(stored.target))
    ages = grafting.constant("ages", plan.ages[:, None].to(held.device))
    head = grafting.call(aten.select.int, stored, 0, 0, shape=(heads, block, block), dtype=dtype)
    column = grafting.call(aten.select.int, head, 2, 0, shape=(heads, block), dtype=dtype)
    at_age = grafting.call(aten.gather.default, column, 1, ages, shape=(heads, 1), dtype=dtype)
    if dtype != single:
        at_age = grafting.call(aten._to_copy.default, at_age, shape=(heads, 1), dtype=single)
        at_age.kwargs = {"dtype": single}
    log = grafting.call(aten.log.default, at_age, shape=(heads, 1), dtype=single)
    step = grafting.call(aten.div.Tensor, log, ages, shape=(heads, 1), dtype=single)
    return grafting.call(aten.select.int, step, 1, 0, shape=(heads,), dtype=single)


def fold_zeros(captured: CapturedGraph) -> int:
    """Leave out what is added to nothing: products with a tensor of zeros, as a state that no history has filled."""
    zeros: set[fx.Node] = set()
    folded = 0
    for node in list(captured.graph.nodes):
        spreads = is_aten(node, *SPREADS_ZEROS) and any(o in zeros for o in node.all_input_nodes)
        if spreads or _is_zeros(node):
            zeros.add(node)
        elif is_aten(node, "add") and len(node.args) == 2 and not node.kwargs:
            for one, other in (node.args, node.args[::-1]):
                if one in zeros and isinstance(other, fx.Node) and _alike(node, other):
                    node.replace_all_uses_with(other)
                    folded += 1
                    break
    return folded


def _is_zeros(node: fx.Node) -> bool:
    return is_aten(node, "zeros", "new_zeros", "zeros_like") or (
        is_aten(node, "full") and node.args[1] == 0
    )


def _alike(node: fx.Node, other: fx.Node) -> bool:
    return all(node.meta[fact] == other.meta[fact] for fact in ("shape", "dtype"))


ZEROS = GraphPass("zeros", fold_zeros)

PASS = Pass(
    "decayed_scan",
    kind="decayed_linear",
    operator="regraft::decayed_linear",
    pattern=pattern,
    check=check,
    rewrite=rewrite,
)
