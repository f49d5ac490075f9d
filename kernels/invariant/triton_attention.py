"""Paged attention on the GPU in tiles of keys that lie at fixed positions of a request: one result a query.

Keys go through a running softmax in tiles of N from position 0 on. Every SEGMENT keys it begins anew, and what the
segment came to is merged into what those before it came to. So a long history may be shared out by segments: one
program takes its tile of queries through all of them, or many take one each and a second kernel merges, which is the
same arithmetic. A tile or a segment in which a query sees nothing changes no bit of it.

Nothing a query's result depends on is added across threads: scores, values and the sum of weights are products of
tensor cores, which take K in steps of 16 in order, and all tiles are too narrow (M < 64 or fewer than four warps) for
the card's wide products, so that they share one instruction. Maxima have no order.
"""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regraft.kernels.dependent import dependent
from regraft.kernels.device import num_processors
from regraft.kernels.paged_attention.triton import _by_head, _is_shared, _parts, _score
from regraft.kernels.whole import cdiv, power_of_2

from .triton_attention_tile import combine_kernel, segment_kernel, write_kernel
from .triton_settled import settled

SEGMENT = 256
"""Keys that one running softmax takes."""

_WAVES = 16
"""Programs a multiprocessor gets at least, if segments can be taken side by side. (128 sequences of 128 to 1,280 tokens
on an H200: 124 us side by side, 245 us one program a query and key head.)"""


@dataclass(frozen=True)
class Form:
    """M rows of queries a tile, and whether segments are taken side by side."""

    M: int
    num_warps: int
    is_split: bool = False


def keys_of(width: int, itemsize: int) -> int:
    """Keys a tile: a matter of the model alone."""
    return 16 if width > 128 and itemsize > 2 else 32


def forms(width: int, itemsize: int) -> list[Form]:
    """All forms that attention with heads this wide may take: they must not differ in a bit."""
    if width <= 128:
        tiles = [(16, 1), (32, 2)]
    elif width <= 256 and itemsize == 2:
        tiles = [(16, 2), (32, 4)]
    else:
        tiles = [(16, 4)]
    return [Form(*tile, is_split) for tile in tiles for is_split in (False, True)]


def paged_attention(
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
    *,
    form: Form | None = None,
) -> Tensor:
    """As `regraft.kernels.paged_attention.paged_attention`. `form` is for tests and measurements."""
    tokens, heads, width = q.shape
    kv_heads, v_width = v.shape[1:]
    group, seqs, page_size = heads // kv_heads, len(context_lens), k_cache.shape[1]
    out = q.new_empty(tokens, heads, v_width)
    if not tokens:
        return out
    shared = _is_shared(k_cache, v_cache)
    q, k, v = settled(q), settled(k), k[..., :v_width] if shared else settled(v)
    sinks, alibi_slopes = _by_head(sinks), _by_head(alibi_slopes)
    operands = (q, k, v, k_cache, v_cache)
    strides = tuple(x.stride() for x in operands)
    started = dependent(q.device)
    widths = {"D": _parts(width), "DV": _parts(v_width), "PAGE_SIZE": page_size}
    write_kernel[(cdiv(tokens, 4), kv_heads)](
        operands, strides, slot_mapping, tokens, SHARED=shared, W=4, num_warps=1, enable_fp_fusion=False,
        **started, **widths,
    )  # fmt: skip
    length = block_table.shape[1] * page_size
    if form is None:
        form = _chosen(q, v_width, kv_heads, seqs, length)
    parts = cdiv(group, form.M)
    share = cdiv(group, parts)
    segments = cdiv(length, SEGMENT)
    is_split = form.is_split and segments > 1
    scratch: tuple[Tensor | None, ...] = (None, None, None)
    in_memory = max(width, v_width) * q.element_size() > 256
    if in_memory:
        scratch = (torch.empty(tokens, heads, v_width, dtype=torch.float32, device=q.device), None, None)  # fmt: skip
    if is_split:
        size = (tokens, heads, segments)
        scratch = (
            torch.empty(*size, v_width, dtype=torch.float32, device=q.device),
            torch.empty(2, *size, dtype=torch.float32, device=q.device),
            torch.empty(tokens, dtype=torch.int32, device=q.device),
        )
    block = 1 if tokens <= seqs else form.M // share
    blocks = tokens // block + seqs + 1
    common: dict[str, Any] = {"WINDOW": window, "CHUNK": chunk, "SEGMENT": SEGMENT}
    keys = keys_of(max(width, v_width), q.element_size())
    segment_kernel[(blocks * kv_heads * parts, segments if is_split else 1)](
        operands, strides, (sinks, alibi_slopes, rel_bias), (0, 0, 0) if rel_bias is None else rel_bias.stride(),
        out, scratch, cu_seqlens, context_lens, block_table, block_table.stride(0), tokens, seqs, segments, scale,
        SCORE=_score(scale, softcap, alibi_slopes, rel_bias), KV_HEADS=kv_heads, GROUP=group, SHARE=share, Q=block,
        IS_SPLIT=is_split, IN_MEMORY=in_memory, SHARED=shared, M=form.M, N=keys,
        num_warps=form.num_warps, num_stages=2, enable_fp_fusion=False, **started, **widths, **common,
    )  # fmt: skip
    if is_split:
        combine_kernel[(tokens, heads)](
            scratch, sinks, out, segments, V=power_of_2(v_width), DV=v_width,
            num_warps=1 if v_width <= 128 else 4, enable_fp_fusion=False, **started, **common,
        )  # fmt: skip
    return out


def _chosen(q: Tensor, v_width: int, kv_heads: int, seqs: int, length: int) -> Form:
    """By shapes alone: narrow tiles for a decode step, side by side if there are few; wide ones otherwise."""
    tokens, heads, width = q.shape
    found = forms(max(width, v_width), q.element_size())
    if tokens > seqs:
        return next(form for form in found if form.M == found[-1].M and not form.is_split)
    programs = tokens * kv_heads * cdiv(heads // kv_heads, found[0].M)
    is_split = length > SEGMENT and programs < _WAVES * num_processors(q.device)
    return next(form for form in found if form.M == found[0].M and form.is_split == is_split)
