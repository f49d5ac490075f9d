"""Latent attention in the cheaper of two exact forms.

Absorbed: the key projection moves into the query and the value projection into the output, and the cached rows are
one key head and one value head. Of n new tokens behind c earlier ones, which attend to P = n c + n (n + 1) / 2 rows,
this takes H (n R (K + V) + P (2R + E)) multiplications.
Expanded: keys and values of the whole sequence are rebuilt once, then P costs less a row:
H ((n + c) R (K + V) + P (K + E + V)).
So prefills from the start and long ones expand, everything else absorbs. The count is near enough to the clock. One
thread, float32: behind 1,024 tokens the forms take the same time at 128 to 192 new tokens where R = 512, K = V = 128,
E = 64 with 16 heads (counted: 158), at 64 to 96 where R = 256, K = V = 64, E = 32 with 40 heads (counted: 82). Behind
none, expanding takes 0.4 to 1.0 of the time from 32 tokens on.

On a GPU everything is absorbed: which sequence is long would have to be read back from the device in every step and
layer, and would change the launches that a CUDA graph has recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regraft.kernels.paged_attention import paged_attention


def latent_attention_torch(
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
    """`latent_attention` on any device that `paged_attention` runs on."""
    rank, shared = w_k.shape[2], rows.shape[1] - w_k.shape[2]
    latent_query = q[..., latent_start : latent_start + w_k.shape[1]]
    shared_query = q[..., shared_start : shared_start + shared]
    masks = (scale, window, chunk, softcap, sinks)
    if q.device.type == "cpu" and not window and not chunk:
        long = _long(cu_seqlens, context_lens, w_k, w_v, shared)
        if long:
            return _mixed(
                latent_query, shared_query, rows, w_k, w_v, cache, cu_seqlens, context_lens, block_table,
                slot_mapping, masks, long,
            )  # fmt: skip
    query = torch.cat([absorb(latent_query, w_k), shared_query], -1)
    key = rows.unsqueeze(1)
    pages = cache.unsqueeze(2)
    attended = paged_attention(
        query, key, key[..., :rank], pages, pages[..., :rank], cu_seqlens, context_lens, block_table, slot_mapping,
        *masks,
    )  # fmt: skip
    return project(attended, w_v)


def absorb(query: Tensor, w_k: Tensor) -> Tensor:
    """Queries against the latent: [N, H, K] and [H, K, R] -> [N, H, R]."""
    return torch.bmm(query.transpose(0, 1), w_k).transpose(0, 1)


def project(attended: Tensor, w_v: Tensor) -> Tensor:
    """Values from attended latents: [N, H, R] and [H, V, R] -> [N, H, V]."""
    return torch.bmm(attended.transpose(0, 1), w_v.transpose(1, 2)).transpose(0, 1)


def _long(
    cu_seqlens: Tensor, context_lens: Tensor, w_k: Tensor, w_v: Tensor, shared: int
) -> list[int]:
    """Sequences for which rebuilding keys and values is the cheaper form."""
    _, width, rank = w_k.shape
    values = w_v.shape[1]
    saved = (2 * rank + shared) - (width + shared + values)
    starts, found = cu_seqlens.tolist(), []
    for i, context in enumerate(context_lens.tolist()):
        new = starts[i + 1] - starts[i]
        attended = new * context + new * (new + 1) // 2
        if saved * attended > context * rank * (width + values):
            found.append(i)
    return found


def _mixed(
    latent_query: Tensor, shared_query: Tensor, rows: Tensor, w_k: Tensor, w_v: Tensor, cache: Tensor,
    cu_seqlens: Tensor, context_lens: Tensor, block_table: Tensor, slot_mapping: Tensor, masks: tuple, long: list[int],
) -> Tensor:  # fmt: skip
    """Long sequences expanded one by one, the others absorbed together."""
    rank, heads = w_k.shape[2], w_k.shape[0]
    cache.view(-1, cache.shape[2]).index_copy_(0, slot_mapping, rows)
    starts, contexts = cu_seqlens.tolist(), context_lens.tolist()
    out = rows.new_zeros(rows.shape[0], heads, w_v.shape[1])
    expanded = torch.cat([latent_query, shared_query], -1)
    for i in long:
        begin, end = starts[i], starts[i + 1]
        total = contexts[i] + end - begin
        held = _history(cache, block_table[i], total)
        keys = torch.einsum("lr,hkr->lhk", held[:, :rank], w_k)
        part = held[:, None, rank:].expand(total, heads, held.shape[1] - rank)
        keys = torch.cat([keys, part], -1)
        values = torch.einsum("lr,hvr->lhv", held[:, :rank], w_v)
        new = slice(contexts[i], total)
        out[begin:end] = paged_attention(
            expanded[begin:end], keys[new].clone(), values[new].clone(), keys[None], values[None],
            torch.tensor([0, end - begin], dtype=torch.int32), context_lens[i : i + 1],
            torch.zeros(1, 1, dtype=torch.int32), torch.arange(contexts[i], total), *masks,
        )  # fmt: skip
    others = [i for i in range(len(contexts)) if i not in set(long) and starts[i + 1] > starts[i]]
    if others:
        index = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in others])
        lengths = torch.tensor([0, *(starts[i + 1] - starts[i] for i in others)]).cumsum(0).int()
        query = torch.cat([absorb(latent_query[index], w_k), shared_query[index]], -1)
        key, pages = rows[index].unsqueeze(1), cache.unsqueeze(2)
        attended = paged_attention(
            query, key, key[..., :rank], pages, pages[..., :rank], lengths, context_lens[others],
            block_table[others], slot_mapping[index], *masks,
        )  # fmt: skip
        out[index] = project(attended, w_v)
    return out


def _history(cache: Tensor, pages: Tensor, total: int) -> Tensor:
    """[total, R + E] the rows of one sequence."""
    page_size = cache.shape[1]
    needed = pages[: -(-total // page_size)].long()
    return cache[needed].reshape(-1, cache.shape[2])[:total]
