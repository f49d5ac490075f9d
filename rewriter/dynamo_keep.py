"""Modules that Dynamo does not look into: each call of one goes into its graph as one call.

    for t in range(x.shape[1]): ...   within a module   ->   module_call(x, ...)

A loop over tokens is unrolled by Dynamo, which fixes their number, and a branch on values ends its graph. `wrap` keeps
the module around such code whole (rewriter/opaque.py); so does the backend: it follows Dynamo from module to module,
tells where a size was fixed or the trace failed, and lets Dynamo start over without looking there.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import (
    TorchInGraphFunctionVariable,
    TupleVariable,
    UnspecializedNNModuleVariable,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from .dynamo_fixed import what_fixes
from .dynamo_frame import FrameCall
from .dynamo_hook import FAILURES, in_place, lacking_settings, put_in_place
from .dynamo_inputs import example_of
from .errors import RewriteError, first_line
from .kept_calls import KeptCall, stand_in
from .leaves import LeafUnsupported
from .opaque import OpaqueModules, Untraceable
from .watch import Spans


@dataclass
class KeptModules:
    """Those of one frame, over all its traces. `given_up` says why none are kept after all.

    `settings` are those of Dynamo that its traces need.
    """

    call: FrameCall
    settings: dict[str, bool] = field(default_factory=dict)
    opaque: OpaqueModules = field(init=False)
    given_up: str = ""

    def __post_init__(self) -> None:
        self._names = {id(m): name for name, m in self.call.module.named_modules() if name}
        self._doubtful = False  # whether the settings do more harm than good
        self._keep_nothing()
        self._begin()

    def _keep_nothing(self) -> None:
        self.opaque = OpaqueModules(self.call.module, _as_it_is, pure=True)

    def _begin(self, output: Any = None) -> None:
        """A trace begins."""
        self._output = output
        self._spans = Spans()
        self._seen: Counter[str] = Counter()
        self._trunks: set[str] = {""}
        self._failed: Untraceable | None = None

    def watch(self) -> Callable[[], None]:
        """Follow Dynamo from now on, until what is returned is called."""
        self._settings = contextlib.ExitStack()
        if self.settings:
            self._settings.enter_context(torch._dynamo.config.patch(self.settings))
        plain = in_place()
        self._begin()

        def inline(tx: Any, function: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> Any:
            def go_on() -> Any:
                return plain(tx, function, args, kwargs, *rest, **more)

            if tx.output is not self._output:  # Dynamo has begun anew
                self._begin(tx.output)
            path = self._path(tx, function, args)
            if path is None:
                return go_on()
            if path in self.opaque.paths:
                return self._keep(tx, path, args[0], list(args[1:]), kwargs)
            return self._follow(tx, path, [*args[1:], *kwargs.values()], go_on)

        put_in_place(inline)

        def end() -> None:
            put_in_place(plain)
            self._settings.close()

        return end

    def _path(self, tx: Any, function: Any, args: Any) -> str | None:
        """Of the module whose forward Dynamo is about to trace into."""
        owner = args[0].realize() if args else None
        if not isinstance(owner, UnspecializedNNModuleVariable):
            return None
        module = owner.value
        forward = getattr(type(module), "forward", None)
        if getattr(function, "fn", None) is not forward or "forward" in vars(module):
            return None
        return self._names.get(id(module))

    def _follow(self, tx: Any, path: str, given: list[Any], go_on: Callable[[], Any]) -> Any:
        guards = tx.output.shape_env.guards
        before = len(guards)
        if any(self._is_ids(value) for value in given) and self._is_most(path):
            self._trunks.add(path)
        self._spans.enters(path, len(guards))
        try:
            result = go_on()
        except FAILURES as error:
            if self._failed is None:
                self._failed = Untraceable(path, first_line(error), _line(error))
            self._spans.leaves(path, len(guards))
            if self._spans.innermost is None and not self.given_up:
                self._enable(lacking_settings(str(error)))
                if isinstance(error, GuardOnDataDependentSymNode):  # only with such settings
                    self._doubtful = True
                self._again(self._failed)
            raise
        self._spans.leaves(path, len(guards))
        self._failed = None  # what failed within is made up for
        if len(guards) > before and not self.given_up:
            ids = self._ids(tx)
            reason = None if ids is None else self.fixing(example_of(ids).shape)
            if reason is not None:
                self._again(reason)
        return result

    def _ids(self, tx: Any) -> fx.Node | None:
        """The input of the graph that holds token ids; None if none does as yet."""
        inputs = tx.output.root_tracer.graph.find_nodes(op="placeholder")
        return next(filter(self._is_ids_node, inputs), None)

    def _enable(self, settings: dict[str, bool]) -> None:
        """Where a setting may be all that Dynamo lacked, let it start over with that."""
        if settings:
            self.settings |= settings
            self._settings.enter_context(torch._dynamo.config.patch(settings))
            self._restart()

    def _is_ids(self, value: Any) -> bool:
        return value.is_tensor() and self._is_ids_node(value.as_proxy().node)

    def _is_ids_node(self, node: fx.Node) -> bool:
        argument = node.meta.get("grapharg")
        return argument is not None and argument.example is self.call.given["input_ids"]

    def _is_most(self, path: str) -> bool:
        """Whether most of the modules lie within this one: it is the model itself, given a head."""
        inside = sum(name.startswith(f"{path}.") for name in self._names.values())
        return 2 * inside > len(self._names)

    def _keep(self, tx: Any, path: str, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        number = self._seen[path]
        self._seen[path] += 1
        try:
            ids = self._ids(tx)
            if ids is None:
                raise LeafUnsupported(f"{path} is called before anything reads token ids")
            shapes = self.opaque.shapes_in_batch(path, number, *example_of(ids).shape)
            call = KeptCall(self.opaque, path, number, self.call.module.get_submodule(path))
            written = TupleVariable(
                [self._held(tx, owner, path, *at) for at in self.opaque.writes[path]]
            )
            function = TorchInGraphFunctionVariable(stand_in(call, shapes))
            return function.call_function(tx, [written, *args], kwargs)
        except (*FAILURES, LeafUnsupported) as error:
            self._again(Untraceable(path, first_line(error)))

    def _held(self, tx: Any, owner: Any, path: str, holder: nn.Module, name: str) -> Any:
        """A tensor that some module within the one at `path` holds, as Dynamo knows it by now."""
        full = next(at for at, module in self.call.module.named_modules() if module is holder)
        for part in [*filter(None, full.removeprefix(path).split(".")), name]:
            owner = owner.var_getattr(tx, part)
        return owner

    def _again(self, reason: Untraceable) -> NoReturn:
        """Let Dynamo start over, with one more kind of module kept, or none."""
        self.add(reason)
        self._restart()

    def _restart(self) -> NoReturn:
        InstructionTranslator.current_tx().output.root_tx.speculation_log.clear()
        raise TensorifyScalarRestartAnalysis(restart_reason="regraft: trace again")

    def fixing(self, sizes: Sequence[Any]) -> Untraceable | None:
        """Where the trace so far fixed one of these sizes of input_ids."""
        return what_fixes(sizes, self._spans.path_of_guard)

    def add(self, reason: Untraceable) -> bool:
        """Keep the module, its twins, or one around it; False if it cannot be, and then none is kept any more."""
        if self.given_up:
            return False
        try:
            if reason.path in self._trunks:
                raise LeafUnsupported(f"{reason.path or 'the model'} itself: {reason.problem}")
            self.opaque.add(reason)
            trunk = self.opaque.paths & self._trunks
            if trunk:
                raise LeafUnsupported(f"{trunk.pop()} is the model itself: {reason.problem}")
            single = self.call.given["input_ids"].shape[0] == 1
            self.opaque.learn(self.call.run_row, None if single else self.call.run_rows)
        except (RewriteError, RuntimeError, ValueError, IndexError, TypeError) as error:
            self.given_up = first_line(error)
            self._keep_nothing()
            if self._doubtful:
                self.settings = {}
                self._settings.close()
            return False
        return True


def _as_it_is(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A module in a call of the model's own runs with the implementations that the model has chosen."""
    return contextlib.nullcontext()


def _line(error: BaseException) -> str:
    """The line of code that Dynamo was at."""
    stack = getattr(error, "real_stack", None)
    if not stack:
        return ""
    frame = stack[-1]
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno}: {frame.line}"
