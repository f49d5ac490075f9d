"""What an engine has done and what it holds, as numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Pages of rows that are read equally far back."""

    reach: str
    """How far: "all", "window 4096"."""
    num_pages: int
    """Pages that there are."""
    free_pages: int
    """Pages that nobody uses and whose content nobody can ask for, now."""
    cached_pages: int
    """Full pages that a request with the same beginning would find, used or not, now."""
    most_per_request: int | None
    """Pages that a request of any length has at once, at most; None where they grow with it."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A moment's numbers; `num_` and `prefix_` ones without "now" count from the engine's start.

    Prompts count once per admission: a preempted request asks again, for all the tokens that it has by then.
    """

    num_running: int
    """Requests running now."""
    num_waiting: int
    """Requests waiting now, those that were preempted included."""
    num_preemptions: int
    """How often a request had to give its pages up for an older one."""
    computed_tokens: int
    """Tokens that went through the model."""
    free_pages: int
    """Pages that nobody uses and whose content nobody can ask for, now."""
    cached_pages: int
    """Full pages that a request with the same beginning would find, used or not, now."""
    prefix_queried_tokens: int
    """Tokens of admitted requests that may use the prefix cache (0 if it is off)."""
    prefix_hit_tokens: int
    """Those of them that did not have to be computed."""
    prefix_evictions: int
    """Cached pages that were given away for want of free ones."""
    checkpoints: int
    """Copies of recurrent states that a request could start from, now."""
    checkpoint_evictions: int
    """Such copies that were given up for newer ones."""
    pools: tuple[PoolStats, ...]
    """Pages by how far back their rows are read, now; none of a model without rows."""

    @property
    def prefix_hit_rate(self) -> float:
        """`prefix_hit_tokens` in `prefix_queried_tokens`, 0 to 1."""
        return self.prefix_hit_tokens / max(1, self.prefix_queried_tokens)
