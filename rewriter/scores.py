"""What goes into a softmax over keys, taken apart: product, scale, softcap, mask, bias by distance, sink.

The score of query q and key k in head h is one formula (rewriter/elements.py). Softmax ignores whatever is the same for
all keys, so such terms are dropped; if there is a column beside the keys (a sink), they are taken off it instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy

from .distance_bias import DistanceBias, read_distance_bias
from .formulas import Cell, Value, cases, in_one_request, number
from .integers import ZERO, Condition, Expr, Index, is_nonnegative
from .masks import Relation, is_possible, read_relation, shorten
from .pattern import Declined

MASKED = -1e30
"""A finite score at or below this one has probability 0 in every floating-point format."""


@dataclass(frozen=True)
class Axes:
    """The indices of a score: query head, query token and key token (both in 0..T-1)."""

    h: Index
    q: Index
    k: Index


@dataclass(frozen=True)
class Score:
    """`scale * product` (or `softcap * tanh(scale * product / softcap)`) plus a bias, where `relation` holds.

    `product` is the cell of a matrix product of q and k. The bias is `slope * k`, or `by_distance`: an
    entry per query, head and distance q - k, 0 beyond the last distance. `sink` is the score
    of one more column that has no value. `slope` is a formula in the head index, `sink` one in those of head and query.
    """

    relation: Relation
    product: Cell
    scale: float
    softcap: float = 0.0
    slope: Expr | None = None
    by_distance: DistanceBias | None = None
    sink: Expr | None = None

    def __str__(self) -> str:
        parts = [str(self.relation)]
        if self.slope is not None:
            parts.append("+ slope[h]*k")
        if self.by_distance is not None:
            parts.append("+ bias[q, h, q - k]")
        if self.softcap:
            parts.append(f"softcap {self.softcap:g}")
        if self.sink is not None:
            of_query = any(isinstance(s, Index) and s.name == "q" for s in self.sink.free_symbols)
            parts.append("sink[q, h]" if of_query else "sink[h]")
        return "; ".join(parts)


def read_score(
    score: Value,
    beside: Value | None,
    axes: Axes,
    is_product: Callable[[Cell], bool],
    masked: float = MASKED,
) -> Score | Declined:
    """Take apart the score of (h, q, k), and `beside`, the score of the one column that is no key.

    `is_product` says which cells are matrix products. Scores at or below `masked` count as minus infinity.
    """
    leaves = cases(_above(in_one_request(number(score)), masked))
    open_leaves = [
        (when, leaf)
        for when, leaf in leaves
        if not is_masked(leaf, masked) and is_possible(when, axes.q, axes.k)
    ]
    relation = read_relation(sympy.Or(*(when for when, _ in open_leaves)), axes.q, axes.k)
    if isinstance(relation, Declined):
        return relation
    parts = [_split(when, _causal(leaf, axes), axes, is_product) for when, leaf in open_leaves]
    if len({(part.core, part.same_for_all) for part in parts}) > 1:
        formulas = sorted({shorten(leaf) for _, leaf in open_leaves})
        return Declined(
            f"the score has {len(formulas)} formulas: {'; '.join(formulas)}",
            fix="all heads and positions shared one formula",
        )
    core = _read_product(parts[0].core, is_product)
    if isinstance(core, Declined):
        return core
    bias = _read_bias(parts, axes)
    if isinstance(bias, Declined):
        return bias
    sink = None if beside is None else _read_sink(beside, parts[0].same_for_all, axes, masked)
    if isinstance(sink, Declined):
        return sink
    return Score(relation, *core, *bias, sink)


@dataclass(frozen=True)
class _Parts:
    """The terms of one formula of the score, and the condition under which it is the score."""

    when: Condition
    core: Expr
    bias: Expr
    same_for_all: Expr


def _split(
    when: Condition, formula: Expr, axes: Axes, is_product: Callable[[Cell], bool]
) -> _Parts:
    terms = sympy.Add.make_args(formula)
    core = [term for term in terms if any(is_product(cell) for cell in term.atoms(Cell))]
    bias = [term for term in terms if term not in core and term.has(axes.k)]
    same_for_all = [term for term in terms if term not in core and not term.has(axes.k)]
    return _Parts(when, *(sympy.Add(*part) for part in (core, bias, same_for_all)))


def _read_bias(
    parts: list[_Parts], axes: Axes
) -> tuple[Expr | None, DistanceBias | None] | Declined:
    """(slope, bias by distance): what is added to the product."""
    biases = {part.bias for part in parts}
    if biases == {ZERO}:
        return None, None
    if any(cell.has(axes.k) for bias in biases for cell in bias.atoms(Cell)):
        found = read_distance_bias([(part.when, part.bias) for part in parts], axes.q, axes.k)
        return found if isinstance(found, Declined) else (None, found)
    if len(biases) > 1:
        return Declined(
            f"the score has {len(biases)} biases: {shorten(biases)}", fix="one bias were added"
        )
    slope = _read_slope(biases.pop(), axes)
    return slope if isinstance(slope, Declined) else (slope, None)


def _above(score: Expr, masked: float) -> Expr:
    """The score without a lower limit that only masked scores are below."""
    limits = {
        m: sympy.Max(*(a for a in m.args if not (a.is_number and a <= masked)))
        for m in score.atoms(sympy.Max)
        if any(not a.is_number for a in m.args)
    }
    return score.xreplace(limits)


def is_masked(leaf: Expr, masked: float = MASKED) -> bool:
    """Whether a score without `Choose` is at or below `masked`."""
    offset = sympy.expand(leaf).as_coeff_Add()[0]
    return leaf == -sympy.oo or offset == -sympy.oo or bool(offset <= masked)


def _causal(formula: Expr, axes: Axes) -> Expr:
    """The formula where k <= q: distances need no absolute value there."""
    later = {axes.q: axes.k + Index("behind", axes.q.size)}
    known = {}
    for distance in formula.atoms(sympy.Abs):
        inner = distance.args[0]
        if is_nonnegative(sympy.expand(inner.xreplace(later))):
            known[distance] = inner
        elif is_nonnegative(sympy.expand(-inner.xreplace(later))):
            known[distance] = -inner
    return sympy.expand(formula.xreplace(known))


def _read_product(
    core: Expr, is_product: Callable[[Cell], bool]
) -> tuple[Cell, float, float] | Declined:
    """The product's cell, the scale and the softcap of `scale * cell` or `softcap * tanh(scale / softcap * cell)`."""
    cells = core.atoms(Cell)
    products = [cell for cell in cells if is_product(cell)]
    if len(products) != 1:
        return Declined(
            f"the score is made of {len(products)} products of q and k: {shorten(core)}"
        )
    (product,) = products
    scale, softcap = core.coeff(product), 0.0
    capped = [factor for factor in sympy.Mul.make_args(core) if isinstance(factor, sympy.tanh)]
    if len(capped) == 1:
        cap = core / capped[0]
        scale = sympy.expand(capped[0].args[0]).coeff(product) * cap
        rebuilt = cap * sympy.tanh(scale / cap * product)
        softcap = float(abs(cap)) if cap.is_number else 0.0
    else:
        rebuilt = scale * product
    same = sympy.expand(core - rebuilt)
    if not scale.is_number:
        return Declined(
            f"the scale of the scores is no constant: {shorten(core)}",
            fix="the product were scaled by a number; one for each query belongs into q",
        )
    if same != 0 and not _same_function(core, rebuilt, product):
        return Declined(
            f"the score is no known function of the product of q and k: {shorten(core)}"
        )
    return product, float(scale), softcap


