"""Give a model back exactly as it came, whatever a trace or a forward pass did to it on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig


def configs_of(model: nn.Module) -> list[PretrainedConfig]:
    """Every configuration object that the model's modules read, nested ones included, each once."""
    found: dict[int, PretrainedConfig] = {}

    def visit(value: object) -> None:
        if isinstance(value, PretrainedConfig) and id(value) not in found:
            found[id(value)] = value
            for inner in vars(value).values():
                visit(inner)

    for module in model.modules():
        for value in vars(module).values():
            visit(value)
    return list(found.values())


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Undo, on leaving, every change to the attributes of the model's modules and configurations.

    Parameters, buffers, hooks, children, the training flag, and whatever a module keeps for itself are attributes;
    lists, dicts and sets among them are restored to their contents. What is written *into* a tensor is the business
    of `writes_undone`.
    """
    owners: list[object] = [*model.modules(), *configs_of(model)]
    saved = [(vars(owner), _copy_containers(vars(owner))) for owner in owners]
    random_state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(random_state)
        for live, before in saved:
            _restore(live, before)


@contextlib.contextmanager
def no_hooks_left() -> Iterator[None]:
    """Remove, on leaving, hooks on the buffers of all modules: in torch 2.11 an export that fails leaves one, which
    keeps the model in memory for good.
    """
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    before = set(hooks)
    try:
        yield
    finally:
        for number in hooks.keys() - before:
            del hooks[number]


def _copy_containers(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Name -> (the object itself, a shallow copy of its contents if it is a container)."""
    return {
        name: (value, value.copy() if isinstance(value, (dict, list, set)) else None)
        for name, value in attributes.items()
    }


def _restore(live: dict[str, Any], before: dict[str, tuple[Any, Any]]) -> None:
    for name in list(_changed(live, before)):
        if name not in before:
            del live[name]
            continue
        live[name], contents = before[name]
        if contents is None or _same_contents(live[name], contents):
            continue
        live[name].clear()
        live[name].extend(contents) if isinstance(contents, list) else live[name].update(contents)


def _changed(live: dict[str, Any], before: dict[str, tuple[Any, Any]]) -> Iterator[str]:
    """The names of what is not as it was before."""
    yield from live.keys() - before.keys()
    for name, (value, contents) in before.items():
        same = name in live and live[name] is value
        if not (same and (contents is None or _same_contents(value, contents))):
            yield name


def _same_contents(value: Any, contents: Any) -> bool:
    if len(value) != len(contents):
        return False
    if isinstance(value, dict):
        return all(
            one is other and value[one] is contents[other]
            for one, other in zip(value, contents, strict=True)
        )
    if isinstance(value, set):
        return bool(value == contents)
    return all(one is other for one, other in zip(value, contents, strict=True))


@contextlib.contextmanager
def effects_of(module: nn.Module) -> Iterator[list[str]]:
    """Gives a list that says, once it is left, what the code within did to the module and to the random numbers."""
    saved = [(vars(owner), _copy_containers(vars(owner))) for owner in module.modules()]
    random_state = _random_states(module)
    held = [(tensor, tensor._version) for tensor in tensors_of(module)]
    found: list[str] = []
    yield found
    if any(tensor._version != version for tensor, version in held):
        found.append("it writes into a tensor that it holds")
    changed = {name for live, before in saved for name in _changed(live, before)}
    found.extend(f"it sets its attribute {name}" for name in sorted(changed))
    if any(
        not torch.equal(one, two)
        for one, two in zip(random_state, _random_states(module), strict=True)
    ):
        found.append("it draws random numbers")


def _random_states(module: nn.Module) -> list[torch.Tensor]:
    devices = {tensor.device for tensor in tensors_of(module) if tensor.device.type == "cuda"}
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


@contextlib.contextmanager
def writes_undone(model: nn.Module) -> Iterator[CopyBeforeWrite]:
    """Undo, on leaving, every in-place write into the model's parameters, buffers and other attribute tensors.

    Only tensors that are written are copied, at the moment of the first write. Gives the recorder, whose `storages`
    say what was written.
    """
    recorder = CopyBeforeWrite(tensors_of(model))
    try:
        with recorder:
            yield recorder
    finally:
        recorder.undo()


@contextlib.contextmanager
def borrowed(model: nn.Module) -> Iterator[None]:
    """For a forward pass of the model's own that must leave no trace in it: `untouched` and `writes_undone`."""
    with untouched(model), writes_undone(model):
        yield


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Every tensor that the model's modules hold: parameters, buffers and plain attributes, each once."""
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        held = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
        for value in held:
            if isinstance(value, torch.Tensor):
                found[id(value)] = value
    return list(found.values())


class CopyBeforeWrite(TorchDispatchMode):
    """Keeps the old contents of the protected storages that an operation is about to write to."""

    def __init__(self, protected: list[torch.Tensor]) -> None:
        super().__init__()
        self._protected = {storage_key(t): t for t in protected if t.device.type != "meta"}
        self._old: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for position, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[position] if position < len(args) else kwargs.get(argument.name)
                    self._keep(value)
        return func(*args, **kwargs)

    def _keep(self, value: object) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                key = storage_key(tensor)
                if key in self._protected and key not in self._old:
                    storage = tensor.untyped_storage()
                    self._old[key] = (storage, storage.clone())

    @property
    def storages(self) -> set[int]:
        """Keys (see `storage_key`) of the protected storages written so far."""
        return set(self._old)

    def undo(self) -> None:
        """Put the old contents back."""
        for storage, old in self._old.values():
            storage.copy_(old)
        self._old.clear()


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory."""
    return tensor.untyped_storage()._cdata
