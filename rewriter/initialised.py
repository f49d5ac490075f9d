"""A module on the meta device with numbers in it: those that the model's own code computes, weights at random.

transformers fills in what a file of weights lacks by the model's `_init_weights`: buffers are computed from the
configuration, weights are drawn. So a buffer's values are known without weights; of a weight's, nothing is.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from .module_leaf import set_tensor

Initialise = Callable[[nn.Module], None]


def initialiser(model: nn.Module, path: str) -> Initialise | None:
    """`_init_weights` of the innermost module around `path` that has one."""
    while path:
        path = path.rpartition(".")[0]
        found = getattr(model.get_submodule(path), "_init_weights", None)
        if callable(found):
            return found
    return None


@torch.no_grad()
def initialised(
    module: nn.Module, initialise: Initialise, *, only_buffers: bool = False
) -> nn.Module | None:
    """A copy on the CPU; None if it holds something that `initialise` does not fill. Draws the same every time.

    With `only_buffers`, modules that hold no buffer get zeros, which take neither time nor memory.
    """
    twin = copy.deepcopy(module)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for owner in twin.modules():
            if only_buffers and not owner._buffers:
                _put(owner, 0.0)
            elif not _fill(owner, initialise):
                return None
    return twin


def _fill(owner: nn.Module, initialise: Initialise) -> bool:
    if not all(tensor.is_floating_point() for _, tensor in _held(owner)):
        return False  # of other dtypes it cannot be told what was filled
    _put(owner, torch.nan)
    initialise(owner)
    return not any(bool(tensor.isnan().any()) for _, tensor in _held(owner))


def _put(owner: nn.Module, value: float) -> None:
    for name, tensor in list(_held(owner)):
        one = torch.full((), value, dtype=tensor.dtype).expand(tensor.shape)
        filled = one.clone() if value != 0 else one
        weight = isinstance(tensor, nn.Parameter)
        set_tensor(owner, name, nn.Parameter(filled, requires_grad=False) if weight else filled)


def _held(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module itself, without its children."""
    places = (owner._parameters, owner._buffers, vars(owner))
    for name, value in itertools.chain.from_iterable(place.items() for place in places):
        if isinstance(value, Tensor):
            yield name, value
