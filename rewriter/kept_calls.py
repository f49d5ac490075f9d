"""Modules that were kept whole in a Dynamo graph: one call each, that runs the module itself when the graph is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from .leaf_shapes import ShapeOf
from .opaque import OpaqueModules


@dataclass(frozen=True)
class KeptCall:
    """One call of a kept module: `node.target.regraft_kept` in a Dynamo graph."""

    opaque: OpaqueModules
    path: str
    number: int
    module: nn.Module

    def emit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operator `regraft::module_leaf` in its place, in a trace over one row. Raises LeafUnsupported.

        The first argument is what the model has written by now into tensors that the module holds.
        """
        written, *given = args
        sizes = [size for leaf in pytree.tree_leaves((args, kwargs)) for size in _sizes(leaf)]
        symbols = {symbol for size in sizes for symbol in size.node.expr.free_symbols}
        symbol = symbols.pop() if len(symbols) == 1 else None
        forward = self.module.forward
        return self.opaque.call(
            self.path, self.number, forward, tuple(given), kwargs, symbol, written
        )


def kept_call_of(node: fx.Node) -> KeptCall | None:
    """What a node of a Dynamo graph stands for, if it calls a kept module."""
    call = getattr(node.target, "regraft_kept", None)
    return call if isinstance(call, KeptCall) else None


def stand_in(call: KeptCall, shapes: Any) -> Callable[..., Any]:
    """A function that Dynamo puts into its graph as one call. `shapes` is its result, ShapeOf in place of tensors."""

    def module_call(written: Any, *args: Any, **kwargs: Any) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        if not any(isinstance(value, FakeTensor) for value in given):
            return call.module.forward(*args, **kwargs)
        weights = call.module.parameters()
        history = torch.is_grad_enabled() and any(
            t.requires_grad for t in (*given, *weights) if isinstance(t, torch.Tensor)
        )

        def fake(shape: Any) -> Any:
            if not isinstance(shape, ShapeOf):
                return shape
            empty = torch.empty(shape.shape, dtype=shape.dtype, device=shape.device)
            # as a real result would be: what takes it for a constant would stop the gradient
            has = history and shape.dtype.is_floating_point
            return empty.requires_grad_() * 1 if has else empty

        return pytree.tree_map(fake, shapes)

    module_call.regraft_kept = call  # type: ignore[attr-defined]
    return module_call


def _sizes(value: Any) -> list[torch.SymInt]:
    sizes = value.shape if isinstance(value, torch.Tensor) else [value]
    return [size for size in sizes if isinstance(size, torch.SymInt)]
