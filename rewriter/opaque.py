"""The modules of one model that a capture keeps opaque: which they are, what they return, and their stand-ins."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import nn
from torch.utils import _pytree as pytree

from .errors import RewriteError
from .initialised import initialiser
from .leaf_shapes import Example, ShapeOf, example_of, results_in_batch, results_in_tokens
from .leaves import LeafUnsupported
from .meta_twin import off_meta, on_meta
from .module_leaf import Arguments, ModuleCall, emit, owned_tensors
from .untouched import effects_of, storage_key, untouched, writes_undone

LENGTHS = (37, 50, 71)
"""Lengths of the example calls: enough to tell a size that grows with T from one in blocks of it."""

SHORT, LONG = 7, 301
"""Lengths at which a size that is limited, or counted in large blocks, gives itself away. A model may be unable to
run at either."""

ROWS = 3
"""Rows of the one example call of a batch: no length is a multiple of another by it."""

_serial = itertools.count()

Settings = Callable[[nn.Module], contextlib.AbstractContextManager[None]]


class Untraceable(Exception):
    """A module that cannot be traced as it is. `path` in the model, `problem`, and where in the model's code. `why`, if
    no trace at all can go through it, and so no pass look into it.
    """

    def __init__(self, path: str, problem: str, source: str = "", why: str = "") -> None:
        super().__init__(problem)
        self.why = why
        self.path = path
        self.problem = problem
        self.source = source


class OpaqueModules:
    """Grows, attempt by attempt, the set of modules that a trace must not look into.

    With `pure`, a module is refused that does anything but return results: sets an attribute, draws random numbers,
    writes into a tensor that it holds. Whoever runs the model's own calls in its stead may not lose that.
    """

    def __init__(self, model: nn.Module, settings: Settings, *, pure: bool = False) -> None:
        self._modules = dict(model.named_modules())
        self._model = model
        self._settings = settings
        self._pure = pure
        self._serial = next(_serial)
        self.paths: set[str] = set()
        self._why: dict[str, str] = {}
        self._examples: dict[int, dict[str, list[Example]]] = {}  # length -> path -> calls
        self._batched: dict[str, list[Example]] | None = None
        self._written: set[int] = set()
        self.writes: dict[str, tuple[tuple[nn.Module, str], ...]] = {}
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
        self._why.update(dict.fromkeys(twins, reason.why))
        kept = {name for name in self.paths if not any(_inside(name, twin) for twin in twins)}
        self.paths = kept | {
            name for name in twins if not any(_inside(name, other) for other in twins)
        }

    def learn(
        self, run: Callable[[int], object], run_batch: Callable[[int], object] | None = None
    ) -> None:
        """Run the model at a few lengths (`run(n)`), and remember what the opaque modules take and return.

        `run_batch(n)` runs it over ROWS rows, for `shapes_in_batch`.
        """
        self._examples = {}
        for length in LENGTHS:
            self._examples[length] = self._learn_at(length, run)
        for length in (SHORT, LONG):
            with contextlib.suppress(RuntimeError, ValueError, IndexError):
                self._examples[length] = self._learn_at(length, run)
        self._batched = None if run_batch is None else self._learn_at(LENGTHS[0], run_batch)
        self.writes = {path: self._writes_of(path) for path in self.paths}

    def _learn_at(self, length: int, run: Callable[[int], object]) -> dict[str, list[Example]]:
        calls: dict[str, list[Example]] = {path: [] for path in self.paths}
        with untouched(self._model), writes_undone(self._model) as written:
            for path in self.paths:
                module = self._modules[path]
                module.forward = self._recorder(calls[path], module)
            run(length)
            self._written |= written.storages
        return calls

    def _writes_of(self, path: str) -> tuple[tuple[nn.Module, str], ...]:
        """The module's own tensors that a pass over the model writes into. In a trace it holds others: look before."""
        return tuple(
            (owner, name)
            for owner, name, tensor in owned_tensors(self._modules[path])
            if storage_key(tensor) in self._written
        )

    def _recorder(self, calls: list[Example], module: nn.Module) -> Callable[..., Any]:
        forward = off_meta(module) if on_meta(module) else module.forward

        def record(*args: Any, **kwargs: Any) -> Any:
            noted: contextlib.AbstractContextManager[list[str]] = (
                effects_of(module) if self._pure else contextlib.nullcontext([])
            )
            with noted as effects:
                output, example = example_of(forward, args, kwargs)
            if effects:
                example = replace(example, problem=example.problem or "; ".join(effects))
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

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            number = self._calls_seen.get(path, 0)
            self._calls_seen[path] = number + 1
            return self.call(path, number, forward, args, kwargs, self._symbol)

        return stand_in

    def call(
        self, path: str, number: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        symbol: sympy.Expr | None, written: Sequence[torch.Tensor] | None = None,
    ) -> Any:  # fmt: skip
        """Emit the operator for call number `number` of the module at `path`, whose own forward is `forward`, into a
        trace with so many (`symbol`) tokens. `written` is what its tensors in `writes` are by now, if they do not say
        so themselves. Raises LeafUnsupported.
        """
        given = Arguments.of(args, kwargs, path)
        results = self.results(path, number)
        call = ModuleCall(
            key=f"{self._serial}:{path}:{number}",
            path=path,
            module=self._modules[path],
            forward=forward,
            settings=self._settings,
            arguments=given.template,
            argument_spec=given.spec,
            results=results,
            result_spec=self._examples_of(path, number)[0].spec,
            tokens_at=given.tokens_at(symbol),
            writes=self.writes[path],
            initialise=initialiser(self._model, path),
            why=self._why.get(path, ""),
        )
        self._calls[call.key] = call
        return emit(call, given.tensors, given.sizes, written)

    def results(self, path: str, number: int) -> tuple[Any, ...]:
        """What call number `number` returns. Raises LeafUnsupported."""
        return results_in_tokens(list(self._examples), self._examples_of(path, number), path)

    def shapes_in_batch(self, path: str, number: int, rows: Any, tokens: Any) -> Any:
        """The result of a call over this many rows and tokens (int or SymInt), ShapeOf in place of its tensors. Of more
        than one row something is known after `learn` with `run_batch`. Raises LeafUnsupported.
        """
        results, examples = self.results(path, number), self._examples_of(path, number)
        found = [result.at(tokens) if isinstance(result, ShapeOf) else result for result in results]
        if self._batched is not None:
            many = self._batched[path]
            if len(many) <= number:
                raise LeafUnsupported(f"{path} is called more often for one row than for {ROWS}")
            grows = iter(results_in_batch(results, examples[0], many[number], ROWS, path))
            found = [
                result.in_batch(next(grows), rows) if isinstance(result, ShapeOf) else result
                for result in found
            ]
        return pytree.tree_unflatten(found, examples[0].spec)

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
