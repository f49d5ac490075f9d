"""Choosing the next token on the device."""

from .schema import draw, greedy

__all__ = ["draw", "greedy"]
