"""Paged attention on the CPU, by torch's own fused attention one sequence at a time.

What was measured (SmolLM2-135M's shapes, 32 requests of 300 tokens) decided three things:

* A batch over padded histories copies every page, and copying costs as much as the attention: each
  sequence is its own call instead, on a view of the pool where its pages are consecutive.
* The query heads that share a key head are folded into the query length: decoding is one small
  matrix product a key head, and nothing is repeated.
* A pass that only adds a history up brings it into the cache at the speed of memory. The matrix
  products read memory several times slower than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from .spans import Plan, Span, first_key, plan

_SCORES = 1 << 21
"""About the number of elements of a mask or score matrix; longer prefills go block by block."""


@dataclass(frozen=True)
class Scoring:
    """How scores become weights, next to causality. As in `paged_attention`."""

    scale: float
    window: int
    chunk: int
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    rel_bias: Tensor | None

    @property
    def plain(self) -> bool:
        """Whether it is a softmax of scaled scores under a mask and no more."""
        extras = (self.sinks, self.alibi_slopes, self.rel_bias)
        return not self.softcap and all(x is None for x in extras)


@dataclass(frozen=True)
class Block:
    """Queries at consecutive positions of one sequence, and the keys that they attend to."""

    q: Tensor
    """[m, H, D]"""
    keys: Tensor
    """[L, Hk, D], the last of them at the last query's position."""
    values: Tensor
    """[L, Hk, Dv]"""
    row: int
    """Row of the first query in the packed row."""
    pos: int
    """Its position."""

    def distances(self) -> Tensor:
        """[m, L] how far each key is behind each query; negative for a key of the future."""
        m, length = len(self.q), len(self.keys)
        return torch.arange(length - m, length)[:, None] - torch.arange(length)

    def is_triangle(self, scoring: Scoring) -> bool:
        """Whether the mask is causality from the first query on, and no more."""
        m = len(self.q)
        return (
            m == len(self.keys)
            and (not scoring.window or m <= scoring.window)
            and first_key(self.pos + m - 1, 0, scoring.chunk) <= self.pos
        )


def paged_attention_cpu(
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
    """`paged_attention` for tensors in main memory."""
    _rows(k_cache).index_copy_(0, slot_mapping, k)
    _rows(v_cache).index_copy_(0, slot_mapping, v)
    scoring = Scoring(scale, window, chunk, softcap, sinks, alibi_slopes, rel_bias)
    seqs = plan(cu_seqlens, context_lens, block_table, k_cache.shape[1], window, chunk)

    fused = scoring.plain and q.shape[2] == v.shape[2]
    if fused and len(seqs.singles) == len(q):
        return _decode(q, k_cache, v_cache, seqs, scale)
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    out[seqs.covered :] = 0
    if fused and seqs.singles:
        out[seqs.single_rows] = _decode(q[seqs.single_rows], k_cache, v_cache, seqs, scale)
    attend = _attend_fused if fused else _attend
    for span in seqs.longer if fused else (*seqs.longer, *seqs.singles):
        for block in _blocks(_whole(span, q, k, v, k_cache, v_cache), scoring, fused):
            out[block.row : block.row + len(block.q)] = attend(block, scoring)
    return out


def _rows(cache: Tensor) -> Tensor:
    """[num_pages * page_size, ...], a view."""
    return cache.view(-1, *cache.shape[2:])


def _history(span: Span, cache: Tensor) -> Tensor:
    """[L, ...] the rows of a span: a view of the pool if its pages are consecutive."""
    if span.slot >= 0:
        return _rows(cache).narrow(0, span.slot, span.length)
    return _rows(cache.index_select(0, span.pages)).narrow(0, span.skip, span.length)


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, seqs: Plan, scale: float) -> Tensor:
    """One token of each single: q [R, H, D] -> [R, H, Dv]. It attends to every key of its span."""
    kv_heads, width = k_cache.shape[2:]
    group = q.shape[1] // kv_heads
    folded = q.reshape(len(q), kv_heads, group, width)
    height = _product_height(group, q.dtype)
    if height != group:
        folded = pad(folded, (0, 0, 0, height - group))
    k_heads, v_heads = _rows(k_cache).transpose(0, 1)[None], _rows(v_cache).transpose(0, 1)[None]
    outs = []
    for query, span in zip(folded.split(1), seqs.singles):
        if span.slot >= 0:
            keys = k_heads.narrow(2, span.slot, span.length)
            values = v_heads.narrow(2, span.slot, span.length)
            keys.sum()
            values.sum()
        else:
            keys = _history(span, k_cache).transpose(0, 1)[None]
            values = _history(span, v_cache).transpose(0, 1)[None]
        outs.append(scaled_dot_product_attention(query, keys, values, scale=scale))
    return torch.cat(outs)[:, :, :group].reshape(q.shape).contiguous()


