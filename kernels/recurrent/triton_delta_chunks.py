"""The delta rule by chunks on the GPU, for sequences of many tokens; see `delta` for the algebra.

Within a chunk of C tokens the corrections solve a unit lower triangular system, whose right hand sides are known but
for the state at the chunk's start: solved for both parts of them, [u, w], the corrections are u - w S. So all chunks
are prepared side by side, and only products with the state remain for the walk from chunk to chunk.
"""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regraft.kernels.dependent import dependent
from regraft.kernels.triton_wait import wait_for_last
from regraft.kernels.whole import cdiv, power_of_2

from .triton import lookup_size, own_sequence, own_state
from .triton_chunks import dot_precision, goes_by_chunks
from .triton_delta_prepare import prepare_by_channel_kernel, prepare_by_head_kernel

CHUNK = 32
"""Tokens."""

LONG = 384
"""New tokens of a step's longest sequence from which its sequences go by chunks. On an H200, with 16 heads of
128 x 128, the loop takes 1.1 us a token of the longest sequence, chunks about 0.4 ms however 2,048 tokens are divided.
"""

WALK = {"BV": 32, "num_warps": 4, "num_stages": 2}
"""Values a tile of the walk."""


def delta_chunks_triton(
    operands: tuple[Tensor, ...],
    out: Tensor,
    sequences: tuple[Tensor, Tensor, Tensor],
    scale: float,
    qk_l2norm: bool,
    long: int,
) -> None:
    """Outputs and states of the sequences that have several tokens, if one of them has `long` or more: nothing
    otherwise. Operands: q, k, v, g, beta, state.

    Takes 4 (3 K + V + C) bytes of scratch a token and value head.
    """
    q, k, v, g, beta, state = operands
    tokens, heads, width = v.shape
    keys, seqs = q.shape[2], len(sequences[1])
    chunks = tokens // CHUNK + seqs
    block_k, rows = max(16, power_of_2(keys)), lookup_size(seqs)
    scratch = v.new_empty(
        tokens * heads * (3 * keys + width + CHUNK) + chunks * heads * keys, dtype=torch.float32
    )
    sizes = [keys, keys, keys, width, CHUNK]
    parts = tuple(
        scratch[: -chunks * heads * keys].split([tokens * heads * size for size in sizes])
    )
    parts += (scratch[-chunks * heads * keys :],)
    common: dict[str, Any] = {
        "K": keys,
        "V": width,
        "C": CHUNK,
        "BK": block_k,
        "enable_fp_fusion": True,
        **dependent(q.device),
    }
    inputs = (q, k, v, g, beta)
    precision = dot_precision(q.dtype)
    preparing: dict[str, Any] = {
        "operands": inputs,
        "strides": tuple(x.stride() for x in inputs),
        "parts": parts,
        "cu_seqlens_ptr": sequences[0],
        "num_seqs": seqs,
        "long": long,
        "scale": scale,
        "L2NORM": qk_l2norm,
        "SHARE": heads // q.shape[1],
        "BV": max(16, power_of_2(width)),
        "R": rows,
        "PRECISION": precision,
        "num_warps": 8 if g.dim() == 3 else 4,
        "num_stages": 1,
    }
    prepare = prepare_by_channel_kernel if g.dim() == 3 else prepare_by_head_kernel
    prepare[(chunks, heads)](**preparing, **common)
    walk_kernel[(cdiv(width, WALK["BV"]), heads, seqs)](
        parts, state, state.stride(), out, *sequences, long, R=rows, PRECISION=precision, **WALK, **common
    )  # fmt: skip


@triton.jit(do_not_specialize=["long"])
def walk_kernel(
    parts, state_ptr, state_by, out_ptr, cu_seqlens_ptr, context_lens_ptr, state_slots_ptr, long,
    R: tl.constexpr, PRECISION: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (tile of BV values, value head, sequence of several tokens)."""
    wait_for_last(DEPENDENT)
    w_ptr, query_ptr, key_ptr, u_ptr, scores_ptr, decay_ptr = parts
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    k_K, c_C = tl.arange(0, BK), tl.arange(0, C)
    v_V = tl.program_id(0) * BV + tl.arange(0, BV)
    is_in_K, is_in_V = k_K < K, v_V < V
    start, end, slot, context = own_sequence(cu_seqlens_ptr, context_lens_ptr, state_slots_ptr)
    if (end - start > 1) & goes_by_chunks(cu_seqlens_ptr, tl.num_programs(2), long, R):
        cells, is_cell, state = own_state(state_ptr, state_by, slot, head, context, k_K, v_V, K, V)
        chunk = (start // C + tl.program_id(2)).to(tl.int64)
        row_C = (start + c_C).to(tl.int64)
        for _ in range(start, end, C):
            is_token_C = row_C < end
            at_C = row_C * num_heads + head
            key_at_CK = at_C[:, None] * K + k_K[None, :]
            is_key_CK = is_token_C[:, None] & is_in_K[None, :]
            is_value_CV = is_token_C[:, None] & is_in_V[None, :]
            w = tl.load(w_ptr + key_at_CK, mask=is_key_CK, other=0.0)
            q = tl.load(query_ptr + key_at_CK, mask=is_key_CK, other=0.0)
            k = tl.load(key_ptr + key_at_CK, mask=is_key_CK, other=0.0)
            u = tl.load(u_ptr + at_C[:, None] * V + v_V[None, :], mask=is_value_CV, other=0.0)
            scores = tl.load(
                scores_ptr + at_C[:, None] * C + c_C[None, :], mask=is_token_C[:, None], other=0.0
            )
            decay = tl.load(
                decay_ptr + (chunk * num_heads + head) * K + k_K, mask=is_in_K, other=0.0
            )
            correction = u - tl.dot(w, state, input_precision=PRECISION)
            out = tl.dot(q, state, input_precision=PRECISION)
            out += tl.dot(scores, correction, input_precision=PRECISION)
            state = state * decay[:, None]
            state += tl.dot(tl.trans(k), correction, input_precision=PRECISION)
            to = out_ptr + at_C[:, None] * V + v_V[None, :]
            tl.store(to, out.to(out_ptr.dtype.element_ty), mask=is_value_CV)
            row_C += C
            chunk += 1
        tl.store(cells, state, mask=is_cell)
