"""Rows that are rounded more coarsely than the model's dtype: to whole numbers of a byte, say, before a product.

Where a number lies between two of those, the last bit of what comes before decides which one it becomes, and logits
jump by more than that dtype's rounding: between any two ways to run such a model, its own two among them.
"""

from __future__ import annotations

import torch
from torch import fx

from .graph import describe
from .token_axis.analysis import ROW_WISE
from .token_axis.value import has_tokens

WIDE = (torch.float32, torch.float64)


def coarse_rounding(graph: fx.Graph, dtype: torch.dtype) -> str:
    """The first operation that rounds rows of float32 or float64 to a smaller dtype; empty if there is none, and for a
    model whose own dtype is no more than half precision.

    What an operator without a rule computes in is not known: it counts as one.
    """
    for node in graph.nodes if dtype in WIDE else ():
        if node.op == "call_function" and _has_rows(node):
            wide = any(_has_rows(o) and o.meta["dtype"] in WIDE for o in node.all_input_nodes)
            if wide and (_is_small(node.meta["dtype"]) or ROW_WISE in node.meta):
                return describe(node)
    return ""


def _is_small(dtype: torch.dtype) -> bool:
    return dtype.itemsize < 4 and dtype != torch.bool


def _has_rows(node: fx.Node) -> bool:
    return any(map(has_tokens, node.meta.get("shape") or ()))
