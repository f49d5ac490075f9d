"""Which tile a product on the GPU takes, by its sizes alone, and into how many parts its sum over K is cut.

Tiles of 64 and of 256 rows, of rows and of columns round alike on the cards this was written for: every form of a
weight gives the same bits. That is a property of the card, and is measured (`triton_places`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from regraft.kernels.whole import cdiv

PART = 128
"""Parts of K are multiples of this, of which every tile takes a divisor at a time: they are the same for all tiles."""

SHORTEST = 512
"""A part of K shorter than this does not pay for adding it."""

_ROWS = [1 << i for i in range(16)]
"""Numbers of rows by which every form of a weight is met."""


@dataclass(frozen=True)
class Form:
    """A tile of M rows, N columns and K at a time, and how it is made.

    is_split: the parts of K are taken side by side. is_fetched: tiles come by tensor descriptors, which the card's copy
    engine serves. is_turned: rows are columns of what is computed, weight @ rows^T: a wide product has 64 rows at
    least, and few rows then waste nothing.
    """

    M: int
    N: int
    K: int
    num_warps: int
    num_stages: int
    is_fetched: bool = False
    is_turned: bool = False
    is_split: bool = False


_NARROW = Form(32, 64, 32, 4, 2)
_LOADED = Form(64, 128, 64, 4, 4), Form(128, 128, 64, 8, 3)
# Measured on an H200 for weights of 1,024 to 24,576 columns: as fast as cuBLAS up to 64 rows, 0.9 to 1.1 times as fast
# at 128, 0.9 to 1 at 2,048.
_FEW = Form(16, 64, 128, 4, 8, is_fetched=True, is_turned=True)
_FEW_SHARING = replace(_FEW, num_stages=5)  # two programs fit on a multiprocessor
_SOME = Form(64, 64, 128, 4, 6, is_fetched=True)
_MORE = Form(64, 128, 64, 4, 8, is_fetched=True)
_MANY = Form(128, 128, 64, 8, 3, is_fetched=True)
_MOST = Form(256, 128, 64, 8, 3, is_fetched=True)


def num_parts(columns: int, width: int, processors: int) -> int:
    """Into how many parts K is cut: a matter of the weight and the card, never of the rows.

    Two where a decode step would otherwise leave three quarters of the card idle.
    """
    is_small = cdiv(columns, _FEW.N) <= processors // 4
    return 2 if is_small and width >= 2 * SHORTEST else 1


def chosen(
    rows: int, columns: int, dtype: torch.dtype, parts: int, processors: int, is_fetched: bool
) -> Form:
    """The form for so many rows. `is_fetched`: the operands can be described to the copy engine."""

    def programs(form: Form) -> int:
        return cdiv(rows, form.M) * cdiv(columns, form.N)

    if dtype.itemsize > 2:
        form = _NARROW
    elif not is_fetched:
        form = _LOADED[rows > _LOADED[0].M]
    elif rows <= _FEW.M:
        form = _FEW if programs(_FEW) <= processors else _FEW_SHARING
    elif rows <= _SOME.M or programs(_SOME) <= processors:
        form = _SOME
    elif rows < 512 and programs(_MORE) <= 4 * processors:
        form = _MORE
    else:
        # Two parts need two accumulators, for which the largest tile has no registers left.
        form = _MOST if rows >= 512 and parts == 1 else _MANY
    return replace(form, is_split=parts > 1 and programs(form) < processors)


def forms(
    columns: int, dtype: torch.dtype, parts: int, processors: int, is_fetched: bool
) -> list[Form]:
    """All forms that a product with so many columns may take: they must not differ in a bit."""
    found = [chosen(rows, columns, dtype, parts, processors, is_fetched) for rows in _ROWS]
    return list(dict.fromkeys(found))
