"""Measures on the GPU what `places` measures on the CPU: every form of a kernel gives a row or a query the same bits.

A form is a tile and a way to share out work; which one runs is a matter of how much there is to do.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .cuda import expert_tiles
from .triton_attention import SEGMENT, paged_attention
from .triton_attention import forms as attention_forms
from .triton_products import forms_of, product

_ROWS = 260
"""Two of the widest tiles."""

_CONTEXT = 2 * SEGMENT + 70
"""Keys before the queries: whole segments and tiles, and a part of either."""

_QUERIES = 37

_PAGE = 16
"""Tokens a page: an engine's, unless it is told otherwise, so that kernels are compiled once."""


def steady_product(weight: Tensor) -> bool:
    """weight [N, K], for `triton_products.product`."""
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    width = weight.shape[1]
    generator = _generator(weight)
    row = _random((1, width), weight, generator)
    (expected,) = product(row[None], weight[None])[0]
    for form in forms_of(weight):
        rows = _random((_ROWS, width), weight, generator)
        everywhere = row.expand(form.M, -1).contiguous()
        at = torch.randint(0, _ROWS, (8,), generator=generator, device=weight.device)
        rows[at] = row
        for x, own in ((everywhere, slice(None)), (rows, at), (rows[at[0] :], slice(1))):
            found = product(x[None], weight[None], form=form)[0][own]
            if not torch.equal(found, expected.expand_as(found)):
                return False
    return True


def steady_experts(weight: Tensor, transposed: bool) -> bool:
    """weight [E, N, K], or [E, K, N] if transposed, for `expert_linear`."""
    from regraft.kernels.experts.triton import expert_linear_triton

    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    generator = _generator(weight)
    row = _random((1, weight.shape[1 if transposed else 2]), weight, generator)
    experts = min(2, len(weight))
    results = []
    for mean in (1, 32):
        for count in (1, 5, 70):
            rows = _random((count, row.shape[1]), weight, generator)
            ids = torch.arange(count, device=weight.device) % experts
            rows[-1], ids[-1] = row, 0
            tiles = expert_tiles(mean, weight.dtype)
            results.append(expert_linear_triton(rows, weight, ids, transposed, tiles)[-1])
    return all(torch.equal(result, results[0]) for result in results)


def steady_attention(
    width: int, v_width: int, heads: int, kv_heads: int, dtype: torch.dtype, device: str
) -> bool:
    """Queries in one step, and token by token, in every form."""
    like = torch.empty(0, dtype=dtype, device=device)
    generator = _generator(like)
    total = _CONTEXT + _QUERIES
    q = _random((total, heads, width), like, generator)
    k = _random((total, kv_heads, width), like, generator)
    is_latent = kv_heads == 1 and v_width < width
    v = k[..., :v_width] if is_latent else _random((total, kv_heads, v_width), like, generator)
    expected = None
    for form in attention_forms(max(width, v_width), dtype.itemsize):
        for step in (_QUERIES, 1):
            k_cache, v_cache = (
                torch.zeros(-(-total // _PAGE), _PAGE, kv_heads, size, dtype=dtype, device=device)
                for size in (width, v_width)
            )
            v_cache = k_cache[..., :v_width] if is_latent else v_cache
            found = []
            for start, end in _steps(_CONTEXT, step, total):
                own = slice(start, end)
                arguments = (
                    q[own],
                    k[own],
                    v[own],
                    k_cache,
                    v_cache,
                    *_sequence(start, end, device),
                )
                found.append(paged_attention(*arguments, width**-0.5, form=form))
            queries = torch.cat(found)[-_QUERIES:]
            expected = queries if expected is None else expected
            if not torch.equal(queries, expected):
                return False
    return True


def _steps(context: int, step: int, total: int) -> Iterator[tuple[int, int]]:
    yield 0, context
    for start in range(context, total, step):
        yield start, min(total, start + step)


def _sequence(start: int, end: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Metadata of one sequence, whose pages are the whole cache in order."""
    return (
        torch.tensor([0, end - start], dtype=torch.int32, device=device),
        torch.tensor([start], dtype=torch.int32, device=device),
        torch.arange(-(-(_CONTEXT + _QUERIES) // _PAGE), dtype=torch.int32, device=device)[None],
        torch.arange(start, end, device=device),
    )


def _generator(like: Tensor) -> torch.Generator:
    return torch.Generator(like.device).manual_seed(like.numel() % 8191)


def _random(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=like.device).to(like.dtype)
