"""Attention to a window of rows and to entries of earlier windows, within each sequence of a packed row.

The selection of entries is that of the operator with pages, of one row each; as a choice it has no gradient. Windows
are weighed, and attention is dense, sequence by sequence, as the models themselves spell it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from regraft.kernels.compressed_attention.attend import attend, chosen
from regraft.kernels.compressed_attention.pool import weighed
from regraft.kernels.compressed_attention.select import index_entries_torch

from .differentiable import define
from .indexed import _in_pages


def _pool(values: Tensor, gates: Tensor, bias: Tensor, cu_seqlens: Tensor, spans: int) -> Tensor:
    rate, width = bias.shape[0], values.shape[1] // spans
    bounds = cu_seqlens.tolist()
    outs = []
    for start, end in pairwise(bounds):
        count = (end - start) // rate
        rows = slice(start, start + count * rate)
        windows = torch.arange(count, device=values.device)[:, None] + torch.arange(
            1 - spans, 1, device=values.device
        )
        within = (windows >= 0)[..., None].expand(-1, -1, rate)
        some, weights = (
            x[rows].unflatten(0, (count, rate))[windows.clamp(min=0)] for x in (values, gates)
        )
        pooled = weighed(some, weights, within, bias).to(values.dtype)
        # the row of a window is its last token's
        spread = torch.cat([pooled.new_zeros(count, rate - 1, width), pooled[:, None]], 1)
        outs += [spread.flatten(0, 1), pooled.new_zeros(end - start - count * rate, width)]
    outs.append(values.new_zeros(len(values) - bounds[-1], width))
    return torch.cat(outs)


define(
    "varlen_pool_windows",
    "(Tensor values, Tensor gates, Tensor bias, Tensor cu_seqlens, int spans) -> Tensor",
    _pool,
    lambda values, gates, bias, cu_seqlens, spans: values.new_empty(
        values.shape[0], values.shape[1] // spans
    ),
)


@torch.library.custom_op(
    "regraft::varlen_index_entries",
    mutates_args=(),
    schema="(Tensor q, Tensor entries, Tensor weights, Tensor cu_seqlens, int rate, int topk, float scale, bool relu)"
    " -> Tensor",
)
def varlen_index_entries(
    q: Tensor, entries: Tensor, weights: Tensor, cu_seqlens: Tensor, *how: Any
) -> Tensor:
    """`index_entries` of whole sequences."""
    cu_seqlens, contexts, pages, _ = _in_pages(cu_seqlens, len(q))
    cache = torch.empty_like(entries[:, None])
    return index_entries_torch(q, entries, weights, cache, cache, cu_seqlens, contexts, pages, *how)


@varlen_index_entries.register_fake
def _(
    q: Tensor, entries: Tensor, weights: Tensor, cu_seqlens: Tensor, rate: int, topk: int, *_: Any
) -> Tensor:
    return q.new_empty(q.shape[0], topk, dtype=torch.int32)


def _attend(
    q: Tensor, rows: Tensor, entries: Tensor, selected: Tensor | None, cu_seqlens: Tensor, rate: int,
    scale: float, window: int, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    bounds = cu_seqlens.tolist()
    outs = []
    for start, end in pairwise(bounds):
        if start == end:
            continue
        pos = torch.arange(end - start, device=q.device)
        last = torch.arange((end - start) // rate, device=q.device) * rate + start + rate - 1
        near = (pos <= pos[:, None]) & ((pos[:, None] - pos < window) if window else True)
        far = torch.arange(len(last), device=q.device) < (pos[:, None] + 1) // rate
        if selected is not None:
            far = far & chosen(selected[start:end], len(last))
        keys = torch.cat([rows[start:end], entries[last]])
        out = attend(q[start:end], keys, torch.cat([near, far], 1), scale, sinks)
        outs.append(out.to(q.dtype))
    outs.append(q.new_zeros(len(q) - bounds[-1], *q.shape[1:]))
    return torch.cat(outs)


define(
    "varlen_compressed_attention",
    "(Tensor q, Tensor rows, Tensor entries, Tensor? selected, Tensor cu_seqlens, int rate, float scale, int window, "
    "Tensor? sinks) -> Tensor",
    _attend,
    lambda q, *_: torch.empty_like(q, memory_format=torch.contiguous_format),
)
