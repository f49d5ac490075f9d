"""The rows of each expert together: one product an expert, whatever computes it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def product_by_expert(
    x: Tensor,
    weight: Tensor,
    expert_ids: Tensor,
    transposed: bool,
    product: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """`expert_linear` by `product(rows [n, in], matrix [out, in]) -> [n, out]`, one call an expert that has rows."""
    order = expert_ids.argsort(stable=True)
    rows = x[order]
    counts = expert_ids.bincount(minlength=weight.shape[0]).tolist()
    out = x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            matrix = weight[expert].T if transposed else weight[expert]
            mine = slice(start, start + count)
            out[order[mine]] = product(rows[mine], matrix)
            start += count
    return out
