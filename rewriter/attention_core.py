"""Finding attention around the operation that mixes values: softmax over keys, times values.

`find_core` starts at a region's closer, which is either scaled_dot_product_attention or the matrix product of
probabilities and values, and follows elements (not patterns) back to the q, k and v rows. So it does not matter how
heads are laid out, repeated or merged with the batch, nor which operations spell the softmax and the mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import sympy
from torch import fx

from .elements import Elements
from .formulas import Cell, Choose, Value, is_condition, number
from .graph import TOKENS, is_aten
from .indexing import Coordinates, Element, argument, arguments, broadcast, sizes_of
from .integers import ONE, ZERO, Expr, Index, Quotient, compare, remainder
from .masks import shorten
from .pattern import Declined
from .products import Product, is_product, multiplied, own_dims
from .scores import Axes

MAX_COLUMNS_BESIDE = 1


@dataclass(frozen=True)
class Layout:
    """The dimensions of the closer's result: one of tokens, one of the values' width, the others are heads."""

    token_dim: int
    width_dim: int
    head_dims: tuple[int, ...]
    head_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Core:
    """Attention as found: formulas of the scores, and the elements that the products are taken of.

    `score` is the value at (h, q, k), `beside` that of the one column next to the keys, if there is one. `products`
    gives for the name of each product in the score the elements that it multiplies. `value` is the element that the
    probability of k is multiplied with, `value_feature` the index of its width.
    """

    closer: fx.Node
    layout: Layout
    axes: Axes
    score: Value
    beside: Value | None
    products: dict[str, Product]
    value: Element
    value_feature: Index
    softmax: fx.Node


@dataclass(frozen=True)
class Keys:
    """Some of the `total` keys that a softmax is over: the `count` keys from number `first` on."""

    first: Expr
    count: Expr
    total: Expr


TOKENS_ALONE = Keys(ZERO, TOKENS, TOKENS)


def find_core(closer: fx.Node, keys: Keys = TOKENS_ALONE) -> Core | Declined:
    """The attention that ends in `closer`, or why there is none.

    What is found is said of `keys`, by default each token's: `axes.k` counts them.
    """
    if is_aten(closer, "scaled_dot_product_attention") and keys == TOKENS_ALONE:
        return _fused_core(closer)
    if is_product(closer) and not is_aten(closer, "baddbmm"):
        return _product_core(closer, keys)
    return Declined("no attention: tokens are not mixed by a product with values", closer)


Frame = tuple[Layout, Axes, Index, Coordinates]


def _frame(
    closer: fx.Node, token_dim: int, width_dim: int, keys: Keys = TOKENS_ALONE
) -> Frame | Declined:
    """The layout of the result, the indices, and the result's coordinates as functions of them."""
    sizes = sizes_of(closer)
    head_dims = tuple(dim for dim in range(len(sizes)) if dim not in (token_dim, width_dim))
    if sizes[token_dim] != TOKENS or not all(sizes[d].is_Integer for d in (*head_dims, width_dim)):
        return Declined(f"the result has no rows of heads: its shape is {sizes}", closer)
    layout = Layout(token_dim, width_dim, head_dims, tuple(int(sizes[dim]) for dim in head_dims))
    axes = Axes(
        Index("h", math.prod(layout.head_sizes)), Index("q", TOKENS), Index("k", keys.count)
    )
    feature = Index("d", sizes[width_dim])
    place: list[Expr] = [ZERO] * len(sizes)
    place[token_dim], place[width_dim] = axes.q, feature
    stride = ONE
    for dim in reversed(head_dims):
        if sizes[dim] != 1:
            place[dim] = remainder(Quotient(axes.h, stride), sizes[dim])
            stride = stride * sizes[dim]
    return layout, axes, feature, tuple(place)


def _fused_core(closer: fx.Node) -> Core | Declined:
    rank = len(sizes_of(closer))
    found = _frame(closer, rank - 2, rank - 1)
    if isinstance(found, Declined):
        return found
    layout, axes, value_feature, (*batch, _, _) = found
    query, key, value = arguments(closer)[:3]
    if argument(closer, 4, "dropout_p", 0.0) != 0.0:
        return Declined("attention dropout is active", closer)
    if sizes_of(key)[-2] != TOKENS:
        return Declined(f"there are {sizes_of(key)[-2]} keys for T queries", closer)
    feature = Index("d", sizes_of(query)[-1])
    rows = ((query, axes.q, feature), (key, axes.k, feature), (value, axes.k, value_feature))
    q, k, v = ((node, _row_place(node, tuple(batch), closer, *at)) for node, *at in rows)
    product = Cell(sympy.Symbol(closer.name), axes.h, axes.q, axes.k)
    score = _fused_score(closer, product, tuple(batch), axes)
    products = {closer.name: (q, k, feature)}
    return Core(closer, layout, axes, score, None, products, v, value_feature, closer)


def _row_place(
    node: fx.Node, batch: Coordinates, closer: fx.Node, token: Index, at: Index
) -> Coordinates:
    """Where sdpa takes a row of q, k or v from; with `enable_gqa`, each key head serves several query heads."""
    if batch and argument(closer, 7, "enable_gqa", False):
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


