"""Random programs: rows in a few layouts, and operations on what there is."""

from __future__ import annotations

import torch

from .choices import Maker
from .operations_compute import (
    addmm,
    attention,
    binary,
    by_tokens,
    calm,
    compare,
    conv,
    diff,
    einsum,
    embedding,
    extreme,
    linear,
    matmul,
    norm,
    reduce,
    reduce_all,
    rough,
    running,
    sort,
    triangle,
    unary,
    where,
)  # fmt: skip
from .operations_move import (
    arange,
    as_complex,
    bits,
    cat,
    expand,
    gather,
    index,
    index_by_mask,
    index_select,
    narrow_back,
    nothing_known,
    one_hot,
    pad,
    place,
    rejoin,
    repeat,
    repeat_interleave,
    scatter,
    select,
    slice_,
    split,
    transpose,
    twins,
    unflatten,
    uniform,
    unsqueeze,
    view,
)  # fmt: skip
from .programs import Chooser, Program

aten = torch.ops.aten

MAKERS: tuple[Maker, ...] = (
    embedding, unary, rough, calm, binary, binary, compare, where, by_tokens, linear, matmul,
    matmul, addmm, einsum, attention, conv, view, view, rejoin, unflatten, transpose, transpose,
    unsqueeze, expand, twins, repeat, repeat_interleave, cat, split, slice_, narrow_back, select,
    pad, reduce, reduce_all, extreme, running, sort, diff, norm, triangle, index, index,
    index_by_mask, index_select, gather, gather, scatter, scatter, place, place, one_hot, uniform,
    uniform, arange, nothing_known, as_complex, bits,
)  # fmt: skip


def program(c: Chooser, length: int, favourite: Maker | None = None) -> Program:
    """Rows in a few layouts, a mask of pairs, and `length` operations on what there is.

    With a favourite, every other operation is that one.
    """
    p = Program()
    rows = p.call(aten.embedding.default, p.weight(12, 4), p.ids)
    flat = p.call(
        aten.select.int, p.call(aten.embedding.default, p.weight(9, 6), p.positions), 0, 0
    )
    column = p.call(aten.unsqueeze.default, p.ids, -1)
    p.call(aten.eq.Tensor, p.positions, p.call(aten.select.int, column, 0, 0))
    p.call(aten.reshape.default, rows, [1, p.tokens, 2, 2])
    p.call(aten.reshape.default, flat, [p.tokens, 3, 2])
    p.weight(4), p.weight(3, 4)
    for _ in range(length):
        maker = favourite if favourite is not None and c.chance(2) else c.pick(MAKERS)
        maker(p, c)
    p.graph.output((p.tensors[-1],))
    return p
