"""What the recurrent operators' Triton kernels share: one program owns a part of one sequence's state.

It reads that part from the sequence's slot of the pool, takes the sequence's new tokens in order with the state in
registers, and writes it back once, in place. Nobody else reads or writes it, so no program waits for another.

A kernel's grid is (tiles of the state, heads, sequences): from shapes alone, so that a captured CUDA graph stays
right whatever the lengths.
"""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from regraft.kernels.whole import power_of_2


@triton.jit
def own_sequence(cu_seqlens_ptr, context_lens_ptr, state_slots_ptr):
    """Of this program's sequence: its first new token and the one behind its last, its slot (int64), and how many
    tokens of it are in there: with none, what the slot holds is another's.
    """
    seq = tl.program_id(2)
    start = tl.load(cu_seqlens_ptr + seq)
    end = tl.load(cu_seqlens_ptr + seq + 1)
    slot = tl.load(state_slots_ptr + seq).to(tl.int64)
    return start, end, slot, tl.load(context_lens_ptr + seq)


@triton.jit
def own_state(
    state_ptr, state_by, slot, head, context, r_R, c_C, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Part [R, C] of a state [slots, heads, ROWS, COLUMNS]: where it lies, which of it exists, and its values, zero at
    a sequence's start. What another sequence left in the slot is not read: it may be NaN.
    """
    cells = state_ptr + slot * state_by[0] + head.to(tl.int64) * state_by[1]
    cells = cells + r_R[:, None] * state_by[2] + c_C[None, :] * state_by[3]
    is_in_C = (c_C < COLUMNS)[None, :]
    is_own = (r_R < tl.where(context > 0, ROWS, 0))[:, None] & is_in_C
    return cells, (r_R < ROWS)[:, None] & is_in_C, tl.load(cells, mask=is_own, other=0.0)


def lookup_size(seqs: int) -> int:
    """The size R of a block that holds every sequence's start, for `own_tile`: few sizes, as each is compiled."""
    return max(64, power_of_2(seqs))


@triton.jit
def own_tile(cu_seqlens_ptr, num_seqs, T: tl.constexpr, R: tl.constexpr):
    """Of the tile with this program's number: its sequence, that one's first token, and the tile's first token and the
    one behind its last, which is not behind the first if it is empty. R is a power of two of at least num_seqs.

    A row of N tokens of R sequences has at most N // T + R tiles of T tokens: cu_seqlens[r] // T + r is the first of
    sequence r. There are a few too many, but nothing has to be counted, and no value has to be known on the host.
    """
    tile = tl.program_id(0)
    r_R = tl.arange(0, R)
    start_R = tl.load(cu_seqlens_ptr + r_R, mask=r_R < num_seqs, other=0)
    first_R = tl.where(r_R < num_seqs, start_R // T + r_R, 2147483647)
    seq = tl.sum((first_R <= tile).to(tl.int32), 0) - 1
    start = tl.load(cu_seqlens_ptr + seq)
    end = tl.load(cu_seqlens_ptr + seq + 1)
    begin = start + (tile - start // T - seq) * T
    return seq, start, begin, tl.minimum(end, begin + T)


@triton.jit
def zero_rows_of_nobody(out_ptr, cu_seqlens_ptr, num_tokens, row_size, at_V, is_in_V):
    """Zero this program's columns in the rows behind the last sequence's tokens. Sequences share those rows out."""
    share = tl.num_programs(2)
    first = tl.load(cu_seqlens_ptr + share) + tl.program_id(2)
    zero_rows(out_ptr, first, share, num_tokens, row_size, at_V, is_in_V)


@triton.jit
def zero_rows(out_ptr, first, step, num_tokens, row_size, at_V, is_in_V):
    """Zero columns of the rows `first`, `first` + `step` and so on."""
    row = first.to(tl.int64)
    zero_V = tl.zeros(at_V.shape, tl.float32).to(out_ptr.dtype.element_ty)
    for _ in range(first, num_tokens, step):
        tl.store(out_ptr + row * row_size + at_V, zero_V, mask=is_in_V)
        row += step


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """`x` as a tensor of `dtype` would hold it, in float32."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def softplus(x):
    """As torch: log(1 + exp(x)), and x itself beyond 20. `x` is float32.

    Where 1 + exp(x) is rounded, dividing by what was really added makes up for it.
    """
    added = tl.exp(x)
    total = 1.0 + added
    is_lost = total == 1.0
    log = tl.log(total) * (added / tl.where(is_lost, 1.0, total - 1.0))
    return tl.where(x > 20.0, x, tl.where(is_lost, added, log))


@triton.jit
def time_step(dt, bias, SOFTPLUS: tl.constexpr):
    """`dt` of a token, biased and passed through softplus, each in dt's own dtype; float32."""
    dtype: tl.constexpr = dt.dtype
    dt = dt.to(tl.float32)
    if bias is not None:
        dt = rounded(dt + rounded(bias, dtype), dtype)
    if SOFTPLUS:
        dt = rounded(softplus(dt), dtype)
    return dt


def state_tiles(rows: int, width: int) -> tuple[int, int, int]:
    """How a [rows, width] state is cut: rows and width of a tile, powers of two, and warps that hold it.

    `rows` are never cut, as sums run over them. A warp holds up to 4096 numbers in registers, 128 a thread: measured on
    an H200 for states of 128 x 128, where 2048 and several warps a tile were slower, in spite of a few spilt registers.
    """
    numbers = 4096
    block_rows = power_of_2(rows)
    block = min(power_of_2(width), max(8, numbers // block_rows))
    return block_rows, block, max(1, min(8, block_rows * block // numbers))


def optional_strides(x: Tensor | None, dims: int) -> tuple[int, ...]:
    """Strides, zeros if there is no tensor."""
    return (0,) * dims if x is None else x.stride()
