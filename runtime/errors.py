"""What the runtime says to a caller who asked for something it cannot do."""

from __future__ import annotations


class RequestError(ValueError):
    """A bad request: names the value and the fix. The engine goes on serving all others."""


class EngineClosedError(RequestError, RuntimeError):
    """The engine was closed and serves nothing any more."""


class EngineBusyError(RequestError, RuntimeError):
    """Two threads were in `step` at once; the call that came second did nothing."""


class EngineFailedError(RuntimeError):
    """A step failed, and with it every request under way; the cause is the error of that step."""
