"""The operators' signatures, shapes and checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regraft.kernels.latent_attention.schema import check as check_latent

from .blocks import index_block_topk_torch
from .gather import Row, Scoring, indexed_attention_torch, indexed_latent_attention_torch
from .pools import index_pool_topk_torch
from .select import index_topk_torch

_ROW = "Tensor cu_seqlens, Tensor context_lens, Tensor block_table, Tensor slot_mapping"
_MASKS = "float scale, int window=0, int chunk=0, float softcap=0.0, Tensor? sinks=None"
torch.library.define(
    "regraft::index_topk",
    f"(Tensor q, Tensor k, Tensor weights, Tensor(a!) cache, {_ROW}, int topk, float scale, bool relu=True, "
    "int window=0, int chunk=0) -> Tensor",
)
torch.library.define(
    "regraft::index_pool_topk",
    f"(Tensor q, Tensor rows, Tensor weights, Tensor bias, Tensor(a!) cache, {_ROW}, int topk, float scale, "
    "bool relu=True) -> Tensor",
)
torch.library.define(
    "regraft::index_block_topk",
    f"(Tensor q, Tensor k, Tensor? weights, Tensor(a!) cache, {_ROW}, int size, int topk, float scale, "
    "bool relu=True) -> Tensor",
)
torch.library.define(
    "regraft::indexed_attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor selected, {_ROW}, {_MASKS})"
    " -> Tensor",
)
torch.library.define(
    "regraft::indexed_latent_attention",
    f"(Tensor q, Tensor rows, Tensor w_k, Tensor w_v, Tensor(a!) cache, Tensor selected, {_ROW}, "
    f"int latent_start, int shared_start, {_MASKS}) -> Tensor",
)


def index_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cache: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    topk: int,
    scale: float,
    relu: bool = True,
    window: int = 0,
    chunk: int = 0,
) -> Tensor:
    """Write the new index keys to their pages, then select for each token the best keys of its own sequence.

    The score of the key at position j <= p for the token at position p is, in float32,

        s[j] = scale * sum_i weights[i] * relu(q[i] . k[j])            (or without relu)

    and the `topk` highest scores are selected, all of them where there are no more. Of equal scores the lowest
    positions come first, so that the selection never depends on layout, batch or cuts.

    Args:
        q: [N, I, E] index queries of I index heads.
        k: [N, E] the new index keys, shared by the heads.
        weights: [N, I] of the heads, in any float dtype.
        cache: [num_pages, page_size, E], written.
        cu_seqlens, context_lens, block_table, slot_mapping, window, chunk: as in `paged_attention`.
        topk: how many keys a token may select.
        scale: factor on the scores.
        relu: whether products below zero count as zero.

    Returns:
        [N, topk] int32: positions in the token's own sequence, ascending, then -1. A token of no sequence selects none.

    Raises:
        ValueError: shapes do not fit together.
    """
    return torch.ops.regraft.index_topk.default(
        q, k, weights, cache, cu_seqlens, context_lens, block_table, slot_mapping, topk, scale, relu, window, chunk,
    )  # fmt: skip


def index_pool_topk(
    q: Tensor,
    rows: Tensor,
    weights: Tensor,
    bias: Tensor,
    cache: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    topk: int,
    scale: float,
    relu: bool = True,
) -> Tensor:
    """`index_topk` of pools: P neighbouring tokens, counted from the sequence's start, have one key together.

    The key of a pool is, feature by feature, the mean of its tokens' keys weighed by softmax_r(gate[r] + bias[r]). A
    token at position p selects the `topk` best of the pools that end at or before p, and the (p + 1) mod P tokens
    after the last of them. A pool's key is computed anew in each step, from the rows of its tokens.

    Args:
        rows: [N, 2E] the new tokens' index keys and gates.
        bias: [P, E], P >= 2.
        cache: [num_pages, page_size, 2E], written.
        topk: how many pools a token may select.
        q, weights, scale, relu, cu_seqlens, context_lens, block_table, slot_mapping: as in `index_topk`.

    Returns:
        [N, topk * P + P - 1] int32: positions in the token's own sequence: the pools' ascending, then -1, then the rest
        ascending, then -1.

    Raises:
        ValueError: shapes do not fit together.
    """
    return torch.ops.regraft.index_pool_topk.default(
        q, rows, weights, bias, cache, cu_seqlens, context_lens, block_table, slot_mapping, topk, scale, relu,
    )  # fmt: skip


def index_block_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None,
    cache: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    size: int,
    topk: int,
    scale: float,
    relu: bool = True,
) -> Tensor:
    """`index_topk` of blocks: `size` neighbouring tokens, counted from the sequence's start, whose key the caller made.

    The key of a block is the row of its last token; rows of other tokens are written and never read. A token at
    position p selects the `topk` best of the blocks that end at or before p, and the (p + 1) mod `size` tokens after
    the last of them. Scores of relu are often 0, so which of equals is taken shows: on the CPU those that `torch.topk`
    takes of a row of the token's blocks alone, elsewhere the first.

    Args:
        k: [N, E] for each new token the key of the block that ends there, if one does.
        weights: [N, I] of the heads, in any float dtype; None for 1.
        size: tokens of a block, at least 2.
        topk: how many blocks a token may select.
        q, cache, scale, relu, cu_seqlens, context_lens, block_table, slot_mapping: as in `index_topk`.

    Returns:
        [N, topk * size + size - 1] int32: as `index_pool_topk` returns them.

    Raises:
        ValueError: shapes do not fit together.
    """
    return torch.ops.regraft.index_block_topk.default(
        q, k, weights, cache, cu_seqlens, context_lens, block_table, slot_mapping, size, topk, scale, relu,
    )  # fmt: skip


def indexed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    selected: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_attention` in which a token attends to its selected keys only.

    Args:
        selected: [N, K] int32, distinct positions in the token's own sequence, -1 for none. Of these, positions that
            causality, `window` or `chunk` hide are left out.
        q, k, v, k_cache, v_cache, cu_seqlens, context_lens, block_table, slot_mapping, scale, window, chunk, softcap,
            sinks: as in `paged_attention`.

    Returns:
        [N, H, Dv] in q's dtype; zero where nothing is attended to.

    Raises:
        ValueError: shapes do not fit together.
    """
    return torch.ops.regraft.indexed_attention.default(
        q, k, v, k_cache, v_cache, selected, cu_seqlens, context_lens, block_table, slot_mapping,
        scale, window, chunk, softcap, sinks,
    )  # fmt: skip


