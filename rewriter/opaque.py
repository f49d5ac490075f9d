"""The modules of one model that a capture keeps opaque: which they are, what they return, and their stand-ins."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import nn

from .errors import RewriteError
from .initialised import initialiser
from .leaf_shapes import Example, example_of, results_in_tokens
from .leaves import LeafUnsupported
from .meta_twin import off_meta, on_meta
from .module_leaf import Arguments, ModuleCall, emit, owned_tensors
from .untouched import storage_key, untouched, writes_undone

LENGTHS = (37, 50, 71)
"""Lengths of the example calls: enough to tell a size that grows with T from one in blocks of it."""

SHORT, LONG = 7, 301
"""Lengths at which a size that is limited, or counted in large blocks, gives itself away. A model may be unable to
run at either."""

_serial = itertools.count()

Settings = Callable[[nn.Module], contextlib.AbstractContextManager[None]]


class Untraceable(Exception):
    """A module that cannot be traced as it is. `path` in the model, `problem`, and where in the model's code."""

    def __init__(self, path: str, problem: str, source: str = "") -> None:
        super().__init__(problem)
        self.path = path
        self.problem = problem
        self.source = source


class OpaqueModules:
    """Grows, attempt by attempt, the set of modules that a trace must not look into."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._modules = dict(model.named_modules())
        self._model = model
        self._settings = settings
        self._serial = next(_serial)
        self.paths: set[str] = set()
        self._examples: dict[int, dict[str, list[Example]]] = {}  # length -> path -> calls
        self._written: set[int] = set()
        self._symbol: sympy.Expr | None = None
        self._calls_seen: dict[str, int] = {}
        self._calls: dict[str, ModuleCall] = {}  # keeps them alive until a graph does

    def add(self, reason: Untraceable) -> None:
        """Make the module opaque, and its twins elsewhere in the model; its parent if it is opaque already."""
        path = reason.path
        while path in self.paths or (path and not _has_forward(self._modules[path])):
            path = path.rpartition(".")[0]
        if path == "":
            raise RewriteError(
                f"the model cannot be traced for every number of tokens: {reason.problem}",
                path=reason.path,
                source=reason.source,
                fix="this is outside any module that could be run as a whole; the model's own code must change",
            ) from reason
        kind = twin_key(self._modules[path])
        twins = {
            name for name, module in self._modules.items() if name and twin_key(module) == kind
        }
        kept = {name for name in self.paths if not any(_inside(name, twin) for twin in twins)}
        self.paths = kept | {
            name for name in twins if not any(_inside(name, other) for other in twins)
        }

    def learn(self, run: Callable[[int], object]) -> None:
        """Run the model at a few lengths (`run(n)`), and remember what the opaque modules take and return."""
        self._examples = {}
        for length in LENGTHS:
            self._learn_at(length, run)
        for length in (SHORT, LONG):
            with contextlib.suppress(RuntimeError, ValueError, IndexError):
                self._learn_at(length, run)

    def _learn_at(self, length: int, run: Callable[[int], object]) -> None:
        calls: dict[str, list[Example]] = {path: [] for path in self.paths}
        with untouched(self._model), writes_undone(self._model) as written:
            for path in self.paths:
                module = self._modules[path]
                module.forward = self._recorder(calls[path], module)
            run(length)
            self._written |= written.storages
        self._examples[length] = calls

    def _recorder(self, calls: list[Example], module: nn.Module) -> Callable[..., Any]:
        forward = off_meta(module) if on_meta(module) else module.forward

        def record(*args: Any, **kwargs: Any) -> Any:
            output, example = example_of(forward, args, kwargs)
            calls.append(example)
            return output

        return record

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """For the time of a trace, let each opaque module emit its operator."""
        saved = [
            (self._modules[path], vars(self._modules[path]).get("forward")) for path in self.paths
        ]
        try:
            for path in self.paths:
                module = self._modules[path]
                module.forward = self._stand_in(path, module)
            yield
        finally:
            for module, forward in saved:
                del module.forward
                if forward is not None:
                    module.forward = forward

    def starts(self, tokens: int | torch.SymInt) -> None:
        """To be called where a pass over the model begins, with the number of tokens."""
        self._calls_seen.clear()
        self._symbol = tokens.node.expr if isinstance(tokens, torch.SymInt) else None

    def _stand_in(self, path: str, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward
        writes = tuple(
            (owner, name)
            for owner, name, tensor in owned_tensors(module)
            if storage_key(tensor) in self._written
        )

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            number = self._calls_seen.get(path, 0)
            self._calls_seen[path] = number + 1
            given = Arguments.of(args, kwargs, path)
            examples = self._examples_of(path, number)
            call = ModuleCall(
                key=f"{self._serial}:{path}:{number}",
                path=path,
                module=module,
                forward=forward,
                settings=self._settings,
                arguments=given.template,
                argument_spec=given.spec,
                results=results_in_tokens(list(self._examples), examples, path),
                result_spec=examples[0].spec,
                tokens_at=given.tokens_at(self._symbol),
                writes=writes,
                initialise=initialiser(self._model, path),
            )
            self._calls[call.key] = call
            return emit(call, given.tensors, given.sizes)

        return stand_in

    def _examples_of(self, path: str, number: int) -> Sequence[Example]:
        """What call number `number` looked like at each of the lengths."""
        found = [calls[path] for calls in self._examples.values()]
        if any(len(calls) <= number for calls in found):
            raise LeafUnsupported(f"{path} is called more often in the trace than in a real pass")
        return [calls[number] for calls in found]


def _inside(name: str, other: str) -> bool:
    return name.startswith(other + ".")


def _has_forward(module: nn.Module) -> bool:
    """False for a mere container."""
    return type(module).forward is not nn.Module.forward


def twin_key(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules that run the same code over the same kind of submodules."""
    return (
        type(module),
        tuple((name, tuple(p.shape)) for name, p in module.named_parameters(recurse=False)),
        tuple((name, twin_key(child)) for name, child in module.named_children()),
    )


def example_row(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions of a row to run a model on: ids 0 and 1, positions that a short table covers."""
    index = torch.arange(length, device=device)
    return (index % 2)[None], (index % 32)[None]
