"""Tensors of rows: where the q, k and v of an attention lie as [tokens, heads, width], before heads are repeated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from .elements import Elements
from .graph import TOKENS
from .indexing import Coordinates, Element, sizes_of, trace
from .integers import ZERO, Expr, Index, Quotient


@dataclass(frozen=True)
class Rows:
    """A node that holds `[T, heads, width]` in some order of dimensions, and which head a query head reads.

    `heads_dim` is None where there is one head without a dimension of its own. `head` is a formula in the index of
    the query head. Of the heads along `heads_dim` each `stride`-th is meant. All other dimensions have size 1.
    """

    node: fx.Node
    token_dim: int
    heads_dim: int | None
    feature_dim: int
    heads: int
    width: int
    head: Expr
    stride: int = 1

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["dtype"]


def find_rows(element: Element, token: Index, feature: Index, h: Index) -> list[Rows]:
    """The tensors of rows that an element is moved from, the one used last (maybe with repeated heads) first."""
    found = (_rows_of(node, place, token, feature, h) for node, place in trace(*element))
    return [rows for rows in found if rows is not None]


def _rows_of(
    node: fx.Node, place: Coordinates, token: Index, feature: Index, h: Index
) -> Rows | None:
    token_dims = [dim for dim, at in enumerate(place) if at == token]
    feature_dims = [dim for dim, at in enumerate(place) if at == feature]
    sizes = sizes_of(node)
    others = [d for d, size in enumerate(sizes) if d not in token_dims + feature_dims and size != 1]
    if len(token_dims) != 1 or len(feature_dims) > 1 or len(others) > 1:
        return None
    if not feature_dims or sizes[feature_dims[0]] != feature.size or sizes[token_dims[0]] != TOKENS:
        return None
    head = place[others[0]] if others else ZERO
    if head.free_symbols - {h} or not (others == [] or sizes[others[0]].is_Integer):
        return None
    return Rows(
        node,
        token_dims[0],
        others[0] if others else None,
        feature_dims[0],
        int(sizes[others[0]]) if others else 1,
        int(feature.size),
        head,
    )


def without_repeats(rows: Rows, token: Index, feature: Index, h: Index) -> Rows:
    """The same rows with one of each group of equal heads, where heads were repeated before the rows were computed.

    Neighbouring heads are equal if the formula of an element names the head only as `floor(h / n)`.
    """
    if rows.heads_dim is None or rows.head != h:
        return rows
    place = [ZERO] * len(sizes_of(rows.node))
    place[rows.token_dim], place[rows.heads_dim], place[rows.feature_dim] = token, h, feature
    formula = Elements(rows.node.graph).at(rows.node, tuple(place))
    groups = [q for q in formula.atoms(Quotient) if q.args[0] == h and q.args[1].is_Integer]
    if not groups:
        return rows
    group = min(groups, key=lambda q: int(q.args[1]))
    repeats, left = int(group.args[1]), formula.xreplace(dict.fromkeys(groups, ZERO))
    if left.has(h) or rows.heads % repeats or any(int(g.args[1]) % repeats for g in groups):
        return rows
    return replace(rows, heads=rows.heads // repeats, head=group, stride=repeats)
