"""Matrix products on the GPU whose sum over K goes in one order, however many rows there are.

K is cut into parts by the weight's shape alone. A part is summed by the tensor cores in steps of 16, a part's total is
added to those before it. Few rows: the parts run side by side, and a second kernel adds them; many rows: one program
takes its tile through all of them. Both are the same additions. That tiles of 64 and of 128 rows round alike is a
property of the card, and is measured (`places`).
"""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_settled import num_processors, settled

_SHORTEST = 512
"""A part of K shorter than this does not pay for adding it."""

_MOST_PARTS = 8


@dataclass(frozen=True)
class Form:
    """A tile of M rows, N columns and K at a time, and whether the parts of K are taken side by side."""

    M: int
    N: int
    K: int
    num_warps: int
    num_stages: int
    is_split: bool = False


def forms(dtype: torch.dtype, parts: int) -> list[Form]:
    """All forms that a product of this dtype may take, in so many parts: they must not differ in a bit."""
    tiles = [(32, 64, 32, 4, 2)]
    if dtype.itemsize == 2:
        # From 64 rows on these are the card's wide products; fewer rows would be other ones, which sum otherwise.
        tiles = [(64, 128, 64, 4, 4), (128, 128, 64, 8, 3)]
    return [Form(*tile, is_split) for tile in tiles for is_split in (False, True)[: min(parts, 2)]]


def num_parts(columns: int, width: int, N: int, processors: int) -> int:
    """Into how many parts K is cut: a matter of the weight and the card, never of the rows.

    Programs of a decode step, one a tile and part, should fill whole waves of the card; a part's sums are written and
    read once more.
    """
    tiles = triton.cdiv(columns, N)
    if tiles >= processors:  # the parts' sums would cost more than the last wave's idle processors
        return 1

    def cost(parts: int) -> float:
        waves = tiles * parts / processors
        return triton.cdiv(tiles * parts, processors) / waves + 160 * parts / width

    choices = [n for n in range(1, _MOST_PARTS + 1) if n == 1 or width >= n * _SHORTEST]
    return min(choices, key=cost)


