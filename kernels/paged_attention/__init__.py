"""Attention of a packed row over keys and values kept in pages.

`schema` declares the operator, `naive` says what it means, `cpu` and `triton` compute it.
"""

from .schema import paged_attention

__all__ = ["paged_attention"]