def _same_function(core: Expr, rebuilt: Expr, product: Cell) -> bool:
    """Equal but for the rounding of their constants."""
    if core.free_symbols - product.free_symbols or (core.atoms(Cell) - {product}):
        return False
    x = sympy.Dummy(real=True)
    one, two = (e.xreplace({product: x}) for e in (core, rebuilt))
    if one.free_symbols - {x}:
        return False
    probes = (-7.0, -0.3, 0.0, 0.5, 11.0)
    return all(
        abs(one.subs(x, p) - two.subs(x, p)) <= 1e-12 * (1 + abs(two.subs(x, p))) for p in probes
    )


def _read_slope(bias: Expr, axes: Axes) -> Expr | Declined:
    """The slope of a bias that grows evenly with the key's index."""
    slope = bias.coeff(axes.k)
    rest = sympy.expand(bias - slope * axes.k)
    if rest != 0 or slope.free_symbols - _names(slope) - {axes.h}:
        return Declined(
            f"the score has a further term: {shorten(bias)}",
            fix="what is added to the product were a slope or a table by distance",
        )
    return slope


def _read_sink(
    beside: Value, same_for_all: Expr, axes: Axes, masked: float
) -> Expr | Declined | None:
    value = sympy.expand(in_one_request(number(beside)))
    if is_masked(value, masked):
        return None
    value = sympy.expand(value - same_for_all)
    if value.free_symbols - _names(value) - {axes.h, axes.q}:
        return Declined(
            f"the column beside the keys depends on the key: {shorten(value)}",
            fix="the column were one number per head, or per token and head",
        )
    return value


def _names(value: Expr) -> set[sympy.Symbol]:
    """The symbols in a formula that are only names of nodes."""
    return {cell.args[0] for cell in value.atoms(Cell)}