def chosen(rows: int, columns: int, dtype: torch.dtype, parts: int, processors: int) -> Form:
    """The form for so many rows. Small tiles are enough where parts of K are what fills the card."""
    found = forms(dtype, parts)
    fits = [form for form in found if rows <= form.M] or [found[-1]]
    tile = fits[0]
    programs = triton.cdiv(rows, tile.M) * triton.cdiv(columns, tile.N)
    if parts > 1 and programs < 2 * processors:
        return next(form for form in found if form.is_split)
    return next(form for form in found if form.M == tile.M and not form.is_split)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    form: Form | None = None,
    parts: int | None = None,
) -> Tensor:
    """x [B, M, K] @ weight [B, N, K]^T -> [B, M, N], in x's dtype; float16, bfloat16 or float32.

    `out` may have any strides. `form` and `parts` are for tests and measurements.
    """
    batch, rows, width = x.shape
    columns = weight.shape[1]
    if out is None:
        out = x.new_empty(batch, rows, columns)
    if not out.numel():
        return out
    processors = num_processors(x.device)
    if parts is None:
        parts = num_parts(columns, width, forms(x.dtype, 1)[0].N, processors)
    if form is None:
        form = chosen(rows, columns, x.dtype, parts, processors)
    x = settled(x)
    part = triton.cdiv(triton.cdiv(width, parts), form.K) * form.K
    parts = max(1, triton.cdiv(width, part)) if width else 1
    is_split = form.is_split and parts > 1
    target = out
    if is_split:
        target = torch.empty(parts, batch, rows, columns, dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(rows, form.M) * triton.cdiv(columns, form.N)
    product_kernel[(batch * tiles, parts if is_split else 1)](
        x, x.stride(), weight, weight.stride(), None if is_split else bias, target, target.stride()[-3:],
        rows, columns, width, part, batch,
        PARTS=parts, IS_SPLIT=is_split, EVEN_K=width % form.K == 0, EVEN_N=columns % form.N == 0,
        M=form.M, N=form.N, K=form.K, num_warps=form.num_warps, num_stages=form.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    if is_split:
        block = min(1024, triton.next_power_of_2(columns))
        add_parts_kernel[(batch * rows, triton.cdiv(columns, block))](
            target, bias, out, out.stride(), rows, columns, PARTS=parts, BLOCK=block,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows", "batch"])
def product_kernel(
    x_ptr, x_by, w_ptr, w_by, bias_ptr, out_ptr, out_by, num_rows, num_columns, width, part, batch,
    PARTS: tl.constexpr, IS_SPLIT: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One program a (tile, part, matrix), or without IS_SPLIT a (tile, matrix). Eight tiles of rows share a column's
    weights while they are near.
    """
    tiles_m, tiles_n = tl.cdiv(num_rows, M), tl.cdiv(num_columns, N)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    matrix = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    group = tile // (8 * tiles_n)
    in_group = tile % (8 * tiles_n)
    high = tl.minimum(tiles_m - group * 8, 8)
    m_M = (group * 8 + in_group % high) * M + tl.arange(0, M)
    n_N = in_group // high * N + tl.arange(0, N)
    row_M = tl.minimum(m_M, num_rows - 1).to(tl.int64)  # read twice rather than masked
    column_N = n_N if EVEN_N else tl.minimum(n_N, num_columns - 1)
    x_M = x_ptr + matrix * x_by[0] + row_M * x_by[1]
    w_N = w_ptr + matrix * w_by[0] + column_N.to(tl.int64) * w_by[1]
    to_M = out_ptr + matrix * out_by[0] + m_M.to(tl.int64) * out_by[1]
    is_out_MN = (m_M < num_rows)[:, None] & (n_N < num_columns)[None, :]
    if IS_SPLIT:
        first = tl.program_id(1)
        total = sum_part(x_M, x_by[2], w_N, w_by[2], first * part, part, width, EVEN_K, M, N, K)
        to_M += first.to(tl.int64) * batch * num_rows * num_columns
    else:
        total = sum_part(x_M, x_by[2], w_N, w_by[2], 0, part, width, EVEN_K, M, N, K)
        for i in range(1, PARTS):
            total += sum_part(x_M, x_by[2], w_N, w_by[2], i * part, part, width, EVEN_K, M, N, K)
        if bias_ptr is not None:
            bias_N = tl.load(bias_ptr + n_N, mask=n_N < num_columns, other=0.0)
            total += bias_N.to(tl.float32)[None, :]
    to_MN = to_M[:, None] + n_N[None, :] * out_by[2]
    tl.store(to_MN, total.to(out_ptr.dtype.element_ty), mask=is_out_MN)


@triton.jit
def sum_part(
    x_M, x_step, w_N, w_step, begin, part, width, EVEN_K: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The products' sum over `part` of K from `begin` on, [M, N] float32."""
    acc = tl.zeros([M, N], tl.float32)
    for k in range(begin, tl.minimum(begin + part, width), K):
        k_K = k + tl.arange(0, K)
        x_MK = x_M[:, None] + k_K[None, :] * x_step
        w_KN = w_N[None, :] + k_K[:, None] * w_step
        if EVEN_K:
            x = tl.load(x_MK)
            w = tl.load(w_KN)
        else:
            x = tl.load(x_MK, mask=(k_K < width)[None, :], other=0.0)
            w = tl.load(w_KN, mask=(k_K < width)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def add_parts_kernel(
    parts_ptr, bias_ptr, out_ptr, out_by, num_rows, num_columns, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program a (row of a matrix, block of columns): the parts' sums, the first one first."""
    row = tl.program_id(0).to(tl.int64)
    behind = tl.num_programs(0).to(tl.int64) * num_columns
    n_N = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in_N = n_N < num_columns
    at_N = parts_ptr + row * num_columns + n_N
    total_N = tl.load(at_N, mask=is_in_N, other=0.0)
    for i in tl.static_range(1, PARTS):
        total_N += tl.load(at_N + i * behind, mask=is_in_N, other=0.0)
    if bias_ptr is not None:
        total_N += tl.load(bias_ptr + n_N, mask=is_in_N, other=0.0).to(tl.float32)
    to_N = out_ptr + row // num_rows * out_by[0] + row % num_rows * out_by[1] + n_N * out_by[2]
    tl.store(to_N, total_N.to(out_ptr.dtype.element_ty), mask=is_in_N)
