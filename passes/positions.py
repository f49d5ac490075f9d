"""arange(T) used as a position: the row's own index -> the token's index in its request.

    before   temperature = f(arange(T))            right only for a single sequence that starts at row 0
    after    temperature = f(position_ids[0])      right for every request in a packed row

A count from another start, or in other steps, is the same of `start + step * position`. Not for one whose start or
step is no constant integer, or of another length than the row's: those are replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from regraft.rewriter.graph import TOKENS, is_aten, shape_of
from regraft.rewriter.pattern import Declined, Grafting, Pass, Region


@dataclass(frozen=True)
class Index:
    """An arange over the packed row."""

    node: fx.Node
    start: object
    step: object


def pattern(region: Region) -> Index | Declined:
    node = region.closer
    if not is_aten(node, "arange"):
        return Declined("the region is not a row index (arange)", node)
    overload = node.target._overloadname
    start = node.args[0] if overload in ("start", "start_step") else 0
    step = node.args[2] if overload == "start_step" and len(node.args) > 2 else 1
    return Index(node, start, step)


def check(found: Index) -> Index | Declined:
    if type(found.start) is not int or type(found.step) is not int:
        return Declined("the arange has a start or a step that is no constant", found.node, 0.5)
    if shape_of(found.node) != (TOKENS,):
        return Declined("the arange does not count the tokens of the row", found.node, 0.5)
    return found


def rewrite(found: Index, grafting: Grafting) -> None:
    aten = torch.ops.aten
    dtype = found.node.meta["dtype"]
    positions = grafting.inputs["position_ids"]
    rows = grafting.call(aten.select.int, positions, 0, 0, shape=(TOKENS,), dtype=torch.int64)
    for operation, operand, neutral in (
        (aten.mul.Tensor, found.step, 1),
        (aten.add.Tensor, found.start, 0),
    ):
        if operand != neutral:
            rows = grafting.call(operation, rows, operand, shape=(TOKENS,), dtype=torch.int64)
    if dtype != torch.int64:
        rows = grafting.call(aten._to_copy.default, rows, dtype=dtype, shape=(TOKENS,))
    grafting.replace(found.node, rows)
    grafting.mask = "index = position in the request"


PASS = Pass("positions", "position", "position_ids", pattern, check, rewrite)
