"""Attention within each sequence of a packed row, all of it new: no pages, any gradient.

Each sequence is one call of torch's fused attention where its scores are a plain softmax, and spelled
out in float32 where they are not. Sequences of one length, as in a batch without padding, are one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .differentiable import define


@dataclass(frozen=True)
class Scoring:
    """How scores become weights, next to causality. As in `paged_attention`."""

    scale: float
    window: int
    chunk: int
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None

    @property
    def is_plain(self) -> bool:
        """A softmax of scaled scores under a mask, and no more."""
        return not self.softcap and self.sinks is None and self.alibi_slopes is None

    def is_triangle(self, length: int) -> bool:
        """Whether causality alone is the mask of a sequence of this length."""
        return all(not bound or length <= bound for bound in (self.window, self.chunk))

    def mask(self, length: int, device: torch.device) -> Tensor:
        """[L, L] True where a query may attend to a key."""
        pos = torch.arange(length, device=device)
        distance = pos[:, None] - pos
        mask = distance >= 0
        if self.window:
            mask &= distance < self.window
        if self.chunk:
            mask &= pos[:, None] // self.chunk == pos // self.chunk
        return mask


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    rel_bias: Tensor | None,
) -> Tensor:
    scoring = Scoring(scale, window, chunk, softcap, sinks, alibi_slopes)
    bounds = cu_seqlens.tolist()
    outs = []
    for start, count, length in _batches(bounds):
        rows = slice(start, start + count * length)
        one, two, three = (x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))
        bias = None if rel_bias is None else rel_bias[rows].unflatten(0, (count, length))
        out = weighted(one, two, three, scoring, rel_bias=bias)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    outs.append(q.new_zeros(len(q) - bounds[-1], q.shape[1], v.shape[2]))
    return torch.cat(outs)


def _batches(bounds: list[int]) -> Iterator[tuple[int, int, int]]:
    """(first row, number of sequences, their length) of the sequences that can be one call."""
    lengths = [end - start for start, end in pairwise(bounds)]
    if len(set(lengths)) == 1 and lengths[0]:
        yield bounds[0], len(lengths), lengths[0]
        return
    yield from ((start, 1, length) for start, length in zip(bounds, lengths) if length)


def weighted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
    mask: Tensor | None = None,
    rel_bias: Tensor | None = None,
) -> Tensor:
    """Attention of sequences of one length, q [R, H, L, D] -> [R, H, L, Dv].

    `mask` [L, L] is True where a query attends to a key, by default where `scoring` lets it; each query must attend to
    one. rel_bias [R, L, H, W].
    """
    if scoring.is_plain and rel_bias is None:
        return _fused(q, k, v, scoring, mask)
    return _spelled_out(q, k, v, scoring, mask, rel_bias)


def _fused(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, mask: Tensor | None) -> Tensor:
    """[R, H, L, Dv]."""
    length = q.shape[2]
    triangle = mask is None and scoring.is_triangle(length)
    if mask is None and not triangle:
        mask = scoring.mask(length, q.device)
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=triangle,
        scale=scoring.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _spelled_out(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, mask: Tensor | None, rel_bias: Tensor | None
) -> Tensor:
    """[R, H, L, Dv], step by step in float32."""
    length, share = q.shape[2], q.shape[1] // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.repeat_interleave(share, dim=1).to(wide) for x in (k, v))
    scores = (q.to(wide) @ k.transpose(-1, -2)) * scoring.scale
    if scoring.softcap:
        scores = (scores / scoring.softcap).tanh() * scoring.softcap
    pos = torch.arange(length, device=q.device)
    distance = pos[:, None] - pos
    if scoring.alibi_slopes is not None:
        # slope * key position, less a constant of the query's: it keeps its digits at any length.
        scores = scores - scoring.alibi_slopes.to(wide)[:, None, None] * distance
    if rel_bias is not None:
        scores = scores + _by_distance(rel_bias.transpose(1, 2).to(wide), distance)
    seen = scoring.mask(length, q.device) if mask is None else mask
    scores = scores.masked_fill(~seen, float("-inf"))
    if scoring.sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = scoring.sinks.to(wide)[:, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return (weights @ v).to(q.dtype)


def _by_distance(rel_bias: Tensor, distance: Tensor) -> Tensor:
    """rel_bias [R, H, L, W] -> [R, H, L, L], zero where the distance is not in 0..W-1."""
    reach = rel_bias.shape[-1]
    index = distance.clamp(0, reach - 1).expand(*rel_bias.shape[:3], -1)
    return torch.where((distance >= 0) & (distance < reach), rel_bias.gather(3, index), 0.0)


def _shape(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


_operator = define(
    "varlen_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, float scale, int window, int chunk, "
    "float softcap, Tensor? sinks, Tensor? alibi_slopes, Tensor? rel_bias) -> Tensor",
    _attend,
    _shape,
)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    rel_bias: Tensor | None = None,
) -> Tensor:
    """Every token attends causally within its own sequence. Differentiable in all tensors of floats.

    Shapes: q [N, H, D], k [N, Hk, D], v [N, Hk, Dv], cu_seqlens [R+1] int32, sinks and alibi_slopes
    [H], rel_bias [N, H, W]; scores and masks as in `paged_attention`. Returns [N, H, Dv], zero in rows
    of no sequence.
    """
    return _operator(
        q, k, v, cu_seqlens, scale, window, chunk, softcap, sinks, alibi_slopes, rel_bias
    )
