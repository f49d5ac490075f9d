"""Measures what the products rest on: that a row of a tile has one result at every place, beside any neighbours.

Torch and BLAS promise no such thing, so it is measured for every shape that a model uses, on the machine and with the
number of threads that it runs on, before a claim is made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .products import TILE, tile_product
from .reductions import wide
from .tiles import KEYS, QUERIES, scores_of, values_of


def steady_product(weight: Tensor) -> bool:
    """Whether `tile_product` with this weight [N, K] gives a row the same bits at every place of a tile."""
    generator = torch.Generator().manual_seed(weight.shape[0] * 8191 + weight.shape[1])
    rows = torch.randn(TILE + 1, weight.shape[1], generator=generator).to(weight.dtype)
    row, others = rows[0], rows[1:]
    expected = tile_product(row.expand(TILE, -1).contiguous(), weight)
    if not torch.equal(expected, expected[:1].expand_as(expected)):
        return False
    for place in range(TILE):
        tile = others.clone()
        tile[place] = row
        if not torch.equal(tile_product(tile, weight)[place], expected[0]):
            return False
    return True


def steady_attention(
    width: int, v_width: int, heads: int, kv_heads: int, dtype: torch.dtype
) -> bool:
    """Whether both products of attention give a query the same bits at every place, in batches of any size."""
    generator = torch.Generator().manual_seed(width * 8191 + heads)
    columns, dtype = QUERIES * (heads // kv_heads), wide(dtype)
    keys, values = (
        torch.randn(KEYS, size, generator=generator).to(dtype) for size in (width, v_width)
    )
    query = torch.randn(width, 1, generator=generator).to(dtype)
    weights = torch.rand(KEYS, 1, generator=generator).to(dtype)
    products = ((scores_of, keys, query), (values_of, values.t(), weights))
    for product, left, right in products:
        expected = product(left[None], right.expand(-1, columns)[None])[0, :, 0]
        for batch in (1, 2, 3, 8):
            for place in range(columns):
                at = place % batch
                lefts = torch.randn(batch, *left.shape, generator=generator).to(dtype)
                rights = torch.randn(batch, right.shape[0], columns, generator=generator).to(dtype)
                lefts[at], rights[at, :, place] = left, right[:, 0]
                if not torch.equal(product(lefts, rights)[at, :, place], expected):
                    return False
    return True
