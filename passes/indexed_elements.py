"""Formulas of elements where keys are pooled: what rewriter/elements.py reads, and the few operations that pools take.

Counting and compacting by truth values is read only where it is plain what comes out: the rows that a mask keeps are
known if it keeps a beginning, a sum of `k <= q` over all k is q + 1. A top-k's choice is the unknown `pool`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import sympy
import torch
from sympy.core.relational import Relational
from torch import fx

from regraft.rewriter.element_rules import OpaqueError
from regraft.rewriter.elements import Elements
from regraft.rewriter.formulas import Choose, Value, condition, is_condition, number
from regraft.rewriter.graph import TOKENS, is_aten
from regraft.rewriter.indexing import Coordinates, Element, argument, arguments, sizes_of
from regraft.rewriter.integers import ZERO, Condition, Expr, Index, compare

MAX_ENTRIES = 64


def counter(name: str) -> sympy.Symbol:
    """An integer from 0 on, without a limit."""
    return sympy.Symbol(name, integer=True, nonnegative=True)


def decide(value: Value, known: Mapping[Expr, Expr]) -> Value:
    """The formula with every comparison, maximum and minimum decided that ranges decide once `known` is put in."""
    while True:
        decided = {}
        for relation in value.atoms(Relational):
            outcome = compare(
                relation.lhs.xreplace(known), relation.rel_op, relation.rhs.xreplace(known)
            )
            if outcome in (sympy.true, sympy.false):
                decided[relation] = outcome
        for extremum in value.atoms(sympy.Max, sympy.Min):
            for winner in extremum.args:
                others = [arg for arg in extremum.args if arg != winner]
                if all(_wins(extremum, winner, other, known) for other in others):
                    decided[extremum] = winner
        if not decided:
            return sympy.expand(value) if not is_condition(value) else value
        value = value.xreplace(decided)


def _wins(extremum: Expr, winner: Expr, other: Expr, known: Mapping[Expr, Expr]) -> bool:
    relation = ">=" if isinstance(extremum, sympy.Max) else "<="
    return compare(winner.xreplace(known), relation, other.xreplace(known)) == sympy.true


class PoolElements(Elements):
    """`rank` is the coordinate of a top-k's choice, `pool` stands for the choice. `opaque` is read no further.

    `known` is what holds for every row that a mask keeps, as something to put in for TOKENS; `topks` were met.
    """

    def __init__(
        self,
        graph: fx.Graph,
        rank: Expr | None = None,
        pool: Expr | None = None,
        opaque: fx.Node | None = None,
    ) -> None:
        self._known: dict[tuple[str, Coordinates], Value] = {}
        self._rank, self._pool, self._opaque = rank, pool, opaque
        self.known: dict[Expr, Expr] = {}
        self.topks: set[fx.Node] = set()

    def _read(self, node: fx.Node, coordinates: Coordinates) -> Value:
        if node is self._opaque:
            return self.cell(node, coordinates)
        if _is_choice(node) and coordinates[-1] == self._rank and self._pool is not None:
            self.topks.add(node.args[0])
            return self._pool
        try:
            if is_aten(node, "any", "all"):
                return self._reduced(node, coordinates)
            if is_aten(node, "argmax"):
                return self._first_of_equals(node, coordinates)
            if is_aten(node, "sum"):
                return self._counted(node, coordinates)
            kept = self.compacted(node, coordinates)
        except OpaqueError:
            return self.cell(node, coordinates)
        if kept[0] is not node:
            return decide(self.at(*kept), self.known)
        return super()._read(node, coordinates)

    def compacted(self, node: fx.Node, coordinates: Coordinates) -> Element:
        """Where `x[..., mask, ...]` takes an element from, if the mask keeps a beginning; else the element itself."""
        if not is_aten(node, "index"):
            return node, coordinates
        source, indices = arguments(node)
        taken = [dim for dim, index in enumerate(indices) if index is not None]
        if len(taken) != 1 or indices[taken[0]].meta["dtype"] != torch.bool:
            return node, coordinates
        (dim,) = taken
        mask = indices[dim]
        if len(sizes_of(mask)) != 1:
            raise OpaqueError
        at = coordinates[dim]
        if at != self._pool:
            raise OpaqueError
        known = {TOKENS: _last_kept(condition(self.at(mask, (at,))), at) + 1 + counter("z")}
        if self.known not in ({}, known):
            raise OpaqueError
        self.known = known
        return source, coordinates

    def _reduced(self, node: fx.Node, coordinates: Coordinates) -> Value:
        """any and all along one dimension."""
        combine = sympy.Or if is_aten(node, "any") else sympy.And
        source, place, dim = _before(node, coordinates)
        size = sizes_of(source)[dim]
        if size.is_Integer and size <= MAX_ENTRIES:
            entries = [place(sympy.Integer(i)) for i in range(int(size))]
            return combine(*(condition(self.at(source, entry)) for entry in entries))
        each = Index("each", size)
        value = condition(self.at(source, place(each)))
        if value.has(each):
            raise OpaqueError
        return value

    def _first_of_equals(self, node: fx.Node, coordinates: Coordinates) -> Value:
        source, place, dim = _before(node, coordinates)
        each = Index("each", sizes_of(source)[dim])
        if not number(self.at(source, place(each))).is_number:
            raise OpaqueError
        return ZERO

    def _counted(self, node: fx.Node, coordinates: Coordinates) -> Value:
        """How many keys a query sees: the sum of `k <= q`."""
        if node.meta["dtype"].is_floating_point:
            raise OpaqueError
        source, place, dim = _before(node, coordinates)
        each = Index("each", sizes_of(source)[dim])
        value = number(self.at(source, place(each)))
        queries = [at for at in coordinates if isinstance(at, Index) and at.size == each.size]
        for query in queries:
            if value == Choose(compare(each, "<=", query), sympy.Integer(1), ZERO):
                return query + 1
        raise OpaqueError


def _is_choice(node: fx.Node) -> bool:
    if node.target is not operator.getitem:
        return False
    source, number_of_result = node.args
    return isinstance(source, fx.Node) and is_aten(source, "topk") and number_of_result == 1


def _before(
    node: fx.Node, coordinates: Coordinates
) -> tuple[fx.Node, Callable[[Expr], Coordinates], int]:
    """(the reduced tensor, its coordinates as a function of the one summed over, that dimension)."""
    source, dims = arguments(node)[0], argument(node, 1, "dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, (list, tuple)) or len(dims) != 1:
        raise OpaqueError
    dim = dims[0] % len(sizes_of(source))
    keeps = bool(argument(node, 2, "keepdim", False))
    before, after = coordinates[:dim], coordinates[dim + 1 if keeps else dim :]
    return source, lambda at: (*before, at, *after), dim


def _last_kept(kept: Condition, at: Expr) -> Expr:
    """b where a mask keeps `at` exactly if all of `a*at + b_i < TOKENS`; b is the largest. Raises OpaqueError."""
    limits = []
    for part in sympy.And.make_args(kept):
        if not isinstance(part, sympy.StrictLessThan) or part.rhs != TOKENS:
            raise OpaqueError
        limits.append(sympy.expand(part.lhs))
    slopes = {limit.coeff(at) for limit in limits}
    rests = [sympy.expand(limit - limit.coeff(at) * at) for limit in limits]
    if len(slopes) != 1 or not all(slope.is_Integer and slope > 0 for slope in slopes):
        raise OpaqueError
    if not all(rest.is_Integer for rest in rests):
        raise OpaqueError
    return slopes.pop() * at + max(rests)
