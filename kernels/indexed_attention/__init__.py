"""Attention over the keys that an indexer selects: index scores, top-k, and attention over the selected rows.

`schema` declares the three operators, `naive` is what they mean, `select` scores and selects, `gather` attends.
"""

from .schema import index_topk, indexed_attention, indexed_latent_attention

__all__ = ["index_topk", "indexed_attention", "indexed_latent_attention"]
