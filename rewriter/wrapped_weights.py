"""Weights of a class of their own, as quantised ones are: what they are made of, and what a trace loses of them.

A *wrapper* is made of plain tensors, which it names itself (`__tensor_flatten__`). A graph reads those, under names
like `layers.0.q_proj.weight.qdata`, so that every operation on them is seen by the proof:

    before   linear(x, weight)                      after   linear(x, qdata.to(float) * scale)

Any other parameter of a class of its own may carry what it needs in attributes. Where a trace puts plain tensors in the
place of parameters, these are given the attributes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .errors import RewriteError

_UNWRAPPED = re.compile(
    r"(?P<path>(?:.+\.)?)parametrizations\.(?P<name>\w+)\.original(?P<number>\d+)"
)
"""How torch.export calls the tensors of a wrapper that it has taken apart."""

WRAP_AGAIN = "wrap the model again, or undo that"


def is_wrapper(value: object) -> bool:
    """Whether this is a tensor that is made of others."""
    return isinstance(value, torch.Tensor) and bool(is_traceable_wrapper_subclass(value))


def plain_parts(tensor: torch.Tensor, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that a wrapper is made of, by dotted names; any other tensor is its own one part."""
    if not is_wrapper(tensor):
        yield name, tensor
        return
    attributes, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for attribute in attributes:
        yield from plain_parts(getattr(tensor, attribute), f"{name}.{attribute}")


def find_weight(target: str, held: Mapping[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    """The weight that an exported program calls `target`: its name in the model, and itself."""
    match = None if target in held else _UNWRAPPED.fullmatch(target)
    if match is None:
        return target, held[target]
    name = match["path"] + match["name"]
    return list(plain_parts(held[name], name))[int(match["number"])]


def reads_part(node: fx.Node) -> bool:
    """Whether a node takes a tensor out of a wrapper: (wrapper, its name there)."""
    return node.target is torch.ops.export.access_subclass_inner_tensor.default


def _held(owner: nn.Module, name: str) -> torch.Tensor | None:
    tensor = owner._parameters.get(name)
    return owner._buffers.get(name) if tensor is None else tensor


def weight_of(owner: nn.Module, name: str) -> torch.Tensor:
    """A tensor that a module holds, or a part of it ("weight.qdata"). Raises RewriteError if it is not there."""
    whole = _held(owner, name)
    if whole is not None:  # nearly always, and every weight is looked up in every step
        return whole
    root, *inner = name.split(".")
    held = _held(owner, root)
    found: torch.Tensor = getattr(owner, root) if held is None else held
    for attribute in inner:
        if not hasattr(found, attribute):
            raise RewriteError(
                f"{name} was a part of a weight when the model was wrapped; that is a {type(found).__name__} now",
                fix=WRAP_AGAIN,
            )
        found = getattr(found, attribute)
    return found


@dataclass(frozen=True)
class Carried:
    """Parameters of a class of their own that are no wrappers: (module, name, parameter, its attributes)."""

    parameters: tuple[tuple[nn.Module, str, nn.Parameter, dict[str, Any]], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Carried:
        return cls(
            tuple(
                (module, name, parameter, dict(vars(parameter)))
                for module in model.modules()
                for name, parameter in module._parameters.items()
                if parameter is not None
                and type(parameter) is not nn.Parameter
                and not is_wrapper(parameter)
            )
        )

    def give_back(self) -> None:
        """To what stands in the place of the parameters."""
        for module, name, parameter, attributes in self.parameters:
            stand_in = module._parameters[name]
            if stand_in is not parameter:
                for attribute, value in attributes.items():
                    vars(stand_in).setdefault(attribute, value)
