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
from torch._dynamo.variables.builder import VariableBuilder
from torch._guards import Source

from .dynamo_inputs import mark_dynamic, source_name

NAME = "position_ids"


def with_unused_inputs(module: fx.GraphModule, examples: Sequence[Any]) -> list[Any]:
    """Add the caller's position_ids to the graph's inputs, behind the others, if they are none. Returns the examples
    of all inputs.
    """
    before = list(module.graph.find_nodes(op="placeholder"))
    sources = [source_name(node) for node in before]
    if any(name.endswith(f"['{NAME}']") for name in sources):
        return list(examples)
    ids = next(
        (node for node, name in zip(before, sources) if name.endswith("['input_ids']")), None
    )
    found = _given(ids)
    if found is None:
        return list(examples)
    source, value = found
    tx = InstructionTranslator.current_tx().output.root_tx
    unmark = mark_dynamic(value)
    VariableBuilder(tx, source)(value)
    unmark()
    added = [node for node in module.graph.find_nodes(op="placeholder") if node not in before]
    assert list(module.graph.find_nodes(op="placeholder")) == before + added
    for node in added:
        node._dynamo_source = node.meta["grapharg"].source
    module.recompile()
    return [*examples, *(node.meta["grapharg"].example for node in added)]


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
