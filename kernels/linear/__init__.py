"""A projection, by a kernel of its own where rows are few."""

from .schema import linear

__all__ = ["linear"]
