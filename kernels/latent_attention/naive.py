"""The oracle: rebuild the keys and values of every attended token, head by head."""

from __future__ import annotations

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
    heads, width, rank = w_k.shape
    shared = rows.shape[1] - rank
    query = torch.cat(
        [q[..., latent_start : latent_start + width], q[..., shared_start : shared_start + shared]],
        -1,
    )

    def expand(held: Tensor) -> tuple[Tensor, Tensor]:
        latent, part = held[..., :rank], held[..., rank:]
        keys = torch.einsum("...r,hkr->...hk", latent, w_k)
        parts = part.unsqueeze(-2).expand(*part.shape[:-1], heads, shared)
        return torch.cat([keys, parts], -1), torch.einsum("...r,hvr->...hv", latent, w_v)

    k_cache, v_cache = expand(cache)
    k, v = expand(rows)
    return paged_attention_naive(
        query, k, v, k_cache, v_cache, cu_seqlens, context_lens, block_table, slot_mapping,
        scale, window, chunk, softcap, sinks, None, None,
    )  # fmt: skip
