"""What `torch.compile(model, backend="regraft", options=...)` may say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch._dynamo.exc import ShortenTraceback


@dataclass(frozen=True)
class Options:
    """What `torch.compile(..., options=...)` may say; see rewriter/backend.py."""

    backend: str = "inductor"
    fallback: str = "replay"
    strict: bool = False
    batch_invariant: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Options:
        """Raises UnknownOption, a ValueError."""
        given = dict(options or {})
        known = cls.__dataclass_fields__
        unknown = [name for name in given if name not in known]
        if unknown:
            raise UnknownOption(
                f"unknown option {', '.join(map(repr, unknown))}: regraft has {', '.join(known)}"
            )
        if given.get("batch_invariant") is True:
            given.setdefault("backend", "eager")
        made = cls(**given)
        for name in ("strict", "batch_invariant"):
            if not isinstance(getattr(made, name), bool):
                raise UnknownOption(f"{name}={getattr(made, name)!r}: expected True or False")
        if made.fallback not in ("replay", "refuse"):
            raise UnknownOption(f'fallback={made.fallback!r}: expected "replay" or "refuse"')
        if not isinstance(made.backend, str) or made.backend == "regraft":
            raise UnknownOption(f"backend={made.backend!r}: expected the name of another backend")
        if made.batch_invariant and made.backend not in ("eager", "aot_eager"):
            raise UnknownOption(
                f"backend={made.backend!r} fuses operations, which changes how they round: "
                'with batch_invariant give "eager" or "aot_eager"'
            )
        return made


class UnknownOption(ShortenTraceback, ValueError):
    """An option that there is not, or a value that it cannot have."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem, first_useful_frame=None)
