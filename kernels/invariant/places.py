"""Measures what the products rest on: that a row of a tile has one result at every place, beside any neighbours.

Torch, BLAS and tensor cores promise no such thing, so it is measured for every shape that a model uses, on the machine
and with the number of threads that it runs on, before a claim is made.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from .products import TILE, tile_product
from .reductions import wide
from .tiles import KEYS, QUERIES, scores_of, values_of


def steady_product(weight: Tensor) -> bool:
    """Whether a product with this weight [N, K] gives a row the same bits at every place of a tile, in every tile."""
    if weight.is_cuda:
        return triton_places().steady_product(weight)
    generator = torch.Generator().manual_seed(weight.shape[0] * 8191 + weight.shape[1])
    rows = torch.randn(TILE + 1, weight.shape[1], generator=generator).to(weight.dtype)
    row, others = rows[0], rows[1:]
    expected = tile_product(row.expand(TILE, -1).contiguous(), weight)
    if not _same(expected, expected[:1].expand_as(expected)):
        return False
    for place in range(TILE):
        tile = others.clone()
        tile[place] = row
        if not _same(tile_product(tile, weight)[place], expected[0]):
            return False
    return True


def _same(a: Tensor, b: Tensor) -> bool:
    """NaN being itself: a weight may have one, and that says nothing of places."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def steady_experts(weight: Tensor, transposed: bool) -> bool:
    """The same for matrices of experts, as `expert_linear` takes them."""
    if weight.is_cuda:
        return triton_places().steady_experts(weight, transposed)
    return steady_product(weight[0].t() if transposed else weight[0])


def triton_places() -> ModuleType:
    """What is measured on a GPU. Triton is not on every machine, and need not be where there is none."""
    from . import triton_places

    return triton_places


def steady_attention(
    width: int,
    v_width: int,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> bool:
    """Whether both products of attention give a query the same bits at every place, in batches of any size."""
    if torch.device(device).type == "cuda":
        return triton_places().steady_attention(width, v_width, heads, kv_heads, dtype, device)
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
