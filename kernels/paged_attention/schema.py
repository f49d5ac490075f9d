"""The operator's signature, shapes and checks; which implementation a device gets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cpu import paged_attention_cpu

# torch.library.custom_op would write this line for us, but its Python wrapper costs 50 us a call,
# which a small model on the CPU pays in every layer of every step.
torch.library.define(
    "regraft::paged_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cu_seqlens, "
    "Tensor context_lens, Tensor block_table, Tensor slot_mapping, float scale, int window=0, "
    "int chunk=0, float softcap=0.0, Tensor? sinks=None, Tensor? alibi_slopes=None, "
    "Tensor? rel_bias=None) -> Tensor",
)


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
) -> Tensor:
    """Write the new keys and values to their pages, then attend causally within each sequence.

    The token at position p of its sequence attends to the positions j <= p of the same sequence:
    the first `context_lens[r]` of them are read from the pages, the others are this step's. With

        s[h, j] = scale * (q[h] . k[j, h // (H // Hk)])
        s = softcap * tanh(s / softcap)                            if softcap
        s[h, j] += alibi_slopes[h] * j + (rel_bias[h, p - j] if p - j < W else 0)

    the output is softmax(s) @ v; a sink adds exp(sinks[h]) to the softmax's denominator. Masks:
    `window` keeps p - j < window, `chunk` keeps j // chunk == p // chunk, 0 switches either off.
    The softmax runs in float32. A page or row that no query may attend to is never read, whatever
    it holds.

    Args:
        q: [N, H, D] queries of the packed row's N tokens; any strides.
        k: [N, Hk, D] new keys; Hk divides H.
        v: [N, Hk, Dv] new values.
        k_cache: [num_pages, page_size, Hk, D], written.
        v_cache: [num_pages, page_size, Hk, Dv], written.
        cu_seqlens: [R+1] int32, where each sequence's new tokens begin and end; may be empty.
            Tokens from cu_seqlens[R] on belong to no sequence: their output is zero.
        context_lens: [R] int32, tokens of each sequence already in its pages.
        block_table: [R, max_pages] int32, each sequence's pages in order.
        slot_mapping: [N] int64, page * page_size + offset where a token's row is written.
        scale: factor on the scores.
        window: attend to the last `window` positions, the token's own among them.
        chunk: attend within blocks of `chunk` positions counted from the sequence's start.
        softcap: bound on the scaled scores.
        sinks: [H] or None.
        alibi_slopes: [H] or None; not together with sinks.
        rel_bias: [N, H, W] or None, a bias by distance.

    Returns:
        [N, H, Dv], contiguous, in q's dtype.

    Raises:
        ValueError: shapes, dtypes or arguments do not fit together.
    """
    return torch.ops.regraft.paged_attention.default(
        q, k, v, k_cache, v_cache, cu_seqlens, context_lens, block_table, slot_mapping,
        scale, window, chunk, softcap, sinks, alibi_slopes, rel_bias,
    )  # fmt: skip


def check(
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
) -> None:
    """Raise ValueError unless the arguments are as `paged_attention` documents them."""
    tokens, heads, width = q.shape
    kv_heads, v_width = v.shape[1:]
    num_seqs = context_lens.shape[0]
    _expect("k", k, (tokens, kv_heads, width), q.dtype)
    _expect("v", v, (tokens, kv_heads, v_width), q.dtype)
    _expect("k_cache", k_cache, (*k_cache.shape[:2], kv_heads, width), q.dtype)
    _expect("v_cache", v_cache, (*k_cache.shape[:2], kv_heads, v_width), q.dtype)
    _expect("cu_seqlens", cu_seqlens, (num_seqs + 1,), torch.int32)
    _expect("context_lens", context_lens, (num_seqs,), torch.int32)
    _expect("block_table", block_table, (num_seqs, *block_table.shape[1:2]), torch.int32)
    _expect("slot_mapping", slot_mapping, (tokens,), torch.int64)
    if sinks is not None:
        _expect("sinks", sinks, (heads,))
    if alibi_slopes is not None:
        _expect("alibi_slopes", alibi_slopes, (heads,))
    if rel_bias is not None:
        _expect("rel_bias", rel_bias, (tokens, heads, *rel_bias.shape[2:3]))
        if rel_bias.shape[2] == 0:
            raise ValueError(
                f"rel_bias: expected shape [{tokens}, {heads}, W > 0], got [{tokens}, {heads}, 0]"
            )
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads evenly")
    if min(window, chunk, softcap) < 0:
        raise ValueError(f"{window=}, {chunk=} and {softcap=} must not be negative (0 is off)")
    if sinks is not None and alibi_slopes is not None:
        raise ValueError("sinks and alibi_slopes together are not supported")


def _expect(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    if x.shape != shape:
        raise ValueError(f"{name}: expected shape {[*shape]}, got {[*x.shape]}")
    if dtype is not None and x.dtype != dtype:
        raise ValueError(f"{name}: expected {dtype}, got {x.dtype}")


@torch.library.register_fake("regraft::paged_attention")
def _fake(*args: Any, **kwargs: Any) -> Tensor:
    check(*args, **kwargs)
    q, _, v = args[:3]
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


@torch.library.impl("regraft::paged_attention", "CPU")
def _cpu(*args: Any, **kwargs: Any) -> Tensor:
    check(*args, **kwargs)
    return paged_attention_cpu(*args, **kwargs)


@torch.library.impl("regraft::paged_attention", "CUDA")
def _cuda(*args: Any, **kwargs: Any) -> Tensor:
    # Triton is not on every machine, and need not be where there is no GPU.
    from .triton import paged_attention_triton

    check(*args, **kwargs)
    return paged_attention_triton(*args, **kwargs)
