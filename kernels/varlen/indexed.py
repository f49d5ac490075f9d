"""Attention to the keys that an indexer selects, within each sequence of a packed row.

The selection is that of the operators with pages, of one row each; as a choice it has no gradient. Attention is dense
under the mask that the selection makes, sequence by sequence, as the models themselves spell it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from regraft.kernels.indexed_attention.blocks import index_block_topk_torch
from regraft.kernels.indexed_attention.pools import index_pool_topk_torch
from regraft.kernels.indexed_attention.select import index_topk_torch
from regraft.kernels.latent_attention.naive import rebuilt

from .attention import Scoring, weighted
from .differentiable import define

_TOPK = (
    "(Tensor q, Tensor k, Tensor weights, Tensor cu_seqlens, int topk, float scale, bool relu, "
    "int window, int chunk) -> Tensor"
)
_POOLS = (
    "(Tensor q, Tensor rows, Tensor weights, Tensor bias, Tensor cu_seqlens, int topk, "
    "float scale, bool relu) -> Tensor"
)
_BLOCKS = (
    "(Tensor q, Tensor k, Tensor? weights, Tensor cu_seqlens, int size, int topk, float scale, "
    "bool relu) -> Tensor"
)
_MASKS = "float scale, int window, int chunk, float softcap, Tensor? sinks"


def _in_pages(cu_seqlens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The row's metadata for a cache in which each token is a page of its own, in the row's order."""
    longest = int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
    at = torch.arange(longest, device=cu_seqlens.device)
    pages = (cu_seqlens[:-1, None] + at).clamp(max=max(0, num_tokens - 1)).int()
    contexts = torch.zeros(len(cu_seqlens) - 1, dtype=torch.int32, device=cu_seqlens.device)
    return cu_seqlens, contexts, pages, torch.arange(num_tokens, device=cu_seqlens.device)


@torch.library.custom_op("regraft::varlen_index_topk", mutates_args=(), schema=_TOPK)
def varlen_index_topk(
    q: Tensor, k: Tensor, weights: Tensor, cu_seqlens: Tensor, *how: Any
) -> Tensor:
    """`index_topk` of whole sequences."""
    row = _in_pages(cu_seqlens, len(q))
    return index_topk_torch(q, k, weights, torch.empty_like(k[:, None]), *row, *how)


@varlen_index_topk.register_fake
def _(q: Tensor, k: Tensor, weights: Tensor, cu_seqlens: Tensor, topk: int, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], topk, dtype=torch.int32)


@torch.library.custom_op("regraft::varlen_index_pool_topk", mutates_args=(), schema=_POOLS)
def varlen_index_pool_topk(
    q: Tensor, rows: Tensor, weights: Tensor, bias: Tensor, cu_seqlens: Tensor, *how: Any
) -> Tensor:
    """`index_pool_topk` of whole sequences."""
    row = _in_pages(cu_seqlens, len(q))
    return index_pool_topk_torch(
        q, rows, weights, bias, torch.empty_like(rows[:, None]), *row, *how
    )


@varlen_index_pool_topk.register_fake
def _(
    q: Tensor, rows: Tensor, weights: Tensor, bias: Tensor, cu_seqlens: Tensor, topk: int, *_: Any
) -> Tensor:
    size = bias.shape[0]
    return q.new_empty(q.shape[0], topk * size + size - 1, dtype=torch.int32)


@torch.library.custom_op("regraft::varlen_index_block_topk", mutates_args=(), schema=_BLOCKS)
def varlen_index_block_topk(
    q: Tensor, k: Tensor, weights: Tensor | None, cu_seqlens: Tensor, *how: Any
) -> Tensor:
    """`index_block_topk` of whole sequences."""
    row = _in_pages(cu_seqlens, len(q))
    return index_block_topk_torch(q, k, weights, torch.empty_like(k[:, None]), *row, *how)


@varlen_index_block_topk.register_fake
def _(
    q: Tensor, k: Tensor, weights: Tensor | None, cu_seqlens: Tensor, size: int, topk: int, *_: Any
) -> Tensor:
    return q.new_empty(q.shape[0], topk * size + size - 1, dtype=torch.int32)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selected: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    scoring = Scoring(scale, window, chunk, softcap, sinks, None)
    bounds = cu_seqlens.tolist()
    outs = []
    for start, end in pairwise(bounds):
        if start == end:
            continue
        mask = _seen(selected[start:end]) & scoring.mask(end - start, q.device)
        some = mask.any(1, keepdim=True)
        one, two, three = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        out = weighted(one, two, three, scoring, mask | ~some)[0].transpose(0, 1)
        outs.append(out.masked_fill(~some[..., None], 0))
    outs.append(q.new_zeros(len(q) - bounds[-1], q.shape[1], v.shape[2]))
    return torch.cat(outs)


def _seen(selected: Tensor) -> Tensor:
    """[L, K] positions, -1 for none -> [L, L] True where a query selects a key."""
    length = len(selected)
    seen = torch.zeros(length, length + 1, dtype=torch.bool, device=selected.device)
    return seen.scatter_(1, torch.where(selected < 0, length, selected).long(), True)[:, :length]


def _attend_latent(
    q: Tensor,
    rows: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    selected: Tensor,
    cu_seqlens: Tensor,
    latent_start: int,
    shared_start: int,
    *masks: Any,
) -> Tensor:
    query, keys, values = rebuilt(q, w_k, w_v, latent_start, shared_start)
    return _attend(query, keys(rows), values(rows), selected, cu_seqlens, *masks)


define(
    "varlen_indexed_attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor selected, Tensor cu_seqlens, {_MASKS}) -> Tensor",
    _attend,
    lambda q, k, v, *_: q.new_empty(q.shape[0], q.shape[1], v.shape[2]),
)
define(
    "varlen_indexed_latent_attention",
    "(Tensor q, Tensor rows, Tensor w_k, Tensor w_v, Tensor selected, Tensor cu_seqlens, int latent_start, "
    f"int shared_start, {_MASKS}) -> Tensor",
    _attend_latent,
    lambda q, rows, w_k, w_v, *_: q.new_empty(q.shape[0], q.shape[1], w_v.shape[1]),
)
