"""The operators on the GPU. Recurrences are the plain operators' own loops over tokens, which a decode step takes too:
here a prefill takes no other form. Products are not fused with sums, but in the delta rule, where one compiled loop
serves every step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regraft.kernels.causal_conv.triton import causal_conv_triton
from regraft.kernels.decayed_linear.triton import decayed_linear_triton
from regraft.kernels.experts.triton import expert_linear_triton
from regraft.kernels.paged_attention.schema import check
from regraft.kernels.recurrent.triton_delta import delta_rule_triton
from regraft.kernels.selective_scan.triton import selective_scan_triton
from regraft.kernels.ssd.triton import ssd_triton

from . import triton_attention
from .pointwise import pointwise
from .products import rows_product
from .reductions import sort, topk
from .triton_products import product
from .triton_rows import norm, softmax, sum_over
from .triton_settled import settled

__all__ = [
    "causal_conv", "decayed_linear", "expert_linear", "gated_delta_rule", "kda", "latent_attention", "linear", "matmul",
    "norm", "paged_attention", "pointwise", "selective_scan", "softmax", "sort", "ssd", "sum_over", "topk",
]  # fmt: skip


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `products.linear`."""
    out = product(x.reshape(1, -1, x.shape[-1]), weight[None], bias)
    return out.view(*x.shape[:-1], weight.shape[0])


def matmul(a: Tensor, b: Tensor, fixed: str) -> Tensor:
    """See `products.matmul`."""
    if fixed == "right":
        return rows_product(a, b.mT, product)
    if fixed == "left":
        return rows_product(b.mT, a, product).mT.contiguous()
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    lefts = a.expand(*batch, *a.shape[-2:]).reshape(-1, *a.shape[-2:])
    rights = b.mT.expand(*batch, *b.mT.shape[-2:]).reshape(-1, *b.mT.shape[-2:])
    return product(lefts, settled(rights)).view(*batch, a.shape[-2], b.shape[-1])


def expert_linear(x: Tensor, weight: Tensor, expert_ids: Tensor, transposed: bool) -> Tensor:
    """See `products.expert_linear`."""
    tiles = expert_tiles(x.shape[0] // weight.shape[0], x.dtype)
    return expert_linear_triton(settled(x), weight, expert_ids, transposed, tiles)


def expert_tiles(mean: int, dtype: torch.dtype) -> dict[str, int]:
    """For so many rows an expert, on average. Fewer than 64 rows or than four warps: both tiles are made of the card's
    narrow products, and K goes through them in steps of 16 in order.
    """
    if dtype.itemsize > 2:
        return {"M": 16, "N": 64, "KT": 32, "num_warps": 4, "num_stages": 2}
    if mean > 16:
        return {"M": 64, "N": 64, "KT": 64, "num_warps": 2, "num_stages": 3}
    return {"M": 16, "N": 64, "KT": 128, "num_warps": 4, "num_stages": 4}


def paged_attention(*args: Any, **options: Any) -> Tensor:
    """As `regraft.kernels.paged_attention.paged_attention`."""
    check(*args, **options)
    return triton_attention.paged_attention(*args, **options)


def latent_attention(
    q: Tensor, rows: Tensor, w_k: Tensor, w_v: Tensor, cache: Tensor, cu_seqlens: Tensor, context_lens: Tensor,
    block_table: Tensor, slot_mapping: Tensor, latent_start: int, shared_start: int, scale: float, window: int = 0,
    chunk: int = 0, softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `regraft.kernels.latent_attention.latent_attention`, always with the weights absorbed."""
    heads, width, rank = w_k.shape
    shared = rows.shape[1] - rank
    query = q.new_empty(q.shape[0], heads, rank + shared)
    latent = q[..., latent_start : latent_start + width].transpose(0, 1)
    product(latent, w_k.mT, out=query[..., :rank].transpose(0, 1))
    query[..., rank:] = q[..., shared_start : shared_start + shared]
    key, pages = rows.unsqueeze(1), cache.unsqueeze(2)
    attended = triton_attention.paged_attention(
        query, key, key[..., :rank], pages, pages[..., :rank], cu_seqlens, context_lens, block_table, slot_mapping,
        scale, window, chunk, softcap, sinks,
    )  # fmt: skip
    out = q.new_empty(q.shape[0], heads, w_v.shape[1])
    product(attended.transpose(0, 1), w_v, out=out.transpose(0, 1))
    return out


Run = Callable[..., Tensor]
_delta_tokens: Run = partial(delta_rule_triton, by_chunks=False)
_linear_tokens: Run = partial(decayed_linear_triton, by_chunks=False, enable_fp_fusion=False)
_ssd_tokens: Run = partial(ssd_triton, by_chunks=False, enable_fp_fusion=False)
_conv: Run = partial(causal_conv_triton, fusion=False)


def _delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *rest: Any) -> Tensor:
    return _delta_tokens(*map(settled, (q, k, v, g, beta)), *rest)


gated_delta_rule = kda = _delta
"""As `regraft.kernels.delta_rule.gated_delta_rule` and `regraft.kernels.kda.kda`."""


def decayed_linear(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """As `regraft.kernels.decayed_linear.decayed_linear`."""
    return _linear_tokens(*map(settled, (q, k, v)), *rest)


def ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Any) -> Tensor:
    """As `regraft.kernels.ssd.ssd`."""
    x, dt, B, C = map(settled, (x, dt, B, C))
    return _ssd_tokens(x, dt, A, B, C, *rest)


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, *rest: Any
) -> Tensor:  # fmt: skip
    """As `regraft.kernels.selective_scan.selective_scan`."""
    x, dt, B, C = map(settled, (x, dt, B, C))
    return selective_scan_triton(
        x, dt, A, B, C, D, None if z is None else settled(z), *rest,
        TOKENS=1, BC=min(32, 1 << (x.shape[1] - 1).bit_length()), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def causal_conv(x: Tensor, *rest: Any) -> Tensor:
    """As `regraft.kernels.causal_conv.causal_conv`."""
    return _conv(settled(x), *rest)
