"""The operator's signature, shapes and checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .absorbed import latent_attention_torch

torch.library.define(
    "regraft::latent_attention",
    "(Tensor q, Tensor rows, Tensor w_k, Tensor w_v, Tensor(a!) cache, Tensor cu_seqlens, Tensor context_lens, "
    "Tensor block_table, Tensor slot_mapping, int latent_start, int shared_start, float scale, int window=0, "
    "int chunk=0, float softcap=0.0, Tensor? sinks=None) -> Tensor",
)


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
    """Write the new rows to their pages, then attend causally within each sequence.

    A row is a latent c [R] with a key part r [E] that all heads share. Head h has the key (w_k[h] c, r) and the value
    w_v[h] c. Neither is ever stored: with the query's two parts, q_c against w_k[h] c and q_r against r,

        q_c . (w_k[h] c) + q_r . r  =  (w_k[h]^T q_c, q_r) . (c, r)        sum_j p_j w_v[h] c_j  =  w_v[h] sum_j p_j c_j

    so attention runs over the cached rows themselves as one head that all queries share.

    Args:
        q: [N, H, K + E] queries; the K features from `latent_start` on meet the latent, the E from `shared_start` on
            meet the shared part.
        rows: [N, R + E] the new rows.
        w_k: [H, K, R] from latent to key.
        w_v: [H, V, R] from latent to value.
        cache: [num_pages, page_size, R + E], written.
        cu_seqlens, context_lens, block_table, slot_mapping, scale, window, chunk, softcap, sinks:
            as in `paged_attention`.

    Returns:
        [N, H, V] in q's dtype.

    Raises:
        ValueError: shapes do not fit together.
    """
    return torch.ops.regraft.latent_attention.default(
        q, rows, w_k, w_v, cache, cu_seqlens, context_lens, block_table, slot_mapping,
        latent_start, shared_start, scale, window, chunk, softcap, sinks,
    )  # fmt: skip


def check(q: Tensor, rows: Tensor, w_k: Tensor, w_v: Tensor, cache: Tensor) -> None:
    """Raise ValueError unless the shapes are as `latent_attention` documents them."""
    heads, width, rank = w_k.shape
    shared = rows.shape[1] - rank
    if q.shape[1:] != (heads, width + shared) or shared < 0:
        raise ValueError(f"q {[*q.shape]} does not fit rows {[*rows.shape]} and w_k {[*w_k.shape]}")
    if w_v.shape[0] != heads or w_v.shape[2] != rank:
        raise ValueError(f"w_v {[*w_v.shape]} does not fit w_k {[*w_k.shape]}")
    if cache.shape[2:] != rows.shape[1:]:
        raise ValueError(f"cache {[*cache.shape]} does not hold rows {[*rows.shape]}")


@torch.library.register_fake("regraft::latent_attention")
def _fake(*args: Any, **kwargs: Any) -> Tensor:
    q, rows, w_k, w_v, cache = args[:5]
    check(q, rows, w_k, w_v, cache)
    return q.new_empty(q.shape[0], q.shape[1], w_v.shape[1])


@torch.library.impl("regraft::latent_attention", ("cpu", "cuda"))
def _run(*args: Any, **kwargs: Any) -> Tensor:
    check(*args[:5])
    return latent_attention_torch(*args, **kwargs).contiguous()
