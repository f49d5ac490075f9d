"""Passes that are not Regraft's own: whoever has a mixer that no pass here knows adds one for their process."""

from __future__ import annotations

from regraft.rewriter.pattern import Pass
from regraft.rewriter.pipeline import GraphPass

from . import PIPELINE

_own: list[Pass | GraphPass] = []


def register_pass(own: Pass | GraphPass) -> None:
    """Offer every mixing place to `own` first, before Regraft's passes, in every rewrite from now on.

    own   a Pass (finds, checks and rewrites one region) or a GraphPass (changes the graph as a whole). An operator that
          it puts in is declared under `regraft::`: only those may mix tokens, and they promise to keep apart the
          sequences that `cu_seqlens` bounds. `wrap` holds them to that when it validates.

    What is registered later comes first. Raises TypeError for anything else, ValueError if a pass of this name exists.
    """
    if not isinstance(own, (Pass, GraphPass)):
        raise TypeError(f"expected a Pass or a GraphPass, got {type(own).__name__}")
    if own.name in {step.name for step in pipeline()}:
        raise ValueError(f"there is a pass named {own.name!r} already: name yours differently")
    _own.insert(0, own)


def unregister_pass(name: str) -> None:
    """Take back what `register_pass` added. Raises KeyError if nothing of this name was."""
    for step in _own:
        if step.name == name:
            _own.remove(step)
            return
    raise KeyError(f"no pass named {name!r} was registered: {[step.name for step in _own]}")


def pipeline() -> tuple[Pass | GraphPass, ...]:
    """Every pass in the order in which regions are offered."""
    return (*_own, *PIPELINE)
