"""State space duality (Mamba-2): a P x S state per head, one scalar decay per head and token."""

from .schema import ssd

__all__ = ["ssd"]
