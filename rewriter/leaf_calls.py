"""Leaf functions in a Dynamo graph: one call each, that runs the function itself when the graph is run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from .leaves import Leaf, LeafUnsupported, output_dtype, register_function

STATE_SHAPES: dict[str, Callable[[dict[str, torch.Tensor]], tuple[int, ...]]] = {
    # the batch, heads, width of keys, width of values
    "chunk_gated_delta_rule": lambda of: (
        of["value"].shape[0],
        of["value"].shape[2],
        of["key"].shape[3],
        of["value"].shape[3],
    ),
    "chunk_kda": lambda of: (
        of["value"].shape[0],
        of["value"].shape[2],
        of["key"].shape[3],
        of["value"].shape[3],
    ),
    # the batch, heads, width, states
    "mamba_chunk_scan_combined": lambda of: (
        of["B"].shape[0],
        *of["hidden_states"].shape[2:],
        of["B"].shape[3],
    ),
    # the batch, channels, states
    "selective_scan_fn": lambda of: (of["dt"].shape[0], *of["A"].shape),
}
"""Shapes of the final states, float32, by kernel name."""

_MADE: dict[int, tuple[Any, LeafCall, Callable[..., Any]]] = {}
"""Stand-ins by the id of the function they stand for, which is kept with them."""


@dataclass(frozen=True)
class LeafCall:
    """What a stand-in stands for."""

    leaf: Leaf
    key: str
    function: Callable[..., Any]
    marked: Callable[..., Any]

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name, those left out with their defaults, those that the function ignores dropped."""
        signature = inspect.signature(self.function)
        accepted = {name: value for name, value in kwargs.items() if name in signature.parameters}
        bound = signature.bind(*args, **accepted)
        bound.apply_defaults()
        values = dict(bound.arguments)
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                values.pop(parameter.name, None)
        return values

    def wants_state(self, values: dict[str, Any]) -> bool:
        """Whether the caller also asks for the final state."""
        return bool(self.leaf.final_state_argument and values[self.leaf.final_state_argument])

    def result(self, output: Any, state: Any, values: dict[str, Any]) -> Any:
        """What the function returns."""
        if self.wants_state(values):
            return output, state
        return (output, None) if self.leaf.returns_pair else output

    def emit(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: Any) -> Any:
        """The leaf's operator in place of the call; `state` stands for a final state that is asked for."""
        values = self.bind(args, kwargs)
        wanted = [argument.name for argument in self.leaf.operator._schema.arguments][:-1]  # type: ignore[attr-defined]
        if values.keys() != set(wanted):
            raise LeafUnsupported(
                f"{self.key} called with what {self.leaf.operator_name} lacks: {values.keys()}"
            )
        given = dict(values)
        if self.leaf.final_state_argument:
            given[self.leaf.final_state_argument] = False
        output = self.leaf.operator(*(given[name] for name in wanted), self.key)
        return self.result(output, state, values)


def stand_in(leaf: Leaf, marked: Any) -> Callable[..., Any]:
    """A function that Dynamo puts into its graph as one call, in place of the marked one."""
    if id(marked) in _MADE:
        return _MADE[id(marked)][2]
    key, function = register_function(marked)
    call = LeafCall(leaf, key, function, marked)

    def leaf_call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values())):
            return _shapes(call, args, kwargs)
        return marked(*args, **kwargs)

    leaf_call.regraft_leaf = call  # type: ignore[attr-defined]
    torch.compiler.allow_in_graph(leaf_call)
    _MADE[id(marked)] = marked, call, leaf_call
    return leaf_call


def leaf_call_of(node: fx.Node) -> LeafCall | None:
    """What a node of a Dynamo graph stands for, if it calls a stand-in."""
    call = getattr(node.target, "regraft_leaf", None)
    return call if isinstance(call, LeafCall) else None


def _shapes(call: LeafCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = call.bind(args, kwargs)
    like = values[call.leaf.output_like]
    dtype = output_dtype(call.leaf, values)
    output = torch.empty(like.shape, dtype=dtype, device=like.device)
    state = None
    if call.wants_state(values):
        state = torch.empty(STATE_SHAPES[call.leaf.name](values), device=like.device)
        state = _made_of(values, state)
    return call.result(_made_of(values, output), state, values)


def _made_of(values: dict[str, Any], result: torch.Tensor) -> torch.Tensor:
    """A fake result with the history that a real one has: what takes it for a constant would stop the gradient."""
    tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        if tensor.requires_grad:
            result = result + tensor.sum().to(result.dtype)
    return result
