"""What a model is made of: of a module, a traced graph has the weights and no more.

A module put in the place of another, a hook that was added, an adapter that was switched off or merged make another
model, of which the graph knows nothing. What training and serving change is not looked at: weights, modes, flags,
caches, forwards that were compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from .errors import RewriteError

SWITCHES = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
"""Attributes by which a module with adapters chooses what it computes."""

FOR_GRADIENTS = "make_inputs_require_grad"
"""How the functions are called that transformers, PEFT and TRL hook to embeddings when they checkpoint activations: so
that gradients pass frozen ones. They change no number.
"""


class Makeup(NamedTuple):
    """What one module is made of."""

    children: tuple[tuple[str, nn.Module | None], ...]
    hooks: tuple[int, ...]
    switches: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, module: nn.Module) -> Makeup:
        held = vars(module)  # looked at often, and most of it is empty
        children, before, behind = (held[name] for name in _PLACES)
        return cls(
            tuple([(name, _plain(child)) for name, child in children.items()]),
            _numbers(before) + _numbers(behind) if before or behind else (),
            tuple([(name, _value(held[name])) for name in SWITCHES if name in held]),
        )


_PLACES = ("_modules", "_forward_pre_hooks", "_forward_hooks")


@dataclass(frozen=True)
class Structure:
    """What every module of a model was made of at some time, by path."""

    modules: tuple[tuple[str, nn.Module, Makeup], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Structure:
        return cls(tuple((path, one, Makeup.of(one)) for path, one in model.named_modules()))

    def check(self) -> None:
        """Raise RewriteError if a module is made otherwise now."""
        for path, module, before in self.modules:
            now = Makeup.of(module)
            if now != before:
                raise RewriteError(
                    f"the model is no longer made as when it was wrapped: {_change(path, before, now)}",
                    path=path,
                    fix="wrap the model again, or undo that",
                )


def _plain(module: nn.Module | None) -> nn.Module | None:
    """The module itself, where `torch.compile` put another around it."""
    return None if module is None else module._modules.get("_orig_mod", module)


def _numbers(hooks: Mapping[int, object]) -> tuple[int, ...]:
    """Which hooks there are, but for those that change no number."""
    return tuple(
        number
        for number, hook in hooks.items()
        if not getattr(hook, "__name__", "").startswith(FOR_GRADIENTS)
    )


def _value(held: object) -> Any:
    """A plain value; of what may be changed in place, its text."""
    if isinstance(held, (list, dict)):
        return repr(held)
    return held if isinstance(held, (bool, int, float, str)) else None


def _kind(module: nn.Module | None) -> str:
    return "nothing" if module is None else f"{type(module).__name__}"


def _change(path: str, before: Makeup, now: Makeup) -> str:
    name = path or "the model"
    was, is_now = dict(before.children), dict(now.children)
    for child in {**was, **is_now}:
        old, new = was.get(child), is_now.get(child)
        if old is not new:
            return f"{child} of {name} is another module ({_kind(new)} in place of {_kind(old)})"
    if now.hooks != before.hooks:
        return f"{name} has {len(now.hooks)} forward hooks, and had {len(before.hooks)}"
    values, values_now = dict(before.switches), dict(now.switches)
    for switch in {**values, **values_now}:
        if values.get(switch) != values_now.get(switch):
            return f"{switch} of {name} was {values.get(switch)} and is {values_now.get(switch)}"
    return f"the modules of {name} have another order"
