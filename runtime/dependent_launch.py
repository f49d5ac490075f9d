"""Inductor, with kernels set up while the one before them ends, where that is sound (see `kernels/dependent.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from regraft.kernels.dependent import is_dependent

from .launch_order import keeps_order

COMMON = (
    "compiled layers whose kernels start when the one before is done, not while it ends: Inductor's program for early "
    "launches is not known to keep their order"
)


def compile_graph(
    graph: fx.GraphModule, examples: list[Any], device: torch.device, notes: list[str]
) -> Callable[..., Any]:
    """`graph` under Inductor for a step on `device`. What it generates for early launches is read again, and compiled
    the common way unless it is known to keep the order; `notes` then says so, once.
    """
    if not is_dependent(device):
        return torch._inductor.compile(graph, examples)
    with _generated() as sources:
        compiled = torch._inductor.compile(graph, examples, options={"triton.enable_pdl": True})
    if sources and all(map(keeps_order, sources)):
        return compiled
    if COMMON not in notes:
        notes.append(COMMON)
    return torch._inductor.compile(graph, examples)


@contextlib.contextmanager
def _generated() -> Iterator[list[str]]:
    """The programs that Inductor generates, or finds in its cache, meanwhile."""
    from torch._inductor.graph import GraphLowering

    sources: list[str] = []
    before = GraphLowering.save_output_code
    GraphLowering.save_output_code = sources.append
    try:
        yield sources
    finally:
        GraphLowering.save_output_code = before
