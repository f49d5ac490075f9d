"""A model whose `generate_batch`, and the rest of its continuous batching, are served by an engine."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType, TracebackType
from typing import Any, Self

from torch import nn
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from . import batching_config
from .config import EngineConfig
from .engine import Engine
from .errors import RequestError
from .manager import Manager

_changing = threading.Lock()

ENTRY_POINTS = (
    "generate_batch",
    "init_continuous_batching",
    "continuous_batching_context_manager",
    "destroy_cached_continuous_batching_manager",
)
"""The methods of a model that go to its engine while it is installed."""


class Installation:
    """Continuous batching of one model, until `uninstall`; as a context manager, until its end.

    `engine` serves it, made anew over the same rewritten model where a ContinuousBatchingConfig
    asks for other sizes.
    """

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self.engine = engine
        self._model = weakref.ref(model)
        self._base = engine.config
        self._kept: Manager | None = None
        for name in ENTRY_POINTS:
            setattr(model, name, _EntryPoint(model, name, self))

    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> Manager:
        """A manager, or the one that was kept. Nothing here is sized by hints: `workload_hints` changes nothing."""
        if self._kept is not None:
            return self._kept
        config = batching_config.check(continuous_batching_config)
        return Manager(self._engine_for(config), generation_config, config, self._keep)

    @contextmanager
    def continuous_batching_context_manager(
        self,
        generation_config: GenerationConfig | None = None,
        block: bool = True,
        timeout: float | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        persistent_manager: bool = False,
        warmup: bool = True,
        workload_hints: Any = None,
    ) -> Iterator[Manager]:
        """A started manager, stopped at the end: after what is under way, or at once on an error."""
        manager = self.init_continuous_batching(
            generation_config, continuous_batching_config, workload_hints
        )
        if warmup and not manager.warmed_up:
            manager.warmup()
        manager.start()
        done = False
        try:
            yield manager
            done = True
        finally:
            manager.stop(
                block=block,
                timeout=timeout,
                keep_for_next_session=persistent_manager,
                hard_stop=not done,
            )

    def generate_batch(
        self,
        inputs: list[list[int]],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        **kwargs: Any,
    ) -> dict[str, GenerationOutput]:
        """`Engine.generate_batch`, by an engine of the sizes that are asked for."""
        config = batching_config.check(continuous_batching_config)
        return self._engine_for(config).generate_batch(
            inputs, generation_config, config, record_timestamps, progress_bar, **kwargs
        )

    def destroy_cached_continuous_batching_manager(self) -> None:
        """Ends the manager that was kept, if any."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            kept.destroy()

    def close(self) -> None:
        """Gives the model its own methods back and frees the caches. Twice is nothing."""
        self.destroy_cached_continuous_batching_manager()
        self.engine.close()
        model = self._model()
        if model is not None and installation_of(model) is self:
            for name in ENTRY_POINTS:
                delattr(model, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _keep(self, manager: Manager) -> None:
        self._kept = manager

    def _engine_for(self, config: ContinuousBatchingConfig | None) -> Engine:
        wanted = batching_config.sized(config, self._base)
        with _changing:
            self.engine.generation_config = getattr(self._model(), "generation_config", None)
            if wanted != self.engine.config:
                self._resize(wanted)
            return self.engine

    def _resize(self, wanted: EngineConfig) -> None:
        old = self.engine
        if old.has_unfinished or old.background.is_alive:
            raise RequestError(
                "continuous_batching_config asks for other sizes while requests are under way: wait "
                "for them, or give every session the same"
            )
        try:
            wanted.records_on(old.model.device)
        except ValueError as error:
            raise RequestError(f"continuous_batching_config: {error}") from error
        old.close()
        self.engine = old.resized(wanted)


class _EntryPoint:
    """What a model's attribute is while it is installed.

    A copy of the model, by deepcopy or pickle, gets the model's own method instead: it has weights
    of its own, which no engine serves.
    """

    def __init__(self, model: nn.Module, name: str, installation: Installation) -> None:
        self.installation = installation
        self._model = weakref.ref(model)
        self._call = call = getattr(installation, name)
        self.__name__ = name
        self.__doc__ = call.__doc__
        self.__signature__ = inspect.signature(call)

    def __call__(self, *arguments: Any, **fields: Any) -> Any:
        return self._call(*arguments, **fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_method, (self._model(), self.__name__)


def _own_method(model: nn.Module, name: str) -> MethodType:
    return MethodType(getattr(type(model), name), model)


def installation_of(model: nn.Module) -> Installation | None:
    """What the model is installed with; None if it is not."""
    entry = vars(model).get(ENTRY_POINTS[0])
    return entry.installation if isinstance(entry, _EntryPoint) else None


def install(model: nn.Module, make_engine: Callable[[], Engine]) -> Installation:
    """Puts an engine behind a model's continuous batching; a model that has one already is a ValueError."""
    if installation_of(model) is not None:
        raise ValueError("the model is installed already: uninstall it first")
    return Installation(model, make_engine())


def uninstall(model: nn.Module) -> None:
    """Gives a model its own methods back. One that is not installed is nothing."""
    installation = installation_of(model)
    if installation is not None:
        installation.close()
