"""The one exception of the rewriter: a model, or a part of it, that cannot be rewritten soundly."""

from __future__ import annotations


class RewriteError(Exception):
    """Raised when a graph cannot be captured, proven or rewritten.

    `problem` says what is wrong, `operation`, `path` (module path in the model) and `source` (line of the model's
    code) say where, and `fix` says what to do about it.
    """

    def __init__(
        self, problem: str, *, operation: str = "", path: str = "", source: str = "", fix: str = ""
    ) -> None:
        self.problem = problem
        self.operation = operation
        self.path = path
        self.source = source
        self.fix = fix
        super().__init__(self._message())

    def _message(self) -> str:
        lines = [self.problem]
        for label, value in (
            ("operation", self.operation),
            ("module", self.path),
            ("source", self.source),
            ("what to do", self.fix),
        ):
            if value:
                lines.append(f"  {label}: {value}")
        return "\n".join(lines)


def first_line(error: BaseException) -> str:
    """What went wrong in a line: the first of an error's message, or its kind if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
