"""Paged attention in key tiles that begin at position 0 of each request, whatever is new in a step.

Maximum and sum of the softmax are carried from tile to tile in float32. A tile in which a query may attend to nothing
changes none of its bits, so it does not matter which tiles its neighbours need.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regraft.kernels.paged_attention.cpu import Scoring

from .products import matmul
from .reductions import tree_sum, wide
from .tiles import KEYS, QUERIES, QueryTiles, query_tiles, scores_of, values_of

_GATHERED = 1 << 21
"""About the number of elements of the keys that are gathered at once."""


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    rel_bias: Tensor | None = None,
) -> Tensor:
    """As `regraft.kernels.paged_attention.paged_attention`."""
    pools = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    for pool, new in zip(pools, (k, v)):
        pool.index_copy_(0, slot_mapping, new)
    scoring = Scoring(scale, window, chunk, softcap, sinks, alibi_slopes, rel_bias)
    tiles = query_tiles(cu_seqlens, context_lens, block_table, window, chunk)
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    size = max(1, _GATHERED // (KEYS * k.shape[1] * max(k.shape[2], v.shape[2])))
    for part in tiles.split(size):
        if len(part.rows) == 0:
            continue
        has_query = part.positions >= 0
        attended = _attend(q, *pools, part, scoring, k_cache.shape[1])
        out[part.rows[has_query]] = attended[has_query].to(q.dtype)
    return out


def _attend(
    q: Tensor, k_rows: Tensor, v_rows: Tensor, tiles: QueryTiles, scoring: Scoring, page_size: int
) -> Tensor:
    """[B, QUERIES, H, Dv] of all queries of the tiles, in float32 or wider."""
    kv_heads, width = k_rows.shape[1:]
    num, group, dtype = len(tiles.rows), q.shape[1] // kv_heads, wide(q.dtype)
    columns = group * QUERIES
    query = q[tiles.rows].to(dtype).view(num, QUERIES, kv_heads, group, width)
    query = query.permute(0, 2, 4, 3, 1).reshape(num * kv_heads, width, columns)
    best = query.new_full((num, kv_heads, 1, columns), -torch.inf)
    total = torch.zeros_like(best)
    mixed = query.new_zeros(num, kv_heads, v_rows.shape[2], columns)
    for step in range(int(tiles.count[0])):
        position, slots, is_own = tiles.keys(step, page_size)
        n = len(position)
        keys, values = (
            pool[slots].masked_fill(~is_own[..., None, None], 0.0).to(dtype)
            for pool in (k_rows, v_rows)
        )
        keys = keys.transpose(1, 2).reshape(n * kv_heads, KEYS, width)
        scores = scores_of(keys, query[: n * kv_heads]).view(n, kv_heads, KEYS, group, QUERIES)
        scores = _scored(scores, tiles, position, scoring).view(n, kv_heads, KEYS, columns)
        highest = torch.maximum(best[:n], scores.amax(2, keepdim=True))
        shift = highest.masked_fill(highest == -torch.inf, 0.0)
        weights, kept = (scores - shift).exp(), (best[:n] - shift).exp()
        values = values.permute(0, 2, 3, 1).reshape(n * kv_heads, -1, KEYS)
        added = values_of(values, weights.view(n * kv_heads, KEYS, columns))
        best[:n] = highest
        total[:n] = total[:n] * kept + tree_sum(weights, 2)
        mixed[:n] = mixed[:n] * kept + added.view_as(mixed[:n])
    mixed = _divided(mixed, best, total, scoring.sinks)
    return mixed.view(num, kv_heads, -1, group, QUERIES).permute(0, 4, 1, 3, 2).flatten(2, 3)


def _divided(mixed: Tensor, best: Tensor, total: Tensor, sinks: Tensor | None) -> Tensor:
    """Values over the softmax's denominator, to which a sink adds."""
    if sinks is not None:
        sink = sinks.to(best.dtype).view(best.shape[1], 1, -1, 1)
        sink = sink.expand(-1, -1, -1, QUERIES).reshape(1, best.shape[1], 1, -1)
        highest = torch.maximum(best, sink)
        kept = (best - highest).exp()
        mixed, total = mixed * kept, total * kept + (sink - highest).exp()
    return mixed / total + 0.0  # -0 becomes 0: its sign would tell of tiles that add nothing


def _scored(scores: Tensor, tiles: QueryTiles, position: Tensor, scoring: Scoring) -> Tensor:
    """Products [n, Hk, KEYS, G, QUERIES] -> scores, -inf where a query does not attend."""
    n, kv_heads, _, group, _ = scores.shape
    asked = tiles.positions[:n, None, :]
    distance = asked - position[:, :, None]
    scores = scores * scoring.scale
    if scoring.softcap:
        scores = (scores / scoring.softcap).tanh() * scoring.softcap
    if scoring.alibi_slopes is not None:
        slopes = scoring.alibi_slopes.to(scores.dtype).view(1, kv_heads, 1, group, 1)
        scores = scores - slopes * distance[:, None, :, None].to(scores.dtype)
    if scoring.rel_bias is not None:
        bias = _bias_by_distance(scoring.rel_bias[tiles.rows[:n]], distance)
        scores = scores + bias.view(n, kv_heads, group, KEYS, QUERIES).transpose(2, 3)
    attends = (distance >= 0) & (asked >= 0)
    if scoring.window:
        attends &= distance < scoring.window
    if scoring.chunk:
        attends &= position[:, :, None] // scoring.chunk == asked // scoring.chunk
    return scores.masked_fill(~attends[:, None, :, None], -torch.inf)


def _bias_by_distance(rel_bias: Tensor, distance: Tensor) -> Tensor:
    """rel_bias [n, QUERIES, H, W], distance [n, KEYS, QUERIES] -> [n, H, KEYS, QUERIES], 0 from distance W on."""
    reach = rel_bias.shape[3]
    back = distance.transpose(1, 2)[:, :, None]
    index = back.clamp(0, reach - 1).expand(-1, -1, rel_bias.shape[2], -1)
    bias = torch.where((back >= 0) & (back < reach), rel_bias.gather(3, index), 0.0)
    return bias.permute(0, 2, 3, 1)


def latent_attention(
    q: Tensor,
    rows: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    cache: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    latent_start: int,
    shared_start: int,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `regraft.kernels.latent_attention.latent_attention`, always with the weights absorbed."""
    rank, shared = w_k.shape[2], rows.shape[1] - w_k.shape[2]
    latent = q[..., latent_start : latent_start + w_k.shape[1]].transpose(0, 1)
    absorbed = matmul(latent, w_k, "right").transpose(0, 1)
    query = torch.cat([absorbed, q[..., shared_start : shared_start + shared]], -1)
    key, pages = rows.unsqueeze(1), cache.unsqueeze(2)
    attended = paged_attention(
        query, key, key[..., :rank], pages, pages[..., :rank], cu_seqlens, context_lens, block_table, slot_mapping,
        scale, window, chunk, softcap, sinks,
    )  # fmt: skip
    return matmul(attended.transpose(0, 1), w_v.mT, "right").transpose(0, 1).contiguous()
