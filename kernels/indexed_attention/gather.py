"""Attention over selected rows, in torch: the rows are gathered from their pages, block of tokens by block of tokens.

On the CPU, sequences of which every key is selected take the dense operator instead: it reads each row once for all
of a sequence's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regraft.kernels.latent_attention.absorbed import absorb, latent_attention_torch, project
from regraft.kernels.paged_attention import paged_attention

from .select import attended, places

_ELEMENTS = 1 << 23
"""About the number of gathered elements at a time."""


@dataclass(frozen=True)
class Scoring:
    """How products become weights, as in `paged_attention`."""

    scale: float
    window: int
    chunk: int
    softcap: float
    sinks: Tensor | None

    @property
    def named(self) -> dict[str, Any]:
        """The dense operators' arguments of these names."""
        return vars(self)


@dataclass(frozen=True)
class Row:
    """The metadata of a packed row, or of some of its sequences."""

    selected: Tensor
    cu_seqlens: Tensor
    context_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor

    @property
    def dense(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments of the dense operators."""
        return self.cu_seqlens, self.context_lens, self.block_table, self.slot_mapping

    def of(self, seqs: list[int]) -> tuple[Tensor, Row]:
        """The rows of some sequences' tokens, and their metadata."""
        bounds = self.cu_seqlens.tolist()
        index = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in seqs])
        ends = torch.tensor([0, *(bounds[i + 1] - bounds[i] for i in seqs)]).cumsum(0).int()
        part = Row(
            self.selected[index], ends, self.context_lens[seqs], self.block_table[seqs],
            self.slot_mapping[index],
        )  # fmt: skip
        return index, part


def indexed_attention_torch(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, row: Row, scoring: Scoring
) -> Tensor:
    """`indexed_attention` on any device."""
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, row.slot_mapping, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, row.slot_mapping, v)
    pages = (k_cache.view(-1, *k.shape[1:]), v_cache.view(-1, *v.shape[1:]))

    def dense(index: Tensor, part: Row) -> Tensor:
        return paged_attention(
            q[index], k[index], v[index], k_cache, v_cache, *part.dense, **scoring.named
        )

    def sparse(index: Tensor, part: Row) -> Tensor:
        return _sparse(
            q[index], part, scoring, k_cache.shape[1], lambda at: (pages[0][at], pages[1][at])
        )

    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    return _each(out, row, dense, sparse)


def indexed_latent_attention_torch(
    q: Tensor, rows: Tensor, w_k: Tensor, w_v: Tensor, cache: Tensor, row: Row, starts: tuple[int, int],
    scoring: Scoring,
) -> Tensor:  # fmt: skip
    """`indexed_latent_attention` on any device: absorbed, the selected rows are one key head and one value head."""
    cache.view(-1, cache.shape[2]).index_copy_(0, row.slot_mapping, rows)
    rank, shared = w_k.shape[2], rows.shape[1] - w_k.shape[2]
    held = cache.view(-1, 1, cache.shape[2])

    def dense(index: Tensor, part: Row) -> Tensor:
        return latent_attention_torch(
            q[index], rows[index], w_k, w_v, cache, *part.dense, *starts, **scoring.named
        )

    def sparse(index: Tensor, part: Row) -> Tensor:
        query = q[index]
        latent = query[..., starts[0] : starts[0] + w_k.shape[1]]
        query = torch.cat([absorb(latent, w_k), query[..., starts[1] : starts[1] + shared]], -1)

        def gathered(at: Tensor) -> tuple[Tensor, Tensor]:
            found = held[at]
            return found, found[..., :rank]

        return project(_sparse(query, part, scoring, cache.shape[1], gathered), w_v)

    out = q.new_zeros(q.shape[0], q.shape[1], w_v.shape[1])
    return _each(out, row, dense, sparse)


def _each(
    out: Tensor, row: Row, dense: Callable[[Tensor, Row], Tensor], sparse: Callable[[Tensor, Row], Tensor]
) -> Tensor:  # fmt: skip
    """Sequences of which all is selected by `dense`, the others by `sparse`."""
    if out.device.type != "cpu":
        return sparse(torch.arange(len(out), device=out.device), row).contiguous()
    bounds, contexts = row.cu_seqlens.tolist(), row.context_lens.tolist()
    counts = (row.selected >= 0).sum(1)
    groups: dict[Callable[[Tensor, Row], Tensor], list[int]] = {dense: [], sparse: []}
    for seq, context in enumerate(contexts):
        start, end = bounds[seq], bounds[seq + 1]
        whole = context + end - start <= row.selected.shape[1] and bool(
            (counts[start:end] == torch.arange(context + 1, context + end - start + 1)).all()
        )
        if end > start:
            groups[dense if whole else sparse].append(seq)
    for attend, seqs in groups.items():
        if seqs:
            index, part = row.of(seqs)
            out[index] = attend(index, part)
    return out


def _sparse(
    q: Tensor, row: Row, scoring: Scoring, page_size: int, gathered: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> Tensor:  # fmt: skip
    """`gathered(slots [n, K])` -> keys [n, K, Hk, D] and values [n, K, Hk, Dv]."""
    seq, pos = places(row.cu_seqlens, row.context_lens, len(q))
    valid = attended(pos, row.selected, scoring.window, scoring.chunk)
    at = torch.where(valid, row.selected, 0).long()
    slots = row.block_table[seq].long().gather(1, at // page_size) * page_size + at % page_size
    block = max(1, _ELEMENTS // (max(1, slots.shape[1]) * q.shape[2]))
    parts = []
    for first in range(0, len(q), block):
        rows = slice(first, first + block)
        keys, values = gathered(slots[rows])
        seen = valid[rows]
        parts.append(_attend(q[rows], keys, values, seen, scoring))
    return torch.cat(parts)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scoring: Scoring
) -> Tensor:  # fmt: skip
    """Softmax attention of each token over its own rows; zero where it sees none."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    # what is in a row that is not seen may be anything, a NaN too
    hidden = ~seen[:, :, None, None]
    keys, values = keys.masked_fill(hidden, 0).to(wide), values.masked_fill(hidden, 0).to(wide)
    grouped = q.to(wide).unflatten(1, (keys.shape[2], -1))
    scores = torch.einsum("nghd,nkgd->nghk", grouped, keys).flatten(1, 2) * scoring.scale
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    shares = shares_of(scores.masked_fill(~seen[:, None], -torch.inf), scoring.sinks)
    shares = shares.unflatten(1, (keys.shape[2], -1))
    return torch.einsum("nghk,nkgv->nghv", shares, values).flatten(1, 2).to(q.dtype)


def shares_of(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of scores [n, H, K] over the keys and a head's sink [H]; zeros where no key is seen (-inf)."""
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.to(scores.dtype)[:, None]
        top = torch.maximum(top, sinks)
    top = top.masked_fill(top == -torch.inf, 0)
    shares = torch.exp(scores - top)
    total = shares.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    return shares / total.clamp(min=torch.finfo(scores.dtype).tiny)
