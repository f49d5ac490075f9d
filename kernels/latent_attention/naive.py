"""The oracle: rebuild the keys and values of every attended token, head by head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regraft.kernels.paged_attention.naive import paged_attention_naive


def latent_attention_naive(
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
    """`latent_attention` as its definition says; see there."""
    cache.view(-1, cache.shape[2])[slot_mapping] = rows
    query, keys, values = rebuilt(q, w_k, w_v, latent_start, shared_start)
    return paged_attention_naive(
        query, keys(rows), values(rows), keys(cache), values(cache), cu_seqlens, context_lens, block_table,
        slot_mapping, scale, window, chunk, softcap, sinks, None, None,
    )  # fmt: skip


Rebuild = Callable[[Tensor], Tensor]


def rebuilt(
    q: Tensor, w_k: Tensor, w_v: Tensor, latent_start: int, shared_start: int
) -> tuple[Tensor, Rebuild, Rebuild]:
    """What plain attention over rows [..., R + E] reads: queries, and the maps from rows to keys and to values."""
    heads, width, rank = w_k.shape
    shared = q.shape[-1] - width
    query = torch.cat(
        [q[..., latent_start : latent_start + width], q[..., shared_start : shared_start + shared]],
        -1,
    )

    def keys(held: Tensor) -> Tensor:
        latent, part = held[..., :rank], held[..., rank:]
        parts = part.unsqueeze(-2).expand(*part.shape[:-1], heads, part.shape[-1])
        return torch.cat([torch.einsum("...r,hkr->...hk", latent, w_k), parts], -1)

    def values(held: Tensor) -> Tensor:
        return torch.einsum("...r,hvr->...hv", held[..., :rank], w_v)

    return query, keys, values
