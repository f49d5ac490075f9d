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


class TextError(RuntimeError):
    """The tokenizer could not turn tokens into text: whose tokens they are, that request ends with it."""


class EngineFullError(RequestError):
    """The queue has no room; `retry_after` is a guess of when it has (seconds)."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def described(error: BaseException) -> str:
    """An error's kind and message, for those whom it ends."""
    return f"{type(error).__name__}: {error}"
