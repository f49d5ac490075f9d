"""Attention over a window of rows and one compressed entry per window of tokens before, all of them or the best.

`schema` declares the operators, `naive` is what they mean, `pool` weighs the rows of a window into one, `select` scores
entries and selects, `attend` attends.
"""

from .schema import compressed_attention, index_entries, pool_windows

__all__ = ["compressed_attention", "index_entries", "pool_windows"]
