"""The product of a rewrite: a callable graph, the caches it declares, and the model's own live weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from .declare import RowSpec, StateSpec


@dataclass
class Artifact:
    """A proven graph over one packed row. `forward` takes every input by name (see runtime/batch.py).

    rows, states       caches to allocate, by name
    max_positions      longest sequence that the graph is right for, None if any
    min_tokens         shortest packed row that the graph runs on
    switch_lengths     a request must be recomputed from its start when its length passes one of these
    """

    module: fx.GraphModule
    input_names: tuple[str, ...]
    rows: tuple[RowSpec, ...]
    states: tuple[StateSpec, ...]
    vocab_size: int
    max_positions: int | None
    dtype: torch.dtype
    device: torch.device
    min_tokens: int = 1
    switch_lengths: tuple[int, ...] = ()
    weights: "LiveWeights" = field(default_factory=lambda: LiveWeights(()))

    def forward(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits [S, vocab] of the rows named by `logits_rows`."""
        logits: torch.Tensor = self.module(*[inputs[name] for name in self.input_names])[0]
        return logits.reshape(-1, logits.shape[-1])

    def weights_version(self) -> int:
        """Changes when a weight of the wrapped model was changed in place or replaced."""
        return self.weights.refresh(self.module)


@dataclass
class LiveWeights:
    """The graph reads the model's own tensors. A tensor changed in place counts up; a replaced one is read anew."""

    slots: tuple[tuple[nn.Module, str, str], ...]
    """(module of the wrapped model, name in it, attribute of the graph module)"""
    replaced: int = 0

    @classmethod
    def of(cls, model: nn.Module, names: Mapping[str, str]) -> "LiveWeights":
        """`names`: attribute of the graph module -> the weight's full name in `model`."""
        slots = []
        for attribute, full in names.items():
            prefix, _, name = full.rpartition(".")
            slots.append((model.get_submodule(prefix), name, attribute))
        return cls(tuple(slots))

    def refresh(self, module: fx.GraphModule) -> int:
        version = self.replaced
        for owner, name, attribute in self.slots:
            tensor = owner._parameters.get(name)
            if tensor is None:
                tensor = owner._buffers.get(name)
            if tensor is None:
                tensor = getattr(owner, name)
            held = getattr(module, attribute)
            if tensor is not held:
                self.replaced += 1 << 32
                version += 1 << 32
                _assign(module, attribute, tensor)
            version += tensor._version
        return version


def _assign(module: fx.GraphModule, attribute: str, tensor: torch.Tensor) -> None:
    if attribute in module._parameters:
        module._parameters[attribute] = tensor  # type: ignore[assignment]
    elif attribute in module._buffers:
        module._buffers[attribute] = tensor
    else:
        setattr(module, attribute, tensor)
