"""Matrix products on the GPU whose sum over K goes in one order, however many rows there are.

K is cut into parts by the weight's shape alone. A part is summed by the tensor cores in steps of 16, a part's total is
added to those before it. Few rows: the parts run side by side, and a second kernel adds them; many rows: one program
takes its tile through all of them. Both are the same additions. See `product_forms` for the tiles.
"""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from regraft.kernels.dependent import dependent
from regraft.kernels.device import fetches_tiles, num_processors
from regraft.kernels.triton_wait import wait_for_last
from regraft.kernels.whole import cdiv, power_of_2

from .product_forms import PART, Form, chosen, forms, num_parts
from .triton_settled import settled

__all__ = ["forms_of", "product"]


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    form: Form | None = None,
    parts: int | None = None,
) -> Tensor:
    """x [B, M, K] @ weight [B, N, K]^T -> [B, M, N], in x's dtype; float16, bfloat16 or float32.

    `bias` is [N], or what is one row with torch's broadcasting. `out` may have any strides. `form` and `parts` are for
    tests and measurements.
    """
    batch, rows, width = x.shape
    columns = weight.shape[1]
    if out is None:
        out = x.new_empty(batch, rows, columns)
    if not out.numel():
        return out
    launch = _planned(
        batch, rows, columns, width, x.dtype, num_processors(x.device), is_fetched(weight), form, parts
    )  # fmt: skip
    x, form, parts, is_split = settled(x), launch.form, launch.parts, launch.is_split
    bias = _in_a_row(bias, columns)
    target = out
    if is_split:
        target = torch.empty(parts, batch, rows, columns, dtype=torch.float32, device=x.device)
    operands: tuple[Any, Any] = (x, weight)
    if form.is_fetched:
        blocks = ([form.M, form.K], [form.N, form.K])
        operands = tuple(map(TensorDescriptor.from_tensor, (x[0], weight[0]), blocks))
    product_kernel[launch.grid](
        *operands, weight, x.stride(), weight.stride(), None if is_split else bias, target, target.stride()[-3:],
        rows, columns, width, launch.part, batch, **dependent(x.device), **launch.constants,
    )  # fmt: skip
    if is_split:
        block = min(1024, power_of_2(columns))
        add_parts_kernel[(batch * rows, cdiv(columns, block))](
            target, bias, out, out.stride(), rows, columns, PARTS=parts, BLOCK=block,
            num_warps=4, enable_fp_fusion=False, **dependent(x.device),
        )  # fmt: skip
    return out


def _in_a_row(bias: Tensor | None, columns: int) -> Tensor | None:
    """The bias of all rows as N elements side by side."""
    if bias is None or (bias.shape == (columns,) and bias.is_contiguous()):
        return bias
    if any(size != 1 for size in bias.shape[:-1]):
        raise ValueError(f"a bias {list(bias.shape)} is not the same for all rows")
    return bias.reshape(-1).expand(columns).contiguous()


@dataclass(frozen=True)
class _Launch:
    """How a product is launched. part: elements of K; constants: what the kernel is compiled for."""

    form: Form
    parts: int
    part: int
    is_split: bool
    grid: tuple[int, int]
    constants: dict[str, Any]


@functools.lru_cache(1 << 14)
def _planned(
    batch: int, rows: int, columns: int, width: int, dtype: torch.dtype, processors: int, is_fetched: bool,
    form: Form | None, parts: int | None,
) -> _Launch:  # fmt: skip
    """Kept: a step asks for hundreds, and the host must not be slower than the card."""
    parts = parts or num_parts(columns, width, processors)
    form = form or chosen(rows, columns, dtype, parts, processors, is_fetched)
    part = cdiv(cdiv(width, parts), PART) * PART
    parts = max(1, cdiv(width, part)) if width else 1
    is_split = form.is_split and parts > 1
    grid = batch * cdiv(rows, form.M) * cdiv(columns, form.N), parts if is_split else 1
    constants = {
        "PARTS": parts, "IS_SPLIT": is_split, "IS_FETCHED": form.is_fetched, "IS_TURNED": form.is_turned,
        "EVEN_K": width % form.K == 0, "EVEN_N": columns % form.N == 0, "M": form.M, "N": form.N, "K": form.K,
        "num_warps": form.num_warps, "num_stages": form.num_stages, "enable_fp_fusion": True,
    }  # fmt: skip
    return _Launch(form, parts, part, is_split, grid, constants)


def forms_of(weight: Tensor) -> list[Form]:
    """All forms that a product with this weight [N, K] may take."""
    processors = num_processors(weight.device)
    columns, width = weight.shape
    parts = num_parts(columns, width, processors)
    return forms(columns, weight.dtype, parts, processors, is_fetched(weight[None]))


