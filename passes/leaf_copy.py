"""The graph of a module leaf that was looked into after all, copied to where the leaf is in the model's graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx, nn

from regraft.rewriter.leaf_trace import ROWS, LeafTrace
from regraft.rewriter.pattern import Grafting


def copy_leaf(
    trace: LeafTrace,
    module: nn.Module | None,
    path: str,
    inputs: Mapping[fx.Node, fx.Node],
    grafting: Grafting,
) -> fx.Node:
    """Copy the trace of a module like the `module` at `path`; returns what stands for its result.

    `inputs` gives, for each input of the trace that is read, what stands for it in the model's graph. Weights are the
    module's own (None where `inputs` stand for all of them too), constants that a pass made are copied along.
    """
    copies, captured = dict(inputs), trace.captured
    for node in captured.graph.nodes:
        if node in copies or node.op in ("placeholder", "output"):
            continue
        if node.op != "get_attr":
            copies[node] = _copy(node, copies, path, grafting)
            continue
        attribute = str(node.target)
        if attribute not in captured.weight_names:
            copies[node] = grafting.constant(attribute, getattr(captured.module, attribute))
        elif not captured.weight_names[attribute].startswith(ROWS):
            assert module is not None, f"nothing stands for {attribute}"
            name = trace.weight_name(attribute, path)
            own = operator.attrgetter(name.removeprefix(f"{path}."))(module)
            copies[node] = grafting.weight(name, own)
    return copies[captured.logits]


def _copy(
    node: fx.Node, copies: Mapping[fx.Node, fx.Node], path: str, grafting: Grafting
) -> fx.Node:
    with grafting.graph.inserting_before(grafting.region.closer):
        copy = grafting.graph.node_copy(node, lambda old: copies[old])
    within = node.meta.get("path", "").removeprefix("module").strip(".")
    copy.meta["path"] = ".".join(part for part in (path, within) if part)
    grafting.made.append(copy)
    return copy
