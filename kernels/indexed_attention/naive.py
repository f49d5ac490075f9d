"""What selecting keys and attending to them means: one token, one head at a time, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from regraft.kernels.latent_attention.naive import rebuilt
from regraft.kernels.paged_attention.naive import is_attended

WIDE = torch.float64


def index_topk_naive(
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
    """`index_topk` by its definition; see there."""
    cache.view(-1, cache.shape[2])[slot_mapping] = k
    selected = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
    for token, pos, pages in tokens(cu_seqlens, context_lens, block_table):
        scored = []
        for key_pos in range(pos + 1):
            if not is_attended(pos, key_pos, window, chunk):
                continue
            key = cache[pages[key_pos // cache.shape[1]], key_pos % cache.shape[1]].to(WIDE)
            products = q[token].to(WIDE) @ key
            products = products.clamp(min=0) if relu else products
            scored.append((-scale * float(weights[token].to(WIDE) @ products), key_pos))
        chosen = sorted(key_pos for _, key_pos in sorted(scored)[:topk])
        selected[token, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return selected


def index_pool_topk_naive(
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
    """`index_pool_topk` by its definition; see there."""
    cache.view(-1, cache.shape[2])[slot_mapping] = rows
    size, width = bias.shape
    shape = (q.shape[0], topk * size + size - 1)
    selected = torch.full(shape, -1, dtype=torch.int32, device=q.device)
    for token, pos, pages in tokens(cu_seqlens, context_lens, block_table):
        scored = []
        for pool in range((pos + 1) // size):
            at = torch.arange(pool * size, pool * size + size)
            held = cache[pages[at // cache.shape[1]], at % cache.shape[1]].to(WIDE)
            key = ((held[:, width:] + bias.to(WIDE)).softmax(0) * held[:, :width]).sum(0)
            products = q[token].to(WIDE) @ key
            products = products.clamp(min=0) if relu else products
            scored.append((-scale * float(weights[token].to(WIDE) @ products), pool))
        for i, pool in enumerate(sorted(pool for _, pool in sorted(scored)[:topk])):
            selected[token, i * size : i * size + size] = torch.arange(size) + pool * size
        rest = torch.arange((pos + 1) // size * size, pos + 1)
        selected[token, topk * size : topk * size + len(rest)] = rest
    return selected


def index_block_topk_naive(
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
    """`index_block_topk` by its definition; see there."""
    cache.view(-1, cache.shape[2])[slot_mapping] = k
    shape = (q.shape[0], topk * size + size - 1)
    selected = torch.full(shape, -1, dtype=torch.int32, device=q.device)
    for token, pos, pages in tokens(cu_seqlens, context_lens, block_table):
        scores = []
        for last in range(size - 1, pos + 1, size):
            key = cache[pages[last // cache.shape[1]], last % cache.shape[1]].to(WIDE)
            products = q[token].to(WIDE) @ key
            products = products.clamp(min=0) if relu else products
            share = torch.ones(len(products)) if weights is None else weights[token]
            scores.append(scale * (share.to(WIDE) @ products))
        if scores:
            best = torch.stack(scores).topk(min(topk, len(scores))).indices
            for i, block in enumerate(sorted(best.tolist())):
                selected[token, i * size : i * size + size] = torch.arange(size) + block * size
        rest = torch.arange((pos + 1) // size * size, pos + 1)
        selected[token, topk * size : topk * size + len(rest)] = rest
    return selected


def indexed_attention_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    selected: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """`indexed_attention` by its definition; see there."""
    page_size, group = k_cache.shape[1], q.shape[1] // k.shape[1]
    k_cache.view(-1, *k.shape[1:])[slot_mapping] = k
    v_cache.view(-1, *v.shape[1:])[slot_mapping] = v
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    for token, pos, pages in tokens(cu_seqlens, context_lens, block_table):
        chosen = [j for j in selected[token].tolist() if j >= 0]
        at = torch.tensor(
            [j for j in chosen if is_attended(pos, j, window, chunk)], dtype=torch.long
        )
        if not len(at):
            continue
        keys = k_cache[pages[at // page_size], at % page_size].to(WIDE)
        values = v_cache[pages[at // page_size], at % page_size].to(WIDE)
        for head in range(q.shape[1]):
            scores = scale * (keys[:, head // group] @ q[token, head].to(WIDE))
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head, None].to(WIDE)])
            share = torch.softmax(scores, 0)[: len(at)]
            out[token, head] = (share @ values[:, head // group]).to(q.dtype)
    return out


def indexed_latent_attention_naive(
    q: Tensor,
    rows: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    cache: Tensor,
    selected: Tensor,
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
    """`indexed_latent_attention` by its definition: every key and value rebuilt."""
    cache.view(-1, cache.shape[2])[slot_mapping] = rows
    query, keys, values = rebuilt(q, w_k, w_v, latent_start, shared_start)
    return indexed_attention_naive(
        query, keys(rows), values(rows), keys(cache), values(cache), selected, cu_seqlens, context_lens, block_table,
        slot_mapping, scale, window, chunk, softcap, sinks,
    )  # fmt: skip


def tokens(
    cu_seqlens: Tensor, context_lens: Tensor, block_table: Tensor
) -> list[tuple[int, int, Tensor]]:
    """(row, position in its sequence, pages of the sequence) of every token."""
    bounds = cu_seqlens.tolist()
    return [
        (token, context + token - bounds[seq], block_table[seq].long())
        for seq, context in enumerate(context_lens.tolist())
        for token in range(bounds[seq], bounds[seq + 1])
    ]
