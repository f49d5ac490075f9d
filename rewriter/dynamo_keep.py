"""Modules that Dynamo does not look into: each call of one goes into its graph as one call.

    for t in range(x.shape[1]): ...   within a module   ->   module_call(x, ...)

A loop over tokens is unrolled by Dynamo, which fixes their number, and a branch on values ends its graph. `wrap` keeps
the module around such code whole (rewriter/opaque.py); so does the backend: it follows Dynamo from module to module,
tells where a size was fixed or the trace failed, and lets Dynamo start over without looking there.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import sympy
import torch
from torch import fx, nn
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, Unsupported, UserError
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables import TorchInGraphFunctionVariable, UnspecializedNNModuleVariable
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from .capture import about_layout
from .dynamo_frame import FrameCall
from .dynamo_inputs import example_of, source_name
from .errors import RewriteError, first_line
from .leaf_shapes import ShapeOf
from .leaves import LeafUnsupported
from .opaque import OpaqueModules, Untraceable
from .sizes import guard_interval
from .watch import Spans

_FAILED = (Unsupported, UserError)


@dataclass(frozen=True)
class KeptCall:
    """One call of a kept module: `node.target.regraft_kept` in a Dynamo graph."""

    opaque: OpaqueModules
    path: str
    number: int
    module: nn.Module

    def emit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operator `regraft::module_leaf` in its place, in a trace over one row. Raises LeafUnsupported."""
        sizes = [size for leaf in pytree.tree_leaves((args, kwargs)) for size in _sizes(leaf)]
        symbols = {symbol for size in sizes for symbol in size.node.expr.free_symbols}
        symbol = symbols.pop() if len(symbols) == 1 else None
        forward = self.module.forward
        return self.opaque.call(self.path, self.number, forward, args, kwargs, symbol)


def kept_call_of(node: fx.Node) -> KeptCall | None:
    """What a node of a Dynamo graph stands for, if it calls a kept module."""
    call = getattr(node.target, "regraft_kept", None)
    return call if isinstance(call, KeptCall) else None


@dataclass
class KeptModules:
    """Those of one frame, over all its traces. `given_up` says why none are kept after all."""

    call: FrameCall
    ids_source: str
    opaque: OpaqueModules = field(init=False)
    given_up: str = ""

    def __post_init__(self) -> None:
        self._names = {id(m): name for name, m in self.call.module.named_modules() if name}
        self._keep_nothing()
        self._begin()

    def _keep_nothing(self) -> None:
        self.opaque = OpaqueModules(self.call.module, contextlib.nullcontext, pure=True)

    def _begin(self, output: Any = None) -> None:
        """A trace begins."""
        self._output = output
        self._spans = Spans()
        self._seen: Counter[str] = Counter()
        self._trunks: set[str] = {""}
        self._failed: Untraceable | None = None

    def watch(self) -> Callable[[], None]:
        """Follow Dynamo from now on, until what is returned is called."""
        plain = InstructionTranslatorBase.inline_user_function_return
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
                return self._keep(tx, path, list(args[1:]), kwargs)
            return self._follow(tx, path, [*args[1:], *kwargs.values()], go_on)

        InstructionTranslatorBase.inline_user_function_return = inline  # type: ignore[method-assign]
        return lambda: setattr(InstructionTranslatorBase, "inline_user_function_return", plain)

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
        if any(self._is_ids(value) for value in given) and self._is_most(path):
            self._trunks.add(path)
        self._spans.enters(path, len(guards))
        try:
            result = go_on()
        except _FAILED as error:
            if self._failed is None:
                self._failed = Untraceable(path, first_line(error), _line(error))
            self._spans.leaves(path, len(guards))
            if self._spans.innermost is None and not self.given_up:
                self._again(self._failed)
            raise
        self._spans.leaves(path, len(guards))
        self._failed = None  # what failed within is made up for
        return result

    def _is_ids(self, value: Any) -> bool:
        node = value.as_proxy().node if value.is_tensor() else None
        return (
            node is not None and node.op == "placeholder" and source_name(node) == self.ids_source
        )

    def _is_most(self, path: str) -> bool:
        """Whether most of the modules lie within this one: it is the model itself, given a head."""
        inside = sum(name.startswith(f"{path}.") for name in self._names.values())
        return 2 * inside > len(self._names)

    def _keep(self, tx: Any, path: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        number = self._seen[path]
        self._seen[path] += 1
        try:
            ids = next(
                node
                for node in tx.output.placeholders
                if node.meta.get("grapharg") is not None and source_name(node) == self.ids_source
            )
            shapes = self.opaque.shapes_in_batch(path, number, *example_of(ids).shape)
            call = KeptCall(self.opaque, path, number, self.call.module.get_submodule(path))
            return TorchInGraphFunctionVariable(_stand_in(call, shapes)).call_function(
                tx, args, kwargs
            )
        except (*_FAILED, LeafUnsupported, StopIteration) as error:
            self._again(Untraceable(path, first_line(error)))

    def _again(self, reason: Untraceable) -> NoReturn:
        """Let Dynamo start over, with one more kind of module kept, or none."""
        self.add(reason)
        InstructionTranslator.current_tx().output.root_tx.speculation_log.clear()
        raise TensorifyScalarRestartAnalysis(restart_reason="regraft: trace again")

    def fixing(self, sizes: tuple[Any, ...]) -> Untraceable | None:
        """Where the trace fixed one of these sizes of input_ids, or counts blocks of it."""
        batch, tokens = (getattr(size, "node", None) for size in sizes)
        for node, others in ((tokens, batch), (batch, None)):
            if node is None or not isinstance(node._expr, sympy.Symbol):
                continue
            one = {} if others is None else {others._expr: sympy.Integer(1)}
            for index, guard in enumerate(node.shape_env.guards):
                expr = guard.expr.xreplace(one)
                if expr.free_symbols != {node._expr} or about_layout(guard):
                    continue
                if guard_interval(expr, node._expr, int(node.hint)) is None:
                    problem = f"it holds only where {expr} ({node._expr} is a size of input_ids)"
                    path = self._spans.path_of_guard(index)
                    return Untraceable(path, problem, first_line(Exception(guard.sloc)))
        return None

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
            return False
        return True


def _stand_in(call: KeptCall, shapes: Any) -> Callable[..., Any]:
    """A function that Dynamo puts into its graph as one call. `shapes` is its result, ShapeOf in place of tensors."""

    def module_call(*args: Any, **kwargs: Any) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        if not any(isinstance(value, FakeTensor) for value in given):
            return call.module.forward(*args, **kwargs)
        weights = call.module.parameters()
        history = torch.is_grad_enabled() and any(
            t.requires_grad for t in (*given, *weights) if isinstance(t, torch.Tensor)
        )

        def fake(shape: Any) -> Any:
            if not isinstance(shape, ShapeOf):
                return shape
            empty = torch.empty(shape.shape, dtype=shape.dtype, device=shape.device)
            # as a real result would be: what takes it for a constant would stop the gradient
            has = history and shape.dtype.is_floating_point
            return empty.requires_grad_() * 1 if has else empty

        return pytree.tree_map(fake, shapes)

    module_call.regraft_kept = call  # type: ignore[attr-defined]
    return module_call


def _sizes(value: Any) -> list[torch.SymInt]:
    sizes = value.shape if isinstance(value, torch.Tensor) else [value]
    return [size for size in sizes if isinstance(size, torch.SymInt)]


def _line(error: BaseException) -> str:
    """The line of code that Dynamo was at."""
    stack = getattr(error, "real_stack", None)
    if not stack:
        return ""
    frame = stack[-1]
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno}: {frame.line}"
