"""Selection of pools: neighbouring keys that are weighed into one, scored and selected together, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from . import select


def index_pool_topk_torch(
    q: Tensor,
    rows: Tensor,
    weights: Tensor,
    bias: Tensor,
    cache: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    topk: int,
    scale: float,
    relu: bool = True,
) -> Tensor:
    """`index_pool_topk` on any device."""
    cache.view(-1, cache.shape[2]).index_copy_(0, slot_mapping, rows)
    seq, pos = select.places(cu_seqlens, context_lens, q.shape[0])
    pools = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
    metadata = (cu_seqlens, context_lens, block_table)
    if q.device.type == "cpu":
        _by_sequence(pools, q, weights, bias, cache, metadata, pos, scale, relu)
    else:
        _by_token(pools, q, weights, bias, cache, block_table[seq], pos, scale, relu)
    return tokens_of(pools, pos, bias.shape[0])


def _by_sequence(
    pools: Tensor, q: Tensor, weights: Tensor, bias: Tensor, cache: Tensor, metadata: select.Metadata, pos: Tensor,
    scale: float, relu: bool,
) -> None:  # fmt: skip
    cu_seqlens, context_lens, block_table = metadata
    bounds, page_size, size = cu_seqlens.tolist(), cache.shape[1], bias.shape[0]
    for seq, context in enumerate(context_lens.tolist()):
        start, end = bounds[seq], bounds[seq + 1]
        whole = (context + end - start) // size
        if start == end or not whole:
            continue
        pages = block_table[seq, : -(-whole * size // page_size)].long()
        held = cache[pages].reshape(-1, cache.shape[2])[: whole * size]
        keys = pooled(held.unflatten(0, (whole, size)), bias)
        block = max(1, select._ELEMENTS // (q.shape[1] * whole))
        for first in range(start, end, block):
            part = slice(first, min(first + block, end))
            products = torch.matmul(select.wide(q[part]), keys.t())
            pools[part] = _best(pools, products, weights[part], pos[part], size, scale, relu)


def _by_token(
    pools: Tensor, q: Tensor, weights: Tensor, bias: Tensor, cache: Tensor, block_table: Tensor, pos: Tensor,
    scale: float, relu: bool,
) -> None:  # fmt: skip
    """`block_table` is [N, max_pages], of each token's sequence."""
    size, longest = bias.shape[0], block_table.shape[1] * cache.shape[1]
    whole = longest // size
    block = max(1, select._ELEMENTS // (max(1, longest) * (cache.shape[2] + q.shape[1])))
    for first in range(0, q.shape[0], block):
        part = slice(first, min(first + block, q.shape[0]))
        held = cache[block_table[part].long()].flatten(1, 2)[:, : whole * size]
        keys = pooled(held.unflatten(1, (whole, size)), bias)
        products = torch.matmul(select.wide(q[part]), keys.transpose(1, 2))
        pools[part] = _best(pools, products, weights[part], pos[part], size, scale, relu)


def _best(
    pools: Tensor, products: Tensor, weights: Tensor, pos: Tensor, size: int, scale: float, relu: bool
) -> Tensor:  # fmt: skip
    """The best pools that lie wholly before or at each token."""
    scores = select.weigh(products, weights, scale, relu)
    last = torch.arange(scores.shape[1], device=pos.device) * size + size - 1
    return select.best(scores, last[None] <= pos[:, None], pools.shape[1])


def pooled(held: Tensor, bias: Tensor) -> Tensor:
    """[..., P, 2E] keys and gates, and [P, E] -> [..., E]: each feature weighed by a softmax of its own."""
    width = bias.shape[1]
    shares = (select.wide(held[..., width:]) + bias).softmax(-2)
    return (shares * held[..., :width]).sum(-2)


def tokens_of(pools: Tensor, pos: Tensor, size: int) -> Tensor:
    """[N, K] pools and [N] positions -> [N, K * size + size - 1]: their tokens, and those after the last whole pool."""
    offset = torch.arange(size, dtype=torch.int32, device=pools.device)
    inside = torch.where(pools[..., None] >= 0, pools[..., None] * size + offset, -1)
    seen = (pos + 1)[:, None].to(torch.int32)
    rest = torch.where(offset[:-1] < seen % size, seen // size * size + offset[:-1], -1)
    return torch.cat([inside.flatten(1), rest], 1)
