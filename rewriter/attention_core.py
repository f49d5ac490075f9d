"""Finding attention around the operation that mixes values: softmax over keys, times values.

`find_core` starts at a region's closer, which is either scaled_dot_product_attention or the matrix product of
probabilities and values, and follows elements (not patterns) back to the q, k and v rows. So it does not matter how
heads are laid out, repeated or merged with the batch, nor which operations spell the softmax and the mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from .elements import Elements
from .formulas import Cell, Choose, Value, is_condition, number
from .graph import TOKENS, is_aten
from .indexing import Coordinates, Element, argument, arguments, broadcast, sizes_of, trace
from .integers import ZERO, Expr, Index, Quotient, compare, remainder
from .masks import shorten
from .pattern import Declined
from .scores import Axes

MAX_COLUMNS_BESIDE = 1


@dataclass(frozen=True)
class Core:
    """Attention as found: formulas of the scores, and the elements that the products are taken of.

    `score` is the value at (h, q, k), `beside` that of the one column next to the keys, if there is one. `query` and
    `key` are the elements whose product over `feature` is the cell `product`; `value` is the element that the
    probability of k is multiplied with, `value_feature` its last index.
    """

    closer: fx.Node
    axes: Axes
    score: Value
    beside: Value | None
    products: dict[str, tuple[Element, Element, Index]]
    value: Element
    value_feature: Index
    softmax: fx.Node


def find_core(closer: fx.Node) -> Core | Declined:
    """The attention that ends in `closer`, or why there is none."""
    if is_aten(closer, "scaled_dot_product_attention"):
        return _fused_core(closer)
    if is_aten(closer, "matmul", "bmm"):
        return _product_core(closer)
    return Declined("no attention: tokens are not mixed by a product with values", closer)


def _axes(closer: fx.Node) -> tuple[Axes, Coordinates] | Declined:
    """The indices of the result `[*batch, T, width]`, and the batch coordinates as functions of the head."""
    *batch, tokens, _ = sizes_of(closer)
    if tokens != TOKENS or not all(size.is_Integer for size in batch):
        return Declined(f"the result has no rows of heads: its shape is {sizes_of(closer)}", closer)
    h = Index("h", math.prod(int(size) for size in batch))
    place, stride = [], sympy.Integer(1)
    for size in reversed(batch):
        place.append(remainder(Quotient(h, stride), size) if size != 1 else ZERO)
        stride = stride * size
    return Axes(h, Index("q", TOKENS), Index("k", TOKENS)), tuple(reversed(place))


def _fused_core(closer: fx.Node) -> Core | Declined:
    found = _axes(closer)
    if isinstance(found, Declined):
        return found
    axes, batch = found
    query, key, value = arguments(closer)[:3]
    if argument(closer, 4, "dropout_p", 0.0) != 0.0:
        return Declined("attention dropout is active", closer)
    if sizes_of(key)[-2] != TOKENS:
        return Declined(f"there are {sizes_of(key)[-2]} keys for T queries", closer)
    groups = bool(argument(closer, 7, "enable_gqa", False))
    feature, value_feature = Index("d", sizes_of(query)[-1]), Index("d", sizes_of(value)[-1])
    product = Cell(sympy.Symbol(closer.name), axes.h, axes.q, axes.k)
    elements = tuple(
        (node, _row_place(node, batch, groups, closer, token, at))
        for node, token, at in (
            (query, axes.q, feature),
            (key, axes.k, feature),
            (value, axes.k, value_feature),
        )
    )
    score = _fused_score(closer, product, batch, axes)
    return Core(
        closer,
        axes,
        score,
        None,
        {closer.name: (elements[0], elements[1], feature)},
        elements[2],
        value_feature,
        closer,
    )


def _row_place(
    node: fx.Node, batch: Coordinates, groups: bool, closer: fx.Node, token: Index, at: Index
) -> Coordinates:
    """Where sdpa takes a row of q, k or v from; with `enable_gqa`, each key head serves several query heads."""
    if groups and batch:
        repeats = Quotient(sizes_of(closer)[-3], sizes_of(node)[-3])
        batch = (*batch[:-1], Quotient(batch[-1], repeats))
    return broadcast((*batch, token, at), sizes_of(node))


def _fused_score(closer: fx.Node, product: Cell, batch: Coordinates, axes: Axes) -> Value:
    mask, scale = argument(closer, 3, "attn_mask"), argument(closer, 6, "scale")
    width = sizes_of(arguments(closer)[0])[-1]
    score = product * (sympy.Float(scale) if scale is not None else 1 / sympy.sqrt(width))
    if argument(closer, 5, "is_causal", False):
        score = Choose(compare(axes.k, "<=", axes.q), score, -sympy.oo)
    if isinstance(mask, fx.Node):
        value = Elements(closer.graph).at(mask, broadcast((*batch, axes.q, axes.k), sizes_of(mask)))
        score = Choose(value, score, -sympy.oo) if is_condition(value) else score + value
    return score


def _product_core(closer: fx.Node) -> Core | Declined:
    found = _axes(closer)
    if isinstance(found, Declined):
        return found
    axes, batch = found
    weights, values = arguments(closer)[:2]
    if sizes_of(weights)[-1] != TOKENS:
        return Declined("no attention: nothing is summed over keys", closer)
    elements = Elements(closer.graph)
    place = broadcast((*batch, axes.q), (*sizes_of(weights)[:-2], TOKENS))
    softmax = _find_softmax(elements, closer, weights, (*place, axes.k), axes)
    if isinstance(softmax, Declined):
        return softmax
    value_feature = Index("d", sizes_of(values)[-1])
    value_place = (*broadcast(batch, sizes_of(values)[:-2]), axes.k, value_feature)
    score, beside, node = softmax
    return Core(
        closer,
        axes,
        score,
        beside,
        _products(closer.graph, score),
        (values, value_place),
        value_feature,
        node,
    )


Softmax = tuple[Value, Value | None, fx.Node]


def _find_softmax(
    elements: Elements, closer: fx.Node, weights: fx.Node, place: Coordinates, axes: Axes
) -> Softmax | Declined:
    """The scores of which the weight at `place` is the softmax over keys, and the node that normalises."""
    weight = number(elements.at(weights, place))
    unknown = weight.atoms(Cell)
    if len(unknown) == 1 and weight in unknown:
        node, at = _node_of(closer.graph, weight), weight.args[1:]
        if is_aten(node, "softmax", "_softmax", "_safe_softmax"):
            dim = arguments(node)[1] % len(at)
            return _columns(elements, node, arguments(node)[0], at, dim, axes)
        return Declined("no attention: the weights of the values are no softmax", node)
    exponential = [
        factor for factor in sympy.Mul.make_args(weight) if isinstance(factor, sympy.exp)
    ]
    total = [
        1 / f
        for f in sympy.Mul.make_args(weight)
        if f.is_Pow and isinstance(f.base, Cell) and f.exp == -1
    ]
    if len(exponential) == 1 and len(total) == 1 and exponential[0] / total[0] == weight:
        node = _node_of(closer.graph, total[0])
        if is_aten(node, "sum") and len(arguments(node)[1]) == 1:
            return _summed(elements, node, total[0].args[1:], exponential[0], axes)
    return Declined(f"no attention: the weights of the values are {shorten(weight)}", weights)


def _columns(
    elements: Elements, node: fx.Node, scores: fx.Node, at: Coordinates, dim: int, axes: Axes
) -> Softmax | Declined:
    """Scores of the keys and of the column beside them, from a softmax over dimension `dim` of `scores`."""
    offset = sympy.expand(at[dim] - axes.k)
    others = sizes_of(scores)[dim] - TOKENS
    if not offset.is_Integer or not others.is_Integer or offset < 0 or others < offset:
        return Declined("no attention: the softmax is not over keys", node)
    if others > MAX_COLUMNS_BESIDE:
        return Declined(f"the softmax has {others} columns beside the keys", node)

    def column(index: Expr) -> Value:
        return elements.at(scores, (*at[:dim], sympy.sympify(index), *at[dim + 1 :]))

    beside = None
    if others == 1:
        beside = column(ZERO if offset == 1 else TOKENS)
    return column(axes.k + offset), beside, node


def _summed(
    elements: Elements, node: fx.Node, at: Coordinates, exponential: Expr, axes: Axes
) -> Softmax | Declined:
    """A softmax spelled `exp(x) / exp(x).sum()`."""
    terms = arguments(node)[0]
    dim = arguments(node)[1][0] % len(sizes_of(terms))
    keeps = bool(argument(node, 2, "keepdim", False))
    place = (*at[:dim], axes.k, *at[dim + 1 if keeps else dim :])
    found = _columns(elements, node, terms, place, dim, axes)
    if isinstance(found, Declined):
        return found
    if found[0] != exponential:
        return Declined("no attention: the weights are not divided by their own sum", node)
    score, beside = (None if x is None else sympy.log(number(x)) for x in found[:2])
    return score, beside, node


def _products(graph: fx.Graph, score: Value) -> dict[str, tuple[Element, Element, Index]]:
    """For each cell of the score that is a matrix product: the elements multiplied, and the index summed over."""
    found = {}
    for cell in score.atoms(Cell):
        node = _node_of(graph, cell)
        if not is_aten(node, "matmul", "bmm", "baddbmm"):
            continue
        left, right = arguments(node)[1:3] if is_aten(node, "baddbmm") else arguments(node)[:2]
        *batch, row, column = cell.args[1:]
        feature = Index("d", sizes_of(left)[-1])
        one = (left, (*broadcast(tuple(batch), sizes_of(left)[:-2]), row, feature))
        two = (right, (*broadcast(tuple(batch), sizes_of(right)[:-2]), feature, column))
        found[node.name] = (one, two, feature)
    return found


def _node_of(graph: fx.Graph, cell: Expr) -> fx.Node:
    """The node that a cell is an element of."""
    return next(node for node in graph.nodes if node.name == cell.args[0].name)


# ---- the rows


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
