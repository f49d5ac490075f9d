"""The product of a rewrite: a callable graph, the caches it declares, and the model's own live weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import fx, nn

from .declare import RowSpec, StateSpec
from .errors import RewriteError
from .structure import Structure
from .wrapped_weights import WRAP_AGAIN, plain_parts, weight_of


@dataclass
class Artifact:
    """A proven graph over one packed row. `forward` takes every input by name (see runtime/batch.py).

    rows, states       caches to allocate, by name
    max_positions      longest sequence that the graph is right for, None if any
    min_tokens         shortest packed row that the graph runs on
    switch_lengths     a request must be recomputed from its start when its length passes one of these
    structure          what the model was made of when it was traced
    rounding           what rounds rows more coarsely than `dtype`, if anything does (see rewriter/coarse.py)
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
    weights: LiveWeights = field(default_factory=lambda: LiveWeights(()))
    structure: Structure | None = None
    rounding: str = ""

    @property
    def precision(self) -> torch.dtype:
        """The dtype by which differences are judged."""
        return torch.bfloat16 if self.rounding else self.dtype

    def forward(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits [S, vocab] of the rows named by `logits_rows`."""
        logits: torch.Tensor = self.module(*[inputs[name] for name in self.input_names])[0]
        return logits.reshape(-1, logits.shape[-1])

    def weights_version(self) -> int:
        """Changes when a weight of the wrapped model was changed in place or replaced."""
        return self.weights.refresh(self.module)

    def check_structure(self) -> None:
        """Raises RewriteError if the wrapped model is made otherwise now."""
        if self.structure is not None:
            self.structure.check()


@dataclass(frozen=True)
class Merged:
    """The attribute of a graph module that holds the tensors of `parts`, which are views of it, end to end."""

    attribute: str
    parts: tuple[str, ...]


def merge_storage(module: fx.GraphModule, merged: Merged) -> None:
    """Makes the parts, contiguous parameters of one dtype, views into one new tensor, and that an attribute."""
    parts = [module.get_parameter(name) for name in merged.parts]
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts])):
        part.data = view
    module.register_buffer(merged.attribute, whole, persistent=False)


class Kind(NamedTuple):
    """What a graph takes for granted of a weight."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Kind:
        return cls(tensor.dtype, tuple(tensor.shape), tensor.device)

    def __str__(self) -> str:
        return f"{self.dtype} {[*self.shape]} on {self.device}"


@dataclass
class LiveWeights:
    """The graph reads the model's own tensors.

    A tensor changed in place counts up; one that was replaced, or lies elsewhere now, is read anew.
    """

    slots: tuple[tuple[nn.Module, str, str], ...]
    """(module of the wrapped model, name in it, attribute of the graph module); of a part of a weight the name is like
    "weight.qdata".
    """
    merged: tuple[Merged, ...] = ()
    tied: tuple[tuple[nn.Module, str, int, str], ...] = ()
    """Other places that held the tensor of a slot: (module, name in it, number of the slot, what is tied)"""
    kinds: tuple[tuple[str, Kind], ...] = ()
    """Per slot the weight's full name, and of what kind it was when it was traced. A model may itself make a table anew
    that it holds as a buffer, longer or in another dtype: of parameters alone it is asked.
    """
    replaced: int = 0
    _held: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """Per slot the tensor that the graph reads, and its address."""

    @classmethod
    def of(
        cls, model: nn.Module, names: Mapping[str, str], merged: tuple[Merged, ...] = ()
    ) -> LiveWeights:
        """`names`: attribute of the graph module -> the weight's full name in `model`."""
        slots, known = [], []
        for attribute, full in names.items():
            owner, name = _place_of(model, full)
            if hasattr(owner, _root(name)):  # constants of the trace have a name in the graph alone
                slots.append((owner, name, attribute))
                known.append(full)
        kinds = [
            (full, Kind.of(weight_of(owner, name))) for full, (owner, name, _) in zip(known, slots)
        ]
        return cls(tuple(slots), merged, tuple(_tied(model, slots, known)), tuple(kinds))

    def refresh(self, module: fx.GraphModule) -> int:
        """The version: another number whenever contents or place of a weight are others.

        Raises RewriteError if two weights that were one tensor are two now, since the graph reads one tensor for both,
        or if one has another dtype, shape or device.
        """
        self._check_ties()
        if not self._held:
            self._held = self._places(module)
        version, has_moved = 0, False
        for at, (owner, name, attribute) in enumerate(self.slots):
            tensor = weight_of(owner, name)
            held, address = self._held[at]
            if tensor is not held or tensor.data_ptr() != address:
                self._check_kind(at, tensor)
                _assign(module, attribute, tensor)
                has_moved = True
            version += tensor._version
        if has_moved:
            self.replaced += 1 << 32
            self._merge_again(module)
            self._held = self._places(module)
        return version + self.replaced

    def _check_ties(self) -> None:
        for owner, name, at, both in self.tied:
            holder, of_holder, _ = self.slots[at]
            tensor, partner = weight_of(owner, name), weight_of(holder, _root(of_holder))
            if tensor is not partner and not _is_same_memory(tensor, partner):
                raise RewriteError(
                    f"{both} were one tensor when the model was wrapped, and are two now",
                    fix="wrap the model again, or tie them as they were: model.tie_weights()",
                )

    def _check_kind(self, at: int, tensor: torch.Tensor) -> None:
        full, kind = self.kinds[at]
        now = Kind.of(tensor)
        owner, name, _ = self.slots[at]
        if now != kind and isinstance(weight_of(owner, _root(name)), nn.Parameter):
            back = f"wrap the model again, or bring it back: model.to({kind.device.type!r}, {kind.dtype})"
            raise RewriteError(
                f"{full} was {kind} when the model was wrapped, and is {now}",
                fix=back if _root(name) == name else WRAP_AGAIN,
            )

    def _merge_again(self, module: fx.GraphModule) -> None:
        """What was merged and of which a part has moved."""
        for merged in self.merged:
            parts = [getattr(module, name) for name in merged.parts]
            starts = accumulate((part.nbytes for part in parts), initial=0)
            whole = getattr(module, merged.attribute).data_ptr()
            if any(part.data_ptr() != whole + start for part, start in zip(parts, starts)):
                merge_storage(module, merged)

    def _places(self, module: fx.GraphModule) -> list[tuple[torch.Tensor, int]]:
        tensors = [getattr(module, attribute) for _, _, attribute in self.slots]
        return [(tensor, tensor.data_ptr()) for tensor in tensors]


def _tied(
    model: nn.Module, slots: Sequence[tuple[nn.Module, str, str]], names: Sequence[str]
) -> Iterator[tuple[nn.Module, str, int, str]]:
    """The places in `model` of every tensor that a slot holds, but for that slot; `names` are the slots' full names.

    A trace cannot tell them apart: the graph reads one of them for all.
    """
    numbers: dict[int, int] = {}
    for at, (owner, name, _) in enumerate(slots):
        numbers.setdefault(id(weight_of(owner, _root(name))), at)
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            at = numbers.get(id(tensor), -1)
            if at >= 0 and (slots[at][0] is not module or _root(slots[at][1]) != name):
                yield module, name, at, f"{path}.{name} and {names[at]}"


def _is_same_memory(one: torch.Tensor, two: torch.Tensor) -> bool:
    def places(tensor: torch.Tensor) -> list[tuple[str, int, torch.Size, tuple[int, ...]]]:
        parts = plain_parts(tensor, "")
        return [(name, part.data_ptr(), part.shape, part.stride()) for name, part in parts]

    return places(one) == places(two)


def _place_of(model: nn.Module, full: str) -> tuple[nn.Module, str]:
    """The module that holds the weight of this full name, or the weight of which it names a part; its name in there."""
    owner, (*path, last) = model, full.split(".")
    while path and path[0] in owner._modules:
        owner = owner.get_submodule(path.pop(0))
    return owner, ".".join([*path, last])


def _root(name: str) -> str:
    """The weight's own name, of a name that may be that of a part of it."""
    return name.partition(".")[0]


def _assign(module: fx.GraphModule, attribute: str, tensor: torch.Tensor) -> None:
    if attribute in module._parameters:
        module._parameters[attribute] = tensor
    elif attribute in module._buffers:
        module._buffers[attribute] = tensor
    else:
        setattr(module, attribute, tensor)
