"""Biases looked up by distance: one number per query, head and q - k, up to some distance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from .formulas import Cell
from .integers import Condition, Expr, Index, decide_extrema
from .masks import distances, shorten
from .pattern import Declined


@dataclass(frozen=True)
class DistanceBias:
    """`factor * cell`: the cell has the Index "distance" where it is looked up, `factor` is a formula in the query."""

    cell: Cell
    factor: Expr


def read_distance_bias(
    biases: Sequence[tuple[Condition, Expr]], q: Index, k: Index
) -> DistanceBias | Declined:
    """The bias as an entry for q - k where that is below some limit, if it is 0 from there on.

    `biases` are the formulas of the bias and the conditions under which each holds.
    """
    found = [(when, bias) for when, bias in biases if bias != 0]
    cells = {cell for _, bias in found for cell in bias.atoms(Cell) if cell.has(k)}
    if len(found) != 1 or len(cells) != 1:
        return _further(found)
    (when, bias), cell = found[0], cells.pop()
    factor = bias.coeff(cell)
    if sympy.expand(bias - factor * cell) != 0 or factor.free_symbols - {q} or factor.atoms(Cell):
        return _further(found)
    near = distances(when, q, k)
    if near is None or near[0] != 0 or near[1] is None:
        return _further(found)
    for other, bias in biases:
        far = distances(other, q, k)
        if bias == 0 and (far is None or far[0] != near[1] + 1):
            return Declined(f"the bias {shorten(cell)} leaves out distances: {other}")
    distance = Index("distance", near[1] + 1)
    places = [decide_extrema(at.xreplace({q: k + distance})) for at in cell.args[1:]]
    entry = [i for i, at in enumerate(places) if at == distance]
    if len(entry) != 1 or any(at.has(k, distance) for at in _others(cell, entry[0], q)):
        return Declined(f"the bias {shorten(cell)} is not looked up by distance")
    return DistanceBias(Cell(cell.args[0], *_replaced(cell.args[1:], entry[0], distance)), factor)


def _further(found: Sequence[tuple[Condition, Expr]]) -> Declined:
    terms = "; ".join(sorted({shorten(bias) for _, bias in found}))
    return Declined(f"the score has a further term: {terms}")


def _others(cell: Cell, entry: int, q: Index) -> list[Expr]:
    """The coordinates but the distance; that of the query is q itself."""
    return [at for i, at in enumerate(cell.args[1:]) if i != entry and at != q]


def _replaced(places: Sequence[Expr], entry: int, at: Expr) -> list[sympy.Basic]:
    return [at if i == entry else place for i, place in enumerate(places)]
