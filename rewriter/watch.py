"""Who asked: which module of the model was running when the trace asked about the number of tokens, or failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


class Spans:
    """Which of a model's modules were running while which guards were recorded."""

    def __init__(self) -> None:
        self._running: list[tuple[str, int]] = []
        self._spans: list[tuple[int, int, str]] = []

    def enters(self, path: str, guards: int) -> None:
        """The module at `path` begins to run; so many guards were recorded before."""
        self._running.append((path, guards))

    def leaves(self, path: str, guards: int) -> None:
        """It, and all that is left of what ran within, has ended."""
        while self._running:
            running, start = self._running.pop()
            self._spans.append((start, guards, running))
            if running == path:
                break

    def clear(self) -> None:
        """Nothing runs any more."""
        self._running.clear()

    @property
    def innermost(self) -> str | None:
        """The module that is running; None if none is."""
        return self._running[-1][0] if self._running else None

    def path_of_guard(self, index: int) -> str:
        """The innermost module that was running when guard number `index` was recorded; "" if none was."""
        around = [(end - start, path) for start, end, path in self._spans if start <= index < end]
        if around:
            return min(around, key=lambda span: span[0])[1]
        return next((path for path, start in reversed(self._running) if start <= index), "")


class Watch:
    """While entered, follows every call of a named module; maps guards and a failure to module paths.

    `on_guards(first, last)` is called when guards with these numbers are new; what it raises ends the trace early.
    `names` maps `id(vars(module))` to the module's path: during a trace a module may be seen through a proxy, which
    shares its attributes but not its identity.
    """

    def __init__(self, names: Mapping[int, str], on_guards: Callable[[int, int], None]) -> None:
        self._names = names
        self._on_guards = on_guards
        self._settled = 0
        self._where = Spans()
        self._failed: str | None = None
        self.shape_env: ShapeEnv | None = None
        self.symbol: sympy.Symbol | None = None

    def starts(self, tokens: torch.SymInt) -> None:
        """To be called where a pass over the model begins, with the symbolic number of tokens."""
        self.shape_env = tokens.node.shape_env
        self.symbol = tokens.node.expr
        self._where.clear()

    def path_of_guard(self, index: int) -> str:
        """See Spans."""
        return self._where.path_of_guard(index)

    @property
    def path_of_failure(self) -> str:
        """The innermost module that an exception went through; "" if there was none."""
        return self._failed or ""

    def __enter__(self) -> Watch:
        self._hooks = [
            register_module_forward_pre_hook(self._enters),
            register_module_forward_hook(self._leaves),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        if error is not None:  # hooks after a forward do not run for what it passed through
            self._failed = self._where.innermost

    def _guard_count(self) -> int:
        return len(self.shape_env.guards) if self.shape_env is not None else 0

    def _enters(self, module: nn.Module, args: Any) -> None:
        path = self._names.get(id(vars(module)))
        if path is not None:
            self._where.enters(path, self._guard_count())

    def _leaves(self, module: nn.Module, args: Any, result: Any) -> None:
        path = self._names.get(id(vars(module)))
        if path is None or self._where.innermost is None:
            return
        self._where.leaves(path, self._guard_count())
        if (count := self._guard_count()) > self._settled:
            first, self._settled = self._settled, count
            self._on_guards(first, count)
