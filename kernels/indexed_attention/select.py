"""Index scores over paged keys, and the best of them, in torch.

On the CPU each sequence scores against a matrix of its own keys, and one that has no more keys than may be selected is
not scored at all. Elsewhere tokens go in blocks against the pages their sequence may have, without a look at the
metadata from the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ELEMENTS = 1 << 23
"""About the number of elements of an intermediate result; more tokens go block by block."""


Metadata = tuple[Tensor, Tensor, Tensor]
"""cu_seqlens, context_lens and block_table"""


def index_topk_torch(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cache: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    topk: int,
    scale: float,
    relu: bool = True,
    window: int = 0,
    chunk: int = 0,
) -> Tensor:
    """`index_topk` on any device."""
    cache.view(-1, cache.shape[2]).index_copy_(0, slot_mapping, k)
    selected = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
    metadata, mask = (cu_seqlens, context_lens, block_table), (window, chunk)
    if q.device.type == "cpu":
        _by_sequence(selected, q, weights, cache, metadata, topk, scale, relu, mask)
    else:
        _by_token(selected, q, weights, cache, metadata, topk, scale, relu, mask)
    return selected


def _by_sequence(
    selected: Tensor, q: Tensor, weights: Tensor, cache: Tensor, metadata: Metadata, topk: int, scale: float,
    relu: bool, mask: tuple[int, int],
) -> None:  # fmt: skip
    cu_seqlens, context_lens, block_table = metadata
    bounds, page_size = cu_seqlens.tolist(), cache.shape[1]
    for seq, context in enumerate(context_lens.tolist()):
        start, end = bounds[seq], bounds[seq + 1]
        total = context + end - start
        if start == end:
            continue
        at = torch.arange(total, dtype=torch.int32)
        if total <= topk and not any(mask):
            pos = torch.arange(context, total)[:, None]
            selected[start:end, :total] = torch.where(at <= pos, at, -1)
            continue
        pages = block_table[seq, : -(-total // page_size)].long()
        keys = wide(cache[pages].reshape(-1, cache.shape[2])[:total])
        block = max(1, _ELEMENTS // (q.shape[1] * total))
        for first in range(start, end, block):
            rows = slice(first, min(first + block, end))
            pos = torch.arange(context + rows.start - start, context + rows.stop - start)
            products = torch.matmul(wide(q[rows]), keys.t())
            scores = weigh(products, weights[rows], scale, relu)
            selected[rows] = best(scores, attended(pos, at[None], *mask), topk)


def _by_token(
    selected: Tensor, q: Tensor, weights: Tensor, cache: Tensor, metadata: Metadata, topk: int, scale: float,
    relu: bool, mask: tuple[int, int],
) -> None:  # fmt: skip
    cu_seqlens, context_lens, block_table = metadata
    seq, pos = places(cu_seqlens, context_lens, q.shape[0])
    page_size = cache.shape[1]
    at = torch.arange(block_table.shape[1] * page_size, device=q.device)
    block = max(1, _ELEMENTS // (len(at) * (cache.shape[2] + q.shape[1])))
    for first in range(0, q.shape[0], block):
        rows = slice(first, min(first + block, q.shape[0]))
        pages = block_table[seq[rows]].long()
        keys = wide(cache[pages].flatten(1, 2))
        products = torch.matmul(wide(q[rows]), keys.transpose(1, 2))
        scores = weigh(products, weights[rows], scale, relu)
        selected[rows] = best(scores, attended(pos[rows], at[None], *mask), topk)


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def weigh(products: Tensor, weights: Tensor, scale: float, relu: bool) -> Tensor:
    """[n, I, L] products of index heads and [n, I] weights -> [n, L] scores."""
    products = products.relu() if relu else products
    scores = torch.matmul(weights.to(products.dtype).unsqueeze(1), products).squeeze(1)
    return scores * scale


def attended(pos: Tensor, key_pos: Tensor, window: int, chunk: int) -> Tensor:
    """[n] and [n or 1, L] -> [n, L]: whether a query sees a key. A token of no sequence has a negative position."""
    pos = pos[:, None]
    seen = (key_pos >= 0) & (key_pos <= pos)
    if window:
        seen = seen & (pos - key_pos < window)
    if chunk:
        seen = seen & (pos // chunk == key_pos // chunk)
    return seen


def best(scores: Tensor, allowed: Tensor, topk: int) -> Tensor:
    """[n, topk] int32: the positions of the best allowed scores, ascending, then -1. Of equals the first."""
    length = scores.shape[1]
    taken = allowed
    if length > topk:
        scores = torch.where(allowed, scores, -torch.inf)
        least = scores.topk(topk, dim=1).values[:, -1:]
        above, equal = scores > least, scores == least
        left = topk - above.sum(1, keepdim=True)
        taken = allowed & (above | (equal & (equal.cumsum(1) <= left)))
    place = torch.where(taken, taken.cumsum(1) - 1, topk)
    at = torch.arange(length, dtype=torch.int32, device=scores.device).expand(scores.shape)
    found = torch.full((len(scores), topk + 1), -1, dtype=torch.int32, device=scores.device)
    return found.scatter_(1, place, at)[:, :topk]


def places(cu_seqlens: Tensor, context_lens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """[N] the sequence of each token and its position there; position -1 where it belongs to none."""
    row = torch.arange(num_tokens, device=cu_seqlens.device)
    seq = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    owned = seq < len(context_lens)
    seq = torch.where(owned, seq, 0)
    pos = context_lens[seq] + row - cu_seqlens[seq]
    return seq, torch.where(owned, pos, -1)