def indexed_latent_attention(
    q: Tensor,
    rows: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    cache: Tensor,
    selected: Tensor,
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
    """`latent_attention` in which a token attends to its selected rows only.

    Args:
        selected: as in `indexed_attention`.
        q, rows, w_k, w_v, cache, latent_start, shared_start and the others: as in `latent_attention`.

    Returns:
        [N, H, V] in q's dtype; zero where nothing is attended to.

    Raises:
        ValueError: shapes do not fit together.
    """
    return torch.ops.regraft.indexed_latent_attention.default(
        q, rows, w_k, w_v, cache, selected, cu_seqlens, context_lens, block_table, slot_mapping,
        latent_start, shared_start, scale, window, chunk, softcap, sinks,
    )  # fmt: skip


def _check_topk(q: Tensor, k: Tensor, weights: Tensor | None, cache: Tensor, topk: int) -> None:
    if q.dim() != 3 or k.shape != (q.shape[0], q.shape[2]):
        raise ValueError(f"index keys {[*k.shape]} do not fit index queries {[*q.shape]}")
    if weights is not None and weights.shape != q.shape[:2]:
        raise ValueError(f"weights {[*weights.shape]} do not fit index queries {[*q.shape]}")
    if cache.shape[2:] != k.shape[1:] or cache.dtype != k.dtype:
        raise ValueError(
            f"cache {[*cache.shape]} {cache.dtype} does not hold {k.dtype} keys {[*k.shape]}"
        )
    if topk < 1:
        raise ValueError(f"{topk=} selects nothing")


def _check_pools(
    q: Tensor, rows: Tensor, weights: Tensor, bias: Tensor, cache: Tensor, topk: int
) -> None:
    if bias.dim() != 2 or bias.shape[0] < 2 or rows.shape[1:] != (2 * bias.shape[1],):
        raise ValueError(f"rows {[*rows.shape]} are no keys and gates for bias {[*bias.shape]}")
    _check_topk(q, rows[:, : bias.shape[1]], weights, cache[..., : bias.shape[1]], topk)
    if cache.shape[2:] != rows.shape[1:]:
        raise ValueError(f"cache {[*cache.shape]} does not hold rows {[*rows.shape]}")


def _check_blocks(
    q: Tensor, k: Tensor, weights: Tensor | None, cache: Tensor, size: int, topk: int
) -> None:
    _check_topk(q, k, weights, cache, topk)
    if size < 2:
        raise ValueError(f"{size=}: a block has at least two tokens")


def _check_selected(q: Tensor, selected: Tensor) -> None:
    if selected.dim() != 2 or selected.shape[0] != q.shape[0] or selected.dtype != torch.int32:
        raise ValueError(
            f"selected: expected int32 [{q.shape[0]}, K], got {selected.dtype} {[*selected.shape]}"
        )


def _check_attention(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    if k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(f"k {[*k.shape]} does not fit q {[*q.shape]}")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"v {[*v.shape]} does not fit k {[*k.shape]}")
    if k_cache.shape[2:] != k.shape[1:] or v_cache.shape[2:] != v.shape[1:]:
        raise ValueError(f"caches {[*k_cache.shape]}, {[*v_cache.shape]} do not hold these rows")


@torch.library.register_fake("regraft::index_topk")
def _fake_topk(*args: Any, **kwargs: Any) -> Tensor:
    q, k, weights, cache = args[:4]
    topk: int = args[8]
    _check_topk(q, k, weights, cache, topk)
    return q.new_empty(q.shape[0], topk, dtype=torch.int32)


@torch.library.register_fake("regraft::index_pool_topk")
def _fake_pools(*args: Any, **kwargs: Any) -> Tensor:
    q, rows, weights, bias, cache = args[:5]
    topk: int = args[9]
    _check_pools(q, rows, weights, bias, cache, topk)
    size = bias.shape[0]
    return q.new_empty(q.shape[0], topk * size + size - 1, dtype=torch.int32)


@torch.library.register_fake("regraft::index_block_topk")
def _fake_blocks(*args: Any, **kwargs: Any) -> Tensor:
    q, k, weights, cache = args[:4]
    size, topk = args[8:10]
    _check_blocks(q, k, weights, cache, size, topk)
    return q.new_empty(q.shape[0], topk * size + size - 1, dtype=torch.int32)


@torch.library.register_fake("regraft::indexed_attention")
def _fake_attention(*args: Any, **kwargs: Any) -> Tensor:
    q, _, v = args[:3]
    _check_attention(*args[:5])
    _check_selected(q, args[5])
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


@torch.library.register_fake("regraft::indexed_latent_attention")
def _fake_latent(*args: Any, **kwargs: Any) -> Tensor:
    q, _, _, w_v = args[:4]
    check_latent(*args[:5])
    _check_selected(q, args[5])
    return q.new_empty(q.shape[0], q.shape[1], w_v.shape[1])


@torch.library.impl("regraft::index_topk", ("cpu", "cuda"))
def _run_topk(*args: Any, **kwargs: Any) -> Tensor:
    q, k, weights, cache = args[:4]
    _check_topk(q, k, weights, cache, args[8])
    return index_topk_torch(*args, **kwargs)


@torch.library.impl("regraft::index_pool_topk", ("cpu", "cuda"))
def _run_pools(*args: Any, **kwargs: Any) -> Tensor:
    q, rows, weights, bias, cache = args[:5]
    _check_pools(q, rows, weights, bias, cache, args[9])
    return index_pool_topk_torch(*args, **kwargs)


@torch.library.impl("regraft::index_block_topk", ("cpu", "cuda"))
def _run_blocks(*args: Any, **kwargs: Any) -> Tensor:
    q, k, weights, cache = args[:4]
    _check_blocks(q, k, weights, cache, args[8], args[9])
    return index_block_topk_torch(*args, **kwargs)


@torch.library.impl("regraft::indexed_attention", ("cpu", "cuda"))
def _run_attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, selected: Tensor, cu_seqlens: Tensor,
    context_lens: Tensor, block_table: Tensor, slot_mapping: Tensor, scale: float, window: int = 0, chunk: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    _check_attention(q, k, v, k_cache, v_cache)
    _check_selected(q, selected)
    row = Row(selected, cu_seqlens, context_lens, block_table, slot_mapping)
    return indexed_attention_torch(
        q, k, v, k_cache, v_cache, row, Scoring(scale, window, chunk, softcap, sinks)
    )


@torch.library.impl("regraft::indexed_latent_attention", ("cpu", "cuda"))
def _run_latent(
    q: Tensor, rows: Tensor, w_k: Tensor, w_v: Tensor, cache: Tensor, selected: Tensor, cu_seqlens: Tensor,
    context_lens: Tensor, block_table: Tensor, slot_mapping: Tensor, latent_start: int, shared_start: int, scale: float,
    window: int = 0, chunk: int = 0, softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    check_latent(q, rows, w_k, w_v, cache)
    _check_selected(q, selected)
    row = Row(selected, cu_seqlens, context_lens, block_table, slot_mapping)
    scoring = Scoring(scale, window, chunk, softcap, sinks)
    return indexed_latent_attention_torch(
        q, rows, w_k, w_v, cache, row, (latent_start, shared_start), scoring
    )
