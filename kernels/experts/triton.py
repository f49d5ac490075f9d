"""Rows through the matrices of their experts on the GPU: one kernel, rows read and written where they lie.

Nothing here reads a tensor's values, so a captured CUDA graph stays right whatever the routing.
"""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from regraft.kernels.dependent import dependent
from regraft.kernels.triton_wait import wait_for_last
from regraft.kernels.whole import cdiv, power_of_2


def expert_linear_triton(
    x: Tensor,
    weight: Tensor,
    expert_ids: Tensor,
    transposed: bool,
    tiles: Mapping[str, int] | None = None,
) -> Tensor:
    """See schema.expert_linear. `tiles` replace those chosen by the number of rows."""
    rows, width = x.shape
    experts = weight.shape[0]
    in_stride, out_stride = weight.stride()[1:] if transposed else weight.stride()[:0:-1]
    out = x.new_empty(rows, weight.shape[2 if transposed else 1])
    if not rows:
        return out
    ids, order = expert_ids.sort(stable=True)
    starts = torch.searchsorted(ids, torch.arange(experts, device=ids.device))
    tiles = tiles or _tiles(rows, experts, x.element_size())
    grid = (rows // tiles["M"] + experts, cdiv(out.shape[1], tiles["N"]))
    expert_kernel[grid](
        x, *x.stride(), weight, weight.stride(0), in_stride, out_stride, out, order, starts, rows,
        EXPERTS=experts, E=power_of_2(experts), K=width, OUT=out.shape[1], enable_fp_fusion=True,
        **dependent(x.device), **tiles,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def expert_kernel(
    x_ptr, x_row, x_col, w_ptr, w_expert, w_in, w_out, out_ptr, order_ptr, starts_ptr, num_rows,
    EXPERTS: tl.constexpr, E: tl.constexpr, K: tl.constexpr, OUT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, KT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (block of M rows of one expert, N columns). `order` lists the rows by expert, `starts` where in it
    each expert begins.

    Block starts[e] // M + e is the first of expert e: there are a few blocks too many, but nothing has to be counted.
    """
    wait_for_last(DEPENDENT)
    block, column = tl.program_id(0), tl.program_id(1)
    e_E = tl.arange(0, E)
    start_E = tl.load(starts_ptr + e_E, mask=e_E < EXPERTS, other=num_rows)
    first_E = tl.where(e_E < EXPERTS, start_E // M + e_E, 2147483647)
    expert = tl.sum((first_E <= block).to(tl.int32), 0) - 1
    start = tl.load(starts_ptr + expert)
    end = tl.load(starts_ptr + expert + 1, mask=expert + 1 < EXPERTS, other=num_rows)
    begin = start + (block - start // M - expert) * M
    if begin < end:
        place_M = begin + tl.arange(0, M)
        is_row_M = place_M < end
        row_M = tl.load(order_ptr + place_M, mask=is_row_M, other=0)
        n_N = column * N + tl.arange(0, N)
        is_column_N = n_N < OUT
        x_M = x_ptr + row_M * x_row
        w_N = w_ptr + expert.to(tl.int64) * w_expert + n_N.to(tl.int64) * w_out
        acc = tl.zeros([M, N], tl.float32)
        for k in range(0, K, KT):
            k_K = k + tl.arange(0, KT)
            is_in_K = k_K < K
            x = tl.load(
                x_M[:, None] + k_K[None, :] * x_col,
                mask=is_row_M[:, None] & is_in_K[None, :],
                other=0.0,
            )
            w = tl.load(
                w_N[None, :] + k_K[:, None] * w_in,
                mask=is_column_N[None, :] & is_in_K[:, None],
                other=0.0,
            )
            acc += tl.dot(x, w, input_precision="ieee")
        to = out_ptr + row_M[:, None] * OUT + n_N[None, :]
        tl.store(
            to, acc.to(out_ptr.dtype.element_ty), mask=is_row_M[:, None] & is_column_N[None, :]
        )


def _tiles(rows: int, experts: int, itemsize: int) -> dict[str, int]:
    """By the rows an expert gets on average. Few rows: the matrices' bytes count, so many loads are in flight."""
    mean = rows // experts
    if itemsize > 2:
        return {"M": 32 if mean > 16 else 16, "N": 64, "KT": 32, "num_warps": 4, "num_stages": 2}
    if mean > 64:
        return {"M": 128, "N": 128, "KT": 64, "num_warps": 8, "num_stages": 3}
    if mean > 16:
        return {"M": 64, "N": 128, "KT": 64, "num_warps": 4, "num_stages": 3}
    return {"M": 16, "N": 64, "KT": 128, "num_warps": 4, "num_stages": 4}
