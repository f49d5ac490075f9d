"""Functions of a packed row as captured graphs, to test what is read off them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn

from regraft.rewriter.capture import capture
from regraft.rewriter.graph import CapturedGraph


class FunctionModel(nn.Module):
    """A model whose logits [1, T, 2] depend on each element of `function(input_ids, position_ids)`."""

    def __init__(
        self, function: Callable[[Tensor, Tensor], Tensor], buffers: dict[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.function = function
        self.unused = nn.Parameter(torch.zeros(1))
        for name, value in (buffers or {}).items():
            self.register_buffer(name, value)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False
    ) -> SimpleNamespace:
        buffers = dict(self.named_buffers())
        result = self.function(input_ids, position_ids, **buffers).sum()
        return SimpleNamespace(logits=input_ids[..., None].expand(-1, -1, 2) + result)


def captured(function: Callable[..., Tensor], **buffers: Tensor) -> CapturedGraph:
    """The graph of `function(input_ids [1, T], position_ids [1, T], **buffers)`."""
    return capture(FunctionModel(function, buffers))


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.results: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.results[n] = super().run_node(n)
        return self.results[n]


@torch.no_grad()
def values(graph: CapturedGraph, input_ids: Tensor, position_ids: Tensor) -> dict[fx.Node, Any]:
    """What every node computes."""
    recorder = _Recorder(graph.module)
    recorder.run(input_ids, position_ids)
    return recorder.results
