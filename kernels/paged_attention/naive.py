"""What paged attention means: one token, one head at a time. The oracle of the tests."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention_naive(
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
    """`paged_attention` by its definition, in float64: an oracle should not round."""
    page_size = k_cache.shape[1]
    group = q.shape[1] // k.shape[1]
    wide = torch.float64
    for token, slot in enumerate(slot_mapping.tolist()):
        k_cache[slot // page_size, slot % page_size] = k[token]
        v_cache[slot // page_size, slot % page_size] = v[token]

    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    bounds = cu_seqlens.tolist()
    for seq, context in enumerate(context_lens.tolist()):
        for token in range(bounds[seq], bounds[seq + 1]):
            pos = context + token - bounds[seq]
            attended = torch.tensor(
                [j for j in range(pos + 1) if is_attended(pos, j, window, chunk)],
                device=q.device,
            )
            pages = block_table[seq].long()[attended // page_size]
            keys = k_cache[pages, attended % page_size].to(wide)
            values = v_cache[pages, attended % page_size].to(wide)
            for head in range(q.shape[1]):
                scores = scale * (keys[:, head // group] @ q[token, head].to(wide))
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                if alibi_slopes is not None:
                    scores = scores + alibi_slopes[head].to(wide) * attended
                if rel_bias is not None:
                    bias = torch.zeros_like(scores)
                    near = pos - attended < rel_bias.shape[2]
                    bias[near] = rel_bias[token, head, (pos - attended)[near]].to(wide)
                    scores = scores + bias
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head, None].to(wide)])
                weights = torch.softmax(scores, 0)[: len(attended)]
                out[token, head] = (weights @ values[:, head // group]).to(q.dtype)
    return out


def is_attended(pos: int, key_pos: int, window: int, chunk: int) -> bool:
    """Whether a query at `pos` sees the key at `key_pos` of its own sequence."""
    return (
        key_pos <= pos
        and (not window or pos - key_pos < window)
        and (not chunk or pos // chunk == key_pos // chunk)
    )