def is_fetched(weight: Tensor) -> bool:
    """Whether tiles of this weight [B, N, K], and of `settled` rows beside it, can be described to the copy engine."""
    batch, _, width = weight.shape
    steps = 16 // weight.element_size()
    is_even = weight.stride(2) == 1 and weight.stride(1) % steps == 0 and width % steps == 0
    return (
        batch == 1 and weight.element_size() == 2 and is_even and weight.data_ptr() % 16 == 0
        and width > 0 and fetches_tiles(weight.device)
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "batch"])
def product_kernel(
    x, w, w_ptr, x_by, w_by, bias_ptr, out_ptr, out_by, num_rows, num_columns, width, part, batch,
    PARTS: tl.constexpr, IS_SPLIT: tl.constexpr, IS_FETCHED: tl.constexpr, IS_TURNED: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (tile, part, matrix), or without IS_SPLIT a (tile, matrix). Eight tiles of rows share a column's
    weights while they are near. x, w: pointers, or descriptors with IS_FETCHED.
    """
    tiles_m, tiles_n = tl.cdiv(num_rows, M), tl.cdiv(num_columns, N)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    matrix = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    group = tile // (8 * tiles_n)
    in_group = tile % (8 * tiles_n)
    high = tl.minimum(tiles_m - group * 8, 8)
    at = (group * 8 + in_group % high) * M, in_group // high * N
    m_M, n_N = at[0] + tl.arange(0, M), at[1] + tl.arange(0, N)
    to_M = out_ptr + matrix * out_by[0] + m_M.to(tl.int64) * out_by[1]
    is_out_MN = (m_M < num_rows)[:, None] & (n_N < num_columns)[None, :]
    begin = 0
    if IS_SPLIT:
        begin = tl.program_id(1) * part
    if DEPENDENT and IS_FETCHED:
        column_N = tl.minimum(n_N, num_columns - 1).to(tl.int64)
        prefetch(w_ptr + column_N[:, None] * w_by[1], begin, width)
    wait_for_last(DEPENDENT)
    if IS_SPLIT:
        to_M += tl.program_id(1).to(tl.int64) * batch * num_rows * num_columns
    if IS_FETCHED:
        total = sum_fetched(x, w, at, begin, part, width, IS_TURNED, M, N, K)
        if not IS_SPLIT:
            for i in range(1, PARTS):
                total += sum_fetched(x, w, at, i * part, part, width, IS_TURNED, M, N, K)
    else:
        row_M = tl.minimum(m_M, num_rows - 1).to(tl.int64)  # read twice rather than masked
        column_N = n_N if EVEN_N else tl.minimum(n_N, num_columns - 1)
        x_M = x + matrix * x_by[0] + row_M * x_by[1]
        w_N = w + matrix * w_by[0] + column_N.to(tl.int64) * w_by[1]
        total = sum_loaded(x_M, x_by[2], w_N, w_by[2], begin, part, width, EVEN_K, M, N, K)
        if not IS_SPLIT:
            for i in range(1, PARTS):
                total += sum_loaded(x_M, x_by[2], w_N, w_by[2], i * part, part, width, EVEN_K, M, N, K)  # fmt: skip
    if bias_ptr is not None:
        bias_N = tl.load(bias_ptr + n_N, mask=n_N < num_columns, other=0.0)
        total += bias_N.to(tl.float32)[None, :]
    to_MN = to_M[:, None] + n_N[None, :] * out_by[2]
    tl.store(to_MN, total.to(out_ptr.dtype.element_ty), mask=is_out_MN)


@triton.jit
def prefetch(row_ptrs, begin, width):
    """Have the first elements of rows brought into the L2 cache, from `begin` on. Nothing waits for them, and nothing
    but time depends on them: they may be read before the kernel before this one is done.
    """
    line = begin + tl.arange(0, 4) * 64
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [row_ptrs + tl.minimum(line, width - 1)[None, :]],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def sum_fetched(
    x, w, at, begin, part, width, IS_TURNED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """The products' sum over `part` of K from `begin` on, [M, N] float32, of the tile at (row, column). What lies
    outside of either matrix is fetched as zeros.
    """
    if IS_TURNED:
        acc = tl.zeros([N, M], tl.float32)
    else:
        acc = tl.zeros([M, N], tl.float32)
    for k in range(begin, tl.minimum(begin + part, width), K):
        rows = x.load([at[0], k])
        columns = w.load([at[1], k])
        if IS_TURNED:
            acc = tl.dot(columns, tl.trans(rows), acc)
        else:
            acc = tl.dot(rows, tl.trans(columns), acc)
    if IS_TURNED:
        acc = tl.trans(acc)
    return acc


@triton.jit
def sum_loaded(
    x_M, x_step, w_N, w_step, begin, part, width, EVEN_K: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """As `sum_fetched`, through pointers to rows and columns."""
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
    parts_ptr, bias_ptr, out_ptr, out_by, num_rows, num_columns, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a (row of a matrix, block of columns): the parts' sums, the first one first."""
    wait_for_last(DEPENDENT)
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
