"""Attention over the keys that an indexer selects: index scores, top-k, and attention over the selected rows.

`schema` declares the operators, `naive` is what they mean, `select` scores and selects,
`pools` does so with several keys as one, `blocks` with one key of several tokens, `gather` attends.
"""

from .schema import (
    index_block_topk,
    index_pool_topk,
    index_topk,
    indexed_attention,
    indexed_latent_attention,
)

__all__ = [
    "index_block_topk",
    "index_pool_topk",
    "index_topk",
    "indexed_attention",
    "indexed_latent_attention",
]