def _product_height(group: int, dtype: torch.dtype) -> int:
    """Rows to pad the query group to: BLAS is slow at odd heights, and at 1 in half precision."""
    if group % 2 == 0 or (group == 1 and dtype.itemsize >= 4):
        return group
    return -(-group // 4) * 4


def _whole(span: Span, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> Block:
    """All queries of a sequence with all keys that any of them attends to."""
    new = slice(span.start, span.end)
    if span.context == 0:  # nothing to fetch from the pages
        return Block(q[new], k[new], v[new], span.start, 0)
    keys, values = _history(span, k_cache), _history(span, v_cache)
    return Block(q[new], keys, values, span.start, span.context)


def _blocks(whole: Block, scoring: Scoring, fused: bool) -> Iterator[Block]:
    """Cut the queries such that no mask or score matrix becomes large."""
    if fused and whole.is_triangle(scoring):
        yield whole
        return
    count, length = len(whole.q), len(whole.keys)
    first = whole.pos + count - length
    step = max(16, _SCORES // (length * (1 if fused else whole.q.shape[1])))
    for begin in range(0, count, step):
        end = min(begin + step, count)
        pos = whole.pos + begin
        keys = slice(first_key(pos, scoring.window, scoring.chunk) - first, length - count + end)
        yield Block(
            whole.q[begin:end], whole.keys[keys], whole.values[keys], whole.row + begin, pos
        )


def _mask(block: Block, distance: Tensor, scoring: Scoring) -> Tensor:
    """[m, L] True where a query attends to a key."""
    mask = distance >= 0
    if scoring.window:
        mask &= distance < scoring.window
    if scoring.chunk:
        pos = torch.arange(block.pos, block.pos + len(block.q))[:, None]
        mask &= (pos - distance) // scoring.chunk == pos // scoring.chunk
    return mask


def _attend_fused(block: Block, scoring: Scoring) -> Tensor:
    """[m, H, Dv] of a plain scoring."""
    triangle = block.is_triangle(scoring)
    out = scaled_dot_product_attention(
        block.q.transpose(0, 1)[None],
        block.keys.transpose(0, 1)[None],
        block.values.transpose(0, 1)[None],
        attn_mask=None if triangle else _mask(block, block.distances(), scoring),
        is_causal=triangle,
        scale=scoring.scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _attend(block: Block, scoring: Scoring) -> Tensor:
    """[m, H, Dv] of any scoring, step by step in float32."""
    m, heads, width = block.q.shape
    kv_heads, length = block.keys.shape[1], len(block.keys)
    wide = torch.promote_types(block.q.dtype, torch.float32)
    folded = block.q.transpose(0, 1).reshape(kv_heads, -1, width).to(wide)
    scores = torch.bmm(folded, block.keys.permute(1, 2, 0).to(wide)).view(heads, m, length)
    weights = _weights(block, scores.mul_(scoring.scale), scoring)
    out = torch.bmm(weights.reshape(kv_heads, -1, length), block.values.transpose(0, 1).to(wide))
    return out.view(heads, m, -1).transpose(0, 1).to(block.q.dtype)


def _weights(block: Block, scores: Tensor, scoring: Scoring) -> Tensor:
    """Scaled scores [H, m, L] -> what each query takes of each key."""
    distance = block.distances()
    if scoring.softcap:
        scores = scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    if scoring.alibi_slopes is not None:
        # slope * key position, less a constant of the query's: it keeps its digits at any length.
        scores -= scoring.alibi_slopes.to(scores.dtype)[:, None, None] * distance
    if scoring.rel_bias is not None:
        scores += _bias_by_distance(scoring.rel_bias[block.row :][: len(block.q)], distance)
    if len(block.q) > 1:  # one query attends to all keys of its block
        scores.masked_fill_(~_mask(block, distance, scoring), float("-inf"))
    if scoring.sinks is None:
        return torch.softmax(scores, -1)
    sink = scoring.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:2], 1)
    return torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]


def _bias_by_distance(rel_bias: Tensor, distance: Tensor) -> Tensor:
    """rel_bias [m, H, W], distance [m, L] -> [H, m, L], zero where the distance is not below W."""
    m, heads, reach = rel_bias.shape
    index = distance.clamp(0, reach - 1)[:, None].expand(m, heads, -1)
    bias = rel_bias.gather(2, index).transpose(0, 1)
    return torch.where((distance >= 0) & (distance < reach), bias, 0.0)
