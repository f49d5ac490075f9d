"""What passes share that look into a module which capture kept whole, and measure what they make of it."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from regraft.rewriter.initialised import initialised
from regraft.rewriter.meta_twin import on_meta
from regraft.rewriter.module_leaf import ModuleCall, is_module_leaf, owned_tensors
from regraft.rewriter.pattern import Declined, Region

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest difference to the module's own forward, as a part of the largest magnitude."""


@dataclass(frozen=True)
class LeafCall:
    """A region that is one result (number `result`) of a module leaf."""

    region: Region
    leaf: fx.Node
    result: int

    @property
    def call(self) -> ModuleCall:
        call: ModuleCall = self.leaf.meta["leaf"]
        return call

    @property
    def given(self) -> tuple[fx.Node, ...]:
        return tuple(self.leaf.args[0])


def find_call(region: Region) -> LeafCall | Declined:
    """A result of a module that capture could not look into."""
    closer = region.closer
    if closer.target is not operator.getitem or not is_module_leaf(closer.args[0]):
        return Declined("not a module that was kept whole", closer)
    return LeafCall(region, closer.args[0], closer.args[1])


def device_of(call: ModuleCall) -> torch.device:
    """Where the module's tensors are."""
    return next((t.device for _, _, t in owned_tensors(call.module)), torch.device("cpu"))


def with_numbers(call: ModuleCall, *, only_buffers: bool) -> ModuleCall:
    """A call of a module without weights, as one of a copy that has the model's own buffers; any other as it is.

    With `only_buffers` its weights are zeros, else drawn as the model draws them.
    """
    if call.initialise is None or not on_meta(call.module):
        return call
    module = initialised(call.module, call.initialise, only_buffers=only_buffers)
    return call if module is None else replace(call, module=module, forward=module.forward)


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference as a part of the largest magnitude; nan where all that is expected is zero."""
    actual, expected = actual.double(), expected.double()
    largest = float(expected.abs().max())
    return float((actual - expected).abs().max()) / largest if largest else float("nan")
