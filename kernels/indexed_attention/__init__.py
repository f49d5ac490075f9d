"""Attention over the keys that an indexer selects: index scores, top-k, and attention over the selected rows.

`schema` declares the operators, `naive` is what they mean, `select` scores and selects,
`pools` does so with several keys as one, `gather` attends.
"""

from .schema import index_pool_topk, index_topk, indexed_attention, indexed_latent_attention

__all__ = ["index_pool_topk", "index_topk", "indexed_attention", "indexed_latent_attention"]
