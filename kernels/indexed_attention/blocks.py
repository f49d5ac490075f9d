"""Selection of blocks: neighbouring tokens whose one key lies in the row of the last of them, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from . import select
from .pools import tokens_of


def index_block_topk_torch(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None,
    cache: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    size: int,
    topk: int,
    scale: float,
    relu: bool = True,
) -> Tensor:
    """`index_block_topk` on any device."""
    cache.view(-1, cache.shape[2]).index_copy_(0, slot_mapping, k)
    seq, pos = select.places(cu_seqlens, context_lens, q.shape[0])
    weights = q.new_ones(q.shape[:2]) if weights is None else weights
    blocks = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
    how = (size, scale, relu)
    if q.device.type == "cpu":
        _by_sequence(blocks, q, weights, cache, (cu_seqlens, context_lens, block_table), *how)
    else:
        _by_token(blocks, q, weights, cache, block_table[seq], pos, *how)
    return tokens_of(blocks, pos, size)


def _by_sequence(
    blocks: Tensor, q: Tensor, weights: Tensor, cache: Tensor, metadata: select.Metadata, size: int, scale: float,
    relu: bool,
) -> None:  # fmt: skip
    cu_seqlens, context_lens, block_table = metadata
    bounds, topk = cu_seqlens.tolist(), blocks.shape[1]
    for seq, context in enumerate(context_lens.tolist()):
        start, end = bounds[seq], bounds[seq + 1]
        whole = (context + end - start) // size
        if start == end or not whole:
            continue
        keys = select.wide(_keys(cache, block_table[seq], whole, size))
        limit = max(1, select._ELEMENTS // (q.shape[1] * whole))
        first = start
        while first < end:
            # tokens that choose among the same blocks
            count = (context + first - start + 1) // size
            last = min(end, start - context + (count + 1) * size - 1, first + limit)
            rows = slice(first, last)
            first = last
            if count <= topk:
                blocks[rows, :count] = torch.arange(count, dtype=torch.int32)
                continue
            products = torch.matmul(select.wide(q[rows]), keys[:count].t())
            scores = select.weigh(products, weights[rows], scale, relu)
            blocks[rows] = scores.topk(topk, 1).indices.sort(1).values.int()


def _by_token(
    blocks: Tensor, q: Tensor, weights: Tensor, cache: Tensor, block_table: Tensor, pos: Tensor, size: int,
    scale: float, relu: bool,
) -> None:  # fmt: skip
    """`block_table` is [N, max_pages], of each token's sequence."""
    whole = block_table.shape[1] * cache.shape[1] // size
    last = torch.arange(whole, device=q.device) * size + size - 1
    limit = max(1, select._ELEMENTS // (max(1, whole) * (cache.shape[2] + q.shape[1])))
    for first in range(0, q.shape[0], limit):
        rows = slice(first, min(first + limit, q.shape[0]))
        keys = select.wide(_keys(cache, block_table[rows], whole, size))
        products = torch.matmul(select.wide(q[rows]), keys.transpose(1, 2))
        scores = select.weigh(products, weights[rows], scale, relu)
        blocks[rows] = select.best(scores, last[None] <= pos[rows, None], blocks.shape[1])


def _keys(cache: Tensor, pages: Tensor, count: int, size: int) -> Tensor:
    """[..., max_pages] page tables -> [..., count, E]: the rows of the last tokens of the first `count` blocks."""
    last = torch.arange(count, device=cache.device) * size + size - 1
    return cache[pages[..., last // cache.shape[1]].long(), last % cache.shape[1]]
