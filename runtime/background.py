"""A thread that runs an engine's steps, so that callers only wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .errors import EngineBusyError, EngineFailedError, described
from .loop import StepLoop

logger = logging.getLogger(__name__)

_TURN_SECONDS = 0.002
"""How long the thread lets others get on where it cannot: a step runs elsewhere, or every request is held back."""


class Background:
    """Runs steps while somebody holds it and there is something to run.

    An error in a step is fatal: it ends every live request, is logged once, and is raised to whoever
    waits or submits later, until the thread is started anew. A bad request never is such an error.
    """

    def __init__(self, loop: StepLoop, device: torch.device) -> None:
        self.fatal_error: Exception | None = None
        self.num_steps = 0
        self._loop = loop
        self._device = device
        self._changed = threading.Condition()  # of anything that somebody may wait for
        self._holders: set[int] = set()
        self._thread: threading.Thread | None = None
        self._num_pauses = 0
        self._num_failures = 0
        self._in_step = False

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_paused(self) -> bool:
        """Whether somebody is within `pause`."""
        return self._num_pauses > 0

    def hold(self, holder: object) -> None:
        """Keeps the thread running, and starts it if need be, until `release`."""
        with self._changed:
            if self.fatal_error is not None:
                self._changed.wait_for(lambda: self._thread is None)
            self._holders.add(id(holder))
            if self.is_alive:
                return
            self.fatal_error = None
            self._thread = threading.Thread(target=self._run, name="regraft-steps", daemon=True)
            self._thread.start()

    def release(self, holder: object, timeout: float | None = None) -> bool:
        """Ends the thread if nobody else holds it, after its step; False if that takes over `timeout` seconds."""
        with self._changed:
            self._holders.discard(id(holder))
            self._changed.notify_all()
            thread = None if self._holders else self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
            return not thread.is_alive()
        return True

    def end(self) -> None:
        """Ends the thread, after its step, whoever holds it."""
        with self._changed:
            self._holders.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def wake(self) -> None:
        """Tells the thread, and all who wait, to look again."""
        with self._changed:
            self._changed.notify_all()

    def check(self) -> None:
        """EngineFailedError after a fatal error."""
        if self.fatal_error is not None:
            raise EngineFailedError(
                f"a step failed, and nothing runs any more: {described(self.fatal_error)}"
            ) from self.fatal_error

    def run_until(self, done: Callable[[], object]) -> None:
        """Returns once `done()` is true: runs steps here, or waits where the thread runs them.

        A fatal error meanwhile is an EngineFailedError, whatever `done()` says.
        """
        failures = self._num_failures
        while not done():
            if self.is_alive:
                self.wait(done)
            elif self._num_failures == failures:
                self._advance_here()
            if self._num_failures != failures:
                self.check()

    def wait(self, done: Callable[[], object], timeout: float | None = None) -> bool:
        """Waits, while the thread runs, until `done()` is true; whether it is. `timeout` is in seconds."""
        with self._changed:
            self._changed.wait_for(lambda: done() or not self.is_alive, timeout)
        return bool(done())

    def settle(self) -> None:
        """Waits until the step that runs now is over, so that it is known whether it failed."""
        with self._changed:
            number = self.num_steps
            self._changed.wait_for(
                lambda: not self._in_step or self.num_steps != number or not self.is_alive
            )

    @contextmanager
    def pause(self) -> Iterator[None]:
        """No step runs within; requests stay as they are."""
        with self._changed:
            self._num_pauses += 1
            self._changed.wait_for(lambda: not self._in_step)
        try:
            yield
        finally:
            with self._changed:
                self._num_pauses -= 1
                self._changed.notify_all()

    def _advance_here(self) -> None:
        try:
            self._loop.advance()
        except EngineBusyError:
            if not self.is_alive:  # else it was started meanwhile
                raise

    def _run(self) -> None:
        if self._device.type == "cuda" and self._device.index is not None:
            torch.cuda.set_device(self._device)
        try:
            while self._begins():
                self._step()
        except Exception as error:
            # Not swallowed: it ends every request, and everybody who waits or comes later is told.
            logger.exception("a step failed: its engine's thread ends")
            self.fatal_error = error
            self._num_failures += 1
            self._loop.fail(described(error))
            with self._changed:
                self._in_step = False
                self._thread = None
                self._changed.notify_all()

    def _begins(self) -> bool:
        """Waits for something to run; False when nobody holds the thread any more."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._holders or (self._has_work() and not self._num_pauses)
            )
            if not self._holders:
                # Here, and not when it is gone: whoever holds from now on starts another.
                self._thread = None
                self._changed.notify_all()
                return False
            self._in_step = True
            return True

    def _has_work(self) -> bool:
        return any(not request.is_held for request in list(self._loop.live.values()))

    def _progress(self) -> tuple[int, int]:
        live = list(self._loop.live.values())
        return len(live), sum(request.num_cached + len(request.tokens) for request in live)

    def _step(self) -> None:
        before = self._progress()
        try:
            self._loop.advance()
            stuck = before == self._progress()  # every request that could get on is held back
        except EngineBusyError:
            stuck = True  # a caller runs a step that began before this thread did
        with self._changed:
            self._in_step = False
            self.num_steps += 1
            self._changed.notify_all()
            if stuck:
                self._changed.wait(_TURN_SECONDS)
