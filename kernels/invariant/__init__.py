"""Operators whose result for a row is the same bits whatever else is computed beside it.

A sum is a tree of additions of halves, an exponential is one that vector and scalar code round alike, a product is made
in tiles of one fixed size whose places were measured to be alike (`places`), attention goes through tiles of keys from
position 0 on, and a recurrence is computed token by token. `schema` registers them all, for the CPU and for CUDA
(`cuda`), where a sum's order is that of one kernel's fixed tile.
"""

from . import schema
from .places import steady_attention, steady_experts, steady_product

__all__ = ["schema", "steady_attention", "steady_experts", "steady_product"]
