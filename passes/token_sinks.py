"""A sink that differs from token to token: the column beside the keys holds s[q, h].

    before   softmax(cat([scale * q . k, s]))
    after    the same with cat([q, -s/scale]), cat([k, 1]) and a sink of 0

Softmax does not change when every column is lowered by s: the sink becomes 0, and the keys' scores are lowered by one
more feature, which is 1 in every key. Not with a softcap, which would bend the feature too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from regraft.rewriter.attention_rows import Rows, find_rows
from regraft.rewriter.formulas import Cell
from regraft.rewriter.graph import TOKENS, shape_of
from regraft.rewriter.integers import Expr, Index
from regraft.rewriter.masks import shorten
from regraft.rewriter.pattern import Declined, Grafting
from regraft.rewriter.scores import Axes

aten = torch.ops.aten


@dataclass(frozen=True)
class TokenSinks:
    """`factor` times the rows [T, heads]."""

    rows: Rows
    factor: float


def find_token_sinks(
    value: Expr | None, softcap: float, axes: Axes, graph: fx.Graph
) -> TokenSinks | Declined | None:
    """The sink as rows, where it depends on the query; None where it does not."""
    if value is None or axes.q not in value.free_symbols:
        return None
    cells = value.atoms(Cell)
    cell = next(iter(cells), None)
    factor: Expr = sympy.Integer(0) if cell is None else value.coeff(cell)
    if cell is None or not factor.is_number or factor * cell != value:
        return Declined(f"the column beside the keys is no row's value: {shorten(value)}")
    if softcap:
        return Declined("a sink of each token beside scores with a softcap")
    node = next(n for n in graph.nodes if n.name == cell.args[0].name)
    found = find_rows((node, cell.args[1:]), axes.q, axes.h, Index("one", 1))
    rows = [r for r in found if r.heads == 1]
    if not rows:
        return Declined("the sinks are not laid out as one number per token and head", node)
    return TokenSinks(rows[-1], float(factor))


def with_feature(rows: Rows) -> Rows:
    """The same rows one feature wider."""
    return replace(rows, width=rows.width + 1)


def lower_scores(
    sinks: TokenSinks, scale: float, values: fx.Node, q: fx.Node, k: fx.Node, grafting: Grafting
) -> tuple[fx.Node, fx.Node]:
    """q [T, H, D] and k [T, Hk, D], each with the feature. `values` are the sinks' rows as [T, 1, H]."""
    dtype: torch.dtype = q.meta["dtype"]
    heads, width = shape_of(q)[1:]
    assert isinstance(width, int)
    shape = (TOKENS, heads, 1)
    feature = grafting.call(
        aten.permute.default, values, [0, 2, 1], shape=shape, dtype=sinks.rows.dtype
    )
    factor = -sinks.factor / scale
    feature = grafting.call(aten.mul.Scalar, feature, factor, shape=shape, dtype=sinks.rows.dtype)
    if sinks.rows.dtype != dtype:
        feature = grafting.call(aten._to_copy.default, feature, shape=shape, dtype=dtype)
        feature.kwargs = {"dtype": dtype}
    q = grafting.call(
        aten.cat.default, [q, feature], 2, shape=(TOKENS, heads, width + 1), dtype=dtype
    )
    kv_heads = shape_of(k)[1]
    one = grafting.call(aten.slice.Tensor, k, 2, 0, 1, shape=(TOKENS, kv_heads, 1), dtype=dtype)
    one = grafting.call(aten.ones_like.default, one, shape=(TOKENS, kv_heads, 1), dtype=dtype)
    k = grafting.call(
        aten.cat.default, [k, one], 2, shape=(TOKENS, kv_heads, width + 1), dtype=dtype
    )
    return q, k