def _product_core(closer: fx.Node, keys: Keys) -> Core | Declined:
    of_weights, of_values = own_dims(closer)
    if not any(sizes_of(closer)[dim] == TOKENS for dim in of_weights):
        of_weights, of_values = of_values, of_weights
    token_dims = [dim for dim in of_weights if sizes_of(closer)[dim] == TOKENS]
    if len(token_dims) != 1 or len(of_values) != 1:
        return Declined("no attention: one dimension of queries and one of values expected", closer)
    found = _frame(closer, token_dims[0], of_values[0], keys)
    if isinstance(found, Declined):
        return found
    layout, axes, value_feature, place = found
    product = multiplied(closer, place, "k")
    if product is None or product[2].size != keys.total:
        return Declined("no attention: nothing is summed over keys", closer)
    key = {product[2]: keys.first + axes.k}
    elements = [(node, tuple(c.xreplace(key) for c in at)) for node, at in product[:2]]
    weights, values = sorted(elements, key=lambda element: axes.q not in element[1])
    softmax = _find_softmax(Elements(closer.graph), closer, *weights, axes, keys)
    if isinstance(softmax, Declined):
        return softmax
    score, beside, node = softmax
    products = _products(closer.graph, score, axes)
    return Core(closer, layout, axes, score, beside, products, values, value_feature, node)


Softmax = tuple[Value, Value | None, fx.Node]


def _find_softmax(
    elements: Elements,
    closer: fx.Node,
    weights: fx.Node,
    place: Coordinates,
    axes: Axes,
    keys: Keys,
) -> Softmax | Declined:
    """The scores of which the weight at `place` is the softmax over keys, and the node that normalises."""
    weight = number(elements.at(weights, place))
    unknown = weight.atoms(Cell)
    if len(unknown) == 1 and weight in unknown:
        node, at = _node_of(closer.graph, weight), weight.args[1:]
        if is_aten(node, "softmax", "_softmax", "_safe_softmax"):
            dim = arguments(node)[1] % len(at)
            return _columns(elements, node, arguments(node)[0], at, dim, axes, keys)
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
            return _summed(elements, node, total[0].args[1:], exponential[0], axes, keys)
    return Declined(f"no attention: the weights of the values are {shorten(weight)}", weights)


def _columns(
    elements: Elements, node: fx.Node, scores: fx.Node, at: Coordinates, dim: int, axes: Axes, keys: Keys
) -> Softmax | Declined:  # fmt: skip
    """Scores of the keys and of the column beside them, from a softmax over dimension `dim` of `scores`."""
    offset = sympy.expand(at[dim] - keys.first - axes.k)
    others = sizes_of(scores)[dim] - keys.total
    if not offset.is_Integer or not others.is_Integer or offset < 0 or others < offset:
        return Declined("no attention: the softmax is not over keys", node)
    if others > MAX_COLUMNS_BESIDE:
        return Declined(f"the softmax has {others} columns beside the keys", node)

    def column(index: Expr) -> Value:
        return elements.at(scores, (*at[:dim], sympy.sympify(index), *at[dim + 1 :]))

    beside = None
    if others == 1:
        beside = column(ZERO if offset == 1 else keys.total)
    return column(keys.first + axes.k + offset), beside, node


def _summed(
    elements: Elements, node: fx.Node, at: Coordinates, exponential: Expr, axes: Axes, keys: Keys
) -> Softmax | Declined:
    """A softmax spelled `exp(x) / exp(x).sum()`."""
    terms = arguments(node)[0]
    dim = arguments(node)[1][0] % len(sizes_of(terms))
    keeps = bool(argument(node, 2, "keepdim", False))
    place = (*at[:dim], keys.first + axes.k, *at[dim + 1 if keeps else dim :])
    found = _columns(elements, node, terms, place, dim, axes, keys)
    if isinstance(found, Declined):
        return found
    if found[0] != exponential:
        return Declined("no attention: the weights are not divided by their own sum", node)
    score, beside = (None if x is None else sympy.log(number(x)) for x in found[:2])
    return score, beside, node


def _products(graph: fx.Graph, score: Value, axes: Axes) -> dict[str, Product]:
    """For each cell of the score that is a product of queries and keys: its elements, and the index summed over."""
    found = {}
    for cell in score.atoms(Cell):
        node = _node_of(graph, cell)
        product = multiplied(node, cell.args[1:], "d")
        if product is not None and {_sides(element, axes) for element in product[:2]} == {"q", "k"}:
            found[node.name] = product
    return found


def _sides(element: Element, axes: Axes) -> str:
    """Which of the tokens an element depends on."""
    symbols = set().union(*(at.free_symbols for at in element[1]))
    return "".join(side for side, at in (("q", axes.q), ("k", axes.k)) if at in symbols)


def _node_of(graph: fx.Graph, cell: Expr) -> fx.Node:
    """The node that a cell is an element of."""
    return next(node for node in graph.nodes if node.name == cell.args[0].name)
