"""Positions that a caller gives and a model never looks at: still inputs, as they say where sequences begin.

Dynamo leaves an argument that nothing reads out of its graph. A model without positions (attention with ALiBi, a
state space model) reads none, and yet a packed row's `position_ids` are what keeps its sequences apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import DictGetItemSource, LocalSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.builder import GraphArg, VariableBuilder
from torch._guards import Source

from .dynamo_inputs import mark_dynamic, source_name

NAME = "position_ids"


def with_unused_inputs(module: fx.GraphModule, examples: Sequence[Any]) -> list[Any]:
    """Add the caller's position_ids to the graph's inputs, behind the others, if they are none. Returns the examples
    of all inputs.
    """
    found = unread_positions(module)
    if found is None:
        return list(examples)
    before = list(module.graph.find_nodes(op="placeholder"))
    source, value = found
    tx = InstructionTranslator.current_tx().output.root_tx
    unmark = mark_dynamic(value)
    known = tx.output.side_effects.id_to_variable.get(id(value))
    if known is None:
        known = VariableBuilder(tx, source)(value)
    if len(module.graph.find_nodes(op="placeholder")) == len(before):
        _back(tx, source, value, known.as_proxy().node.meta["example_value"])
    unmark()
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    added = placeholders[len(before) :]
    assert placeholders[: len(before)] == before
    # Without them a packed row would be served as one text.
    assert added, f"{source.name} is no input"
    for node in added:
        node._dynamo_source = node.meta["grapharg"].source
    module.recompile()
    return [*examples, *(node.meta["grapharg"].example for node in added)]


def _back(tx: Any, source: Source, value: torch.Tensor, fake: Any) -> None:
    """As an input again: the model handed it on and nothing read it. Dynamo knows it, guards it, and has dropped it
    (by the object, or in torch 2.11 by the source).
    """
    node = tx.output.root_tracer.create_graph_input(NAME, type(value), fake, source=source).node
    node.meta["grapharg"] = GraphArg(source, value, False, fake)
    node.meta["example_value"] = fake


def unread_positions(module: fx.GraphModule) -> tuple[Source, torch.Tensor] | None:
    """The caller's position_ids where they are no input of the graph."""
    nodes = {source_name(node): node for node in module.graph.find_nodes(op="placeholder")}
    if any(name.endswith(f"['{NAME}']") for name in nodes):
        return None
    return _given(next((n for name, n in nodes.items() if name.endswith("['input_ids']")), None))


def _given(ids: fx.Node | None) -> tuple[Source, torch.Tensor] | None:
    """Beside input_ids, or else among the keyword arguments of the traced method."""
    given = InstructionTranslator.current_tx().output.root_tx.f_locals
    named = given.get("kwargs")
    if isinstance(given.get(NAME), torch.Tensor):
        return LocalSource(NAME, is_input=True), given[NAME]
    if isinstance(named, dict) and isinstance(named.get(NAME), torch.Tensor):
        return DictGetItemSource(LocalSource("kwargs", is_input=True), NAME), named[NAME]
    source = None if ids is None else ids._dynamo_source
    if isinstance(source, DictGetItemSource) and isinstance(source.base, LocalSource):
        batch = given.get(source.base.local_name)
        if isinstance(batch, dict) and isinstance(batch.get(NAME), torch.Tensor):
            return dataclasses.replace(source, index=NAME), batch[NAME]
    return None
