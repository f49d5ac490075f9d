"""Logits only for the rows that are sampled.

    before   linear(hidden [1, T, H]) -> ... -> logits [1, T, vocab]
    after    linear(index_select(hidden, 1, logits_rows)) -> ... -> logits [1, S, vocab]

Runs after the proof, which is about all rows. From the last projection on, operations are row-local and read nothing
else that has rows, so computing fewer rows changes none of them.
"""

from __future__ import annotations

import torch
from torch import fx

from regraft.rewriter.graph import CapturedGraph, is_aten, shape_of
from regraft.rewriter.pipeline import Rewriting
from regraft.rewriter.token_axis.value import has_tokens

PASSED = "linear matmul addmm mul div add sub tanh _to_copy slice neg clamp unsqueeze".split()


def select_rows(state: Rewriting) -> None:
    """Insert the selection in front of the last projection, or behind the logits where none is found."""
    captured = state.captured
    reader, node = _last_projection(captured)
    shape = shape_of(node)
    dim = next(d for d, size in enumerate(shape) if has_tokens(size))
    rows = state.inputs.get("logits_rows") or state.new_input("logits_rows")
    state.inputs["logits_rows"] = rows
    with captured.graph.inserting_after(node):
        picked = captured.graph.call_function(
            torch.ops.aten.index_select.default, (node, dim, rows)
        )
    picked.meta.update(node.meta)
    reader.replace_input_with(node, picked)
    captured.module.recompile()


def _last_projection(captured: CapturedGraph) -> tuple[fx.Node, fx.Node]:
    """(the operation that reads the rows, the rows)."""
    found = (captured.graph.output_node(), captured.logits)
    node = captured.logits
    while is_aten(node, *PASSED):
        rows = [
            n
            for n in node.all_input_nodes
            if n.meta.get("shape") is None or any(map(has_tokens, shape_of(n)))
        ]
        if len(rows) != 1 or rows[0].meta.get("shape") is None:
            break
        if is_aten(node, "linear", "matmul", "addmm"):
            found = (node, rows[0])
        node = rows[0]
    return found
