"""The call that Dynamo is tracing, to be made again by the model itself over other tokens."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.utils import _pytree as pytree

from .dynamo_inputs import TOKEN_NAMES
from .leaf_shapes import CONSTANTS
from .opaque import ROWS, example_row


@dataclass(frozen=True)
class FrameCall:
    """A call of `module`'s forward. Tensors that are no token inputs (labels) are None in it.

    `given` are the token inputs by name.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    given: Mapping[str, Tensor]

    def run(self, ids: Tensor, positions: Tensor) -> Any:
        """The model's own forward over `ids` and `positions` [B, T], nothing padded; what is left of it is its result.

        Neither the trace that may be going on nor random numbers notice.
        """
        fresh = {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": torch.ones_like(ids),
        }

        def renewed(value: Any) -> Any:
            if not isinstance(value, _Token):
                return value
            like = self.given.get(value.name, ids)
            return fresh[value.name].to(like.dtype)

        args, kwargs = pytree.tree_map(renewed, (self.args, dict(self.kwargs)))
        with torch._guards.tracing(None), torch.no_grad(), _same_random_numbers(ids):
            return self.module.forward(*args, **kwargs)

    def run_row(self, length: int) -> Any:
        """Over one row of this many tokens."""
        return self.run(*example_row(length, self._device))

    def run_rows(self, length: int) -> Any:
        """Over ROWS such rows."""
        ids, positions = example_row(length, self._device)
        return self.run(ids.repeat(ROWS, 1), positions.repeat(ROWS, 1))

    @property
    def _device(self) -> torch.device:
        return self.given["input_ids"].device


@dataclass(frozen=True)
class _Token:
    """In place of a token input."""

    name: str


def frame_call() -> FrameCall | None:
    """The call of the traced frame; None if the frame is no call of a module's forward, or one with other things in it
    than token ids, constants and tensors.
    """
    tx = InstructionTranslator.current_tx().output.root_tx
    module, code = tx.f_locals.get("self"), tx.f_code
    if not isinstance(module, nn.Module) or "forward" in vars(module):
        return None
    if getattr(type(module).forward, "__code__", None) is not code:
        return None  # what comes after a graph break, say
    args, kwargs = _arguments(code, tx.f_locals)
    given: dict[str, Tensor] = {}

    def kept(value: Any, name: str) -> Any:
        if isinstance(value, Tensor) and name in TOKEN_NAMES:
            given[name] = value
            return _Token(name)
        if isinstance(value, (dict, list, tuple)):
            return pytree.tree_map(lambda leaf: kept(leaf, ""), value)
        return None if isinstance(value, Tensor) else value

    parameters = [*inspect.signature(type(module).forward).parameters.values()][1:]
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    if "position_ids" in names and named.get("position_ids") is None:
        named["position_ids"] = _Token("position_ids")  # those of a long row may end a table
    rest = tuple(kept(value, "") for value in args[len(names) :])
    kwargs = {name: kept(value, name) for name, value in named.items()}
    args = () if not rest else tuple(kwargs.pop(name) for name in names) + rest
    plain = (*CONSTANTS, _Token)
    if "input_ids" not in given or not all(
        isinstance(leaf, plain) for leaf in pytree.tree_leaves((args, kwargs))
    ):
        return None
    return FrameCall(module, args, kwargs, given)


def _arguments(code: Any, local: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a frame of this code was called with, but for the first."""
    names, count, rest = code.co_varnames, code.co_argcount, code.co_kwonlyargcount
    args = tuple(local[name] for name in names[1:count])
    kwargs = {name: local[name] for name in names[count : count + rest]}
    more = list(names[count + rest :])
    if code.co_flags & inspect.CO_VARARGS:
        args += tuple(local[more.pop(0)])
    if code.co_flags & inspect.CO_VARKEYWORDS:
        kwargs |= local[more.pop(0)]
    return args, kwargs


@contextlib.contextmanager
def _same_random_numbers(ids: Tensor) -> Iterator[None]:
    with torch.random.fork_rng(devices=[ids.device] if ids.device.type == "cuda" else []):
        yield
