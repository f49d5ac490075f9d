"""Kimi delta attention: the delta rule with a decay of its own for every key channel."""

from .schema import kda

__all__ = ["kda"]
