"""Which projections take the kernel of `invariant/triton_products`, and its tiles: by shapes alone."""

from __future__ import annotations

import functools

from torch import Tensor
from torch.nn import functional

from regraft.kernels.device import num_processors
from regraft.kernels.invariant.product_forms import SHORTEST, Form
from regraft.kernels.invariant.triton_products import is_fetched, product
from regraft.kernels.whole import cdiv

FEW = 64
"""Rows up to which every weight is read as fast as by BLAS, or faster."""

MOST = 128
"""Rows up to which a weight of at most SMALL bytes is. Processors of a larger one read more of the rows than of the
weight: BLAS lets them share the rows, which Triton cannot.
"""

SMALL = 16 << 20


def linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `linear`."""
    columns, width = weight.shape
    rows = x.numel() // width if width else 0
    size = weight.numel() * weight.element_size()
    if not 0 < rows <= (MOST if size <= SMALL else FEW) or not is_fetched(weight[None]):
        return functional.linear(x, weight, bias)
    form, parts = chosen(rows, columns, width, num_processors(x.device))
    out = product(x.reshape(1, rows, width), weight[None], bias, form=form, parts=parts)
    return out.view(*x.shape[:-1], columns)


@functools.lru_cache(1 << 12)
def chosen(rows: int, columns: int, width: int, processors: int) -> tuple[Form, int]:
    """The tile of few rows of K = `width`, and the number of parts that K is summed in, side by side.

    Weights are the rows of what is computed (`is_turned`): of 64 rows at least, which few tokens are not. Measured on
    an H200: tiles of 64 x 128 with as many of them under way as fit are the fastest for 1 to 128 rows. Parts pay where
    a weight has few tiles.
    """
    size = 16 if rows <= 16 else 64 if rows <= FEW else MOST
    programs = cdiv(columns, 64)
    parts = 1
    if 4 * programs <= processors:
        parts = 4
    elif 2 * programs <= processors and size == MOST:
        # A tile of so many rows takes as long to multiply as to read: idle processors are dearer.
        parts = 2
    while parts > 1 and width < parts * SHORTEST:
        parts //= 2
    stages = {16: 8 if programs * parts <= processors else 5, 64: 6, MOST: 4}[size]
    form = Form(size, 64, 128, 4, stages, is_fetched=True, is_turned=True, is_split=parts > 1)
    return form, parts
