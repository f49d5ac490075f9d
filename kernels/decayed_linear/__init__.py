"""Linear attention with one constant decay per head (lightning attention)."""

from .schema import decayed_linear

__all__ = ["decayed_linear"]
