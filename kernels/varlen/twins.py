"""Which operator without caches does the work of which one with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import attention, recurrent  # noqa: F401 (they register the operators)


@dataclass(frozen=True)
class Twin:
    """An operator without caches. Its arguments have the names that they have in its stateful twin."""

    operator: torch._ops.OpOverload

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.operator._schema.arguments)

    def arguments(self, call: fx.Node) -> tuple[Any, ...]:
        """The twin's arguments, taken from a call of the stateful operator."""
        given = all_arguments(call)
        return tuple(given[name] for name in self.names)


def all_arguments(call: fx.Node) -> dict[str, Any]:
    """Every argument of an operator's call by name, defaults filled in."""
    schema = call.target._schema.arguments
    given = dict(zip((argument.name for argument in schema), call.args)) | dict(call.kwargs)
    return {argument.name: given.get(argument.name, argument.default_value) for argument in schema}


STATELESS: dict[str, Twin] = {
    f"regraft::{name}": Twin(
        getattr(torch.ops.regraft, f"varlen_{name.removeprefix('paged_')}").default
    )
    for name in (
        "paged_attention",
        "causal_conv",
        "causal_window",
        "gated_delta_rule",
        "kda",
        "ssd",
        "selective_scan",
        "decayed_linear",
    )
}
"""Qualified name of an operator that keeps rows or states -> its twin."""
