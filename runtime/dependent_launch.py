"""Inductor, with kernels that are set up while the one before them ends (see `kernels/dependent.py`), where all wait.

Inductor can write such kernels, but some that read nothing do not wait for the kernel before them: then a kernel behind
it could start too early. What was generated is looked through, and compiled the common way if one does not wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from regraft.kernels.dependent import is_dependent

_KERNEL = "async_compile.triton("
_WAIT = "gdc_wait()"


def compile_graph(
    graph: fx.GraphModule, examples: list[Any], device: torch.device
) -> Callable[..., Any]:
    """`graph` under Inductor for a step on `device`."""
    if not is_dependent(device):
        return torch._inductor.compile(graph, examples)
    with _generated() as sources:
        compiled = torch._inductor.compile(graph, examples, options={"triton.enable_pdl": True})
    if sources and all(map(all_wait, sources)):
        return compiled
    return torch._inductor.compile(graph, examples)


def all_wait(source: str) -> bool:
    """Whether every Triton kernel in a program of Inductor's waits for the one before it."""
    return all(_WAIT in kernel for kernel in source.split(_KERNEL)[1:])


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
