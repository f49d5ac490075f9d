"""Running a module whose weights are on the meta device, for the shapes of its results.

Fake tensors do as long as no code looks at values (`.item()`, `nonzero`). Where a module does, a twin of it on the CPU
runs: its weights are all zero and take no memory (one zero each, expanded), and so are the arguments it is given.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils import _pytree as pytree

from .module_leaf import owned_tensors, set_tensor


def shapes_only() -> contextlib.AbstractContextManager[object]:
    """A context in which new tensors are fake, and a model knows that it is being traced."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def on_meta(module: nn.Module) -> bool:
    """Whether any tensor of the module is on the meta device."""
    return any(tensor.device.type == "meta" for _, _, tensor in owned_tensors(module))


def off_meta(module: nn.Module) -> Callable[..., Any]:
    """The module's forward under `shapes_only`; run by a twin on the CPU if it looks at values."""
    plain = module.forward  # what is in its place later is this function

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return plain(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return by_twin(*args, **kwargs)

    def by_twin(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():  # in which a copy of a buffer is one, and no fake
            twin = _twin(module)
            args, kwargs = pytree.tree_map_only(
                torch.Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype), (args, kwargs)
            )
            output = twin(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), output)

    return forward


def _twin(module: nn.Module) -> nn.Module:
    twin = copy.deepcopy(module)
    vars(twin).pop("forward", None)  # a recorder's
    for owner, name, tensor in list(owned_tensors(twin)):
        set_tensor(owner, name, _zeros(tensor))
    return twin


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
