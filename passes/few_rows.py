"""Projections -> `regraft::linear`, which has a kernel of its own for the few rows of a decode step.

    before   linear(x, W, b)
    after    regraft.linear(x, W, b)

For half-precision weights that are plain tensors, on a card that fetches tiles by itself. A rounding apart, the same
numbers: this comes after the proof.
"""

from __future__ import annotations

import torch
from torch import fx

from regraft.kernels.device import fetches_tiles
from regraft.kernels.linear import linear
from regraft.rewriter.graph import CapturedGraph, is_aten, is_row

HALF = (torch.bfloat16, torch.float16)


def take_few_rows(captured: CapturedGraph) -> int:
    """Replaces every such projection, in place; how many."""
    count = 0
    for node in list(captured.graph.nodes):
        if is_aten(node, "linear") and _is_plain(node, captured.module):
            x, weight, *rest = node.args
            bias = rest[0] if rest else None
            if bias is None or is_row(bias):
                node.target, node.args = linear, (x, weight, bias)
                count += 1
    captured.module.recompile()
    return count


def _is_plain(node: fx.Node, module: fx.GraphModule) -> bool:
    operand = node.args[1]
    if node.kwargs or not isinstance(operand, fx.Node) or operand.op != "get_attr":
        return False
    weight = getattr(module, str(operand.target))
    is_plain = type(weight.data) is torch.Tensor and weight.dim() == 2 and weight.dtype in HALF
    return is_plain and node.meta["dtype"] == weight.dtype and fetches_tiles(weight.device)
