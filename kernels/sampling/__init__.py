"""Choosing the next token on the device."""

from .schema import greedy

__all__ = ["greedy"]
