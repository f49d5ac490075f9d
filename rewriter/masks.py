"""Which keys a query attends to, as the few parameters an attention operator takes.

`read_relation` turns a condition over a query index and a key index, as rewriter/elements.py finds it in the graph,
into a `Relation`, or declines with the part of the condition that no parameter expresses. Nothing is assumed: a
relation that does not itself hold back later keys is declined too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import sympy
from sympy.core.relational import Relational

from .formulas import in_one_request
from .integers import Condition, Index, Quotient, compare
from .pattern import Declined

MAX_ALTERNATIVES = 64


@dataclass(frozen=True)
class Relation:
    """A query at position q attends to the keys at positions k <= q with all of these.

    `window`: q - k < window (0: no such limit). `chunk`: floor(k / chunk) == floor(q / chunk) (0: no such limit).
    """

    window: int = 0
    chunk: int = 0

    def __str__(self) -> str:
        parts = ["k <= q"]
        if self.window:
            parts.append(f"q - k < {self.window}")
        if self.chunk:
            parts.append(f"floor(k/{self.chunk}) == floor(q/{self.chunk})")
        return " & ".join(parts)


@dataclass(frozen=True)
class _Band:
    """One conjunction: `low <= q - k <= high` (None: no limit), q and k in one chunk of each size, and what is left."""

    low: int | None = None
    high: int | None = None
    chunks: frozenset[int] = frozenset()
    unknown: frozenset[Condition] = frozenset()

    def meet(self, other: _Band) -> _Band:
        lows = [low for low in (self.low, other.low) if low is not None]
        highs = [high for high in (self.high, other.high) if high is not None]
        return _Band(
            max(lows, default=None),
            min(highs, default=None),
            self.chunks | other.chunks,
            self.unknown | other.unknown,
        )

    @property
    def empty(self) -> bool:
        return self.low is not None and self.high is not None and self.low > self.high

    def inside(self, other: _Band) -> bool:
        """Whether everything in this band is in the other one too."""
        low = other.low is None or (self.low is not None and self.low >= other.low)
        high = other.high is None or (self.high is not None and self.high <= other.high)
        return low and high and other.chunks <= self.chunks and other.unknown <= self.unknown


def read_relation(allowed: Condition, q: Index, k: Index) -> Relation | Declined:
    """The relation that `allowed` states between the indices of a query and a key of one request."""
    bands = _bands(in_one_request(allowed), q, k)
    if bands is None:
        return Declined(f"the mask has too many alternatives: {shorten(allowed)}")
    bands = _union([band for band in bands if not band.empty])
    unknown = sorted({str(shorten(c)) for band in bands for c in band.unknown})
    if unknown:
        return Declined(
            f"the mask is no relation of positions: {' & '.join(unknown)}",
            fix="whether a key is seen followed from its position and the query's alone",
        )
    if not bands:
        return Declined("the mask lets no key through", fix="every query saw a key")
    if len(bands) > 1:
        return Declined(
            f"the mask is no single window: {shorten(allowed)}",
            fix="the keys that a query sees were one run of positions that ends at itself",
        )
    return _parameters(bands[0])


def is_possible(condition: Condition, q: Index, k: Index) -> bool:
    """Whether some query and key satisfy the condition, as far as is known."""
    bands = _bands(in_one_request(condition), q, k)
    return bands is None or any(not band.empty for band in bands)


def distances(condition: Condition, q: Index, k: Index) -> tuple[int | None, int | None] | None:
    """The least and the greatest q - k that satisfy a condition on it (chunks aside); None if it is none."""
    bands = _bands(in_one_request(condition), q, k)
    bands = None if bands is None else _union(bands)
    if bands is None or len(bands) != 1 or bands[0].unknown:
        return None
    return bands[0].low, bands[0].high


def _parameters(band: _Band) -> Relation | Declined:
    if band.low is None or band.low < 0:
        later = "all later keys" if band.low is None else f"{-band.low} later keys"
        return Declined(
            f"not causal: a query also attends to {later}",
            fix="no query saw a later key: what looks ahead cannot be served token by token",
        )
    if band.low > 0:
        return Declined(
            f"a query does not attend to its own key: the mask is k <= q - {band.low}",
            fix="the mask were k <= q",
        )
    smallest = min(band.chunks, default=0)
    if any(chunk % smallest for chunk in band.chunks):
        return Declined(
            f"chunks of different sizes, {sorted(band.chunks)}, that do not nest",
            fix="each size divided the next",
        )
    return Relation(0 if band.high is None else band.high + 1, smallest)


def shorten(value: sympy.Basic, limit: int = 160) -> str:
    """A formula for a reason, cut where it gets long."""
    text = str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _bands(allowed: Condition, q: Index, k: Index) -> list[_Band] | None:
    """The condition as alternatives of conjunctions; None if there are too many."""
    if isinstance(allowed, sympy.Or):
        parts = [_bands(part, q, k) for part in allowed.args]
        return None if None in parts else [band for bands in parts for band in bands or ()]
    if isinstance(allowed, sympy.And):
        met: list[_Band] | None = [_Band()]
        for part in allowed.args:
            bands = _bands(part, q, k)
            if met is None or bands is None or len(met) * len(bands) > MAX_ALTERNATIVES:
                return None
            met = _union([one.meet(two) for one in met for two in bands])
        return met
    if isinstance(allowed, sympy.Not) and isinstance(allowed.args[0], (sympy.And, sympy.Or)):
        dual = sympy.Or if isinstance(allowed.args[0], sympy.And) else sympy.And
        return _bands(dual(*(sympy.Not(part) for part in allowed.args[0].args)), q, k)
    return _atom(allowed, q, k)


def _union(bands: Iterable[_Band]) -> list[_Band]:
    """The same alternatives without those inside another one, neighbours joined."""
    kept: list[_Band] = []
    for band in bands:
        if band.empty or any(band.inside(other) for other in kept):
            continue
        kept = [other for other in kept if not other.inside(band)]
        neighbour = next((other for other in kept if _touch(band, other)), None)
        if neighbour is None:
            kept.append(band)
            continue
        kept.remove(neighbour)
        kept = _union([*kept, _hull(band, neighbour)])
    return kept


def _hull(one: _Band, two: _Band) -> _Band:
    """The band from the lower to the higher limit of two that touch."""
    low = None if one.low is None or two.low is None else min(one.low, two.low)
    high = None if one.high is None or two.high is None else max(one.high, two.high)
    return replace(one, low=low, high=high)


def _touch(one: _Band, two: _Band) -> bool:
    """Whether two bands differ in their limits only, and leave no gap between them."""
    if (one.chunks, one.unknown) != (two.chunks, two.unknown):
        return False
    first, second = (
        (one, two)
        if one.low is None or (two.low is not None and one.low <= two.low)
        else (two, one)
    )
    return first.high is None or second.low is None or second.low <= first.high + 1


def _atom(allowed: Condition, q: Index, k: Index) -> list[_Band]:
    if allowed == sympy.true:
        return [_Band()]
    if allowed == sympy.false:
        return []
    if not isinstance(allowed, Relational):
        return [_Band(unknown=frozenset([allowed]))]
    decided = compare(allowed.lhs, allowed.rel_op, allowed.rhs)
    if not isinstance(decided, Relational):
        return _atom(decided, q, k)
    chunk = _chunk(allowed, q, k)
    if chunk is not None:
        return [_Band(chunks=frozenset([chunk]))]
    return _limits(allowed, q, k) or [_Band(unknown=frozenset([allowed]))]


def _chunk(allowed: Relational, q: Index, k: Index) -> int | None:
    """The size c of `floor(q/c) == floor(k/c)`."""
    if not isinstance(allowed, sympy.Eq):
        return None
    sides = allowed.args
    if not all(isinstance(side, Quotient) and side.args[1].is_Integer for side in sides):
        return None
    same_size = sides[0].args[1] == sides[1].args[1]
    return (
        int(sides[0].args[1]) if same_size and {side.args[0] for side in sides} == {q, k} else None
    )


def _limits(allowed: Relational, q: Index, k: Index) -> list[_Band] | None:
    """`c * (q - k) + constant` against zero."""
    difference = sympy.expand(allowed.lhs - allowed.rhs)
    slope = difference.coeff(q)
    constant = sympy.expand(difference - slope * (q - k))
    if not (slope.is_Integer and slope != 0 and constant.is_number):
        return None
    root = -constant / slope
    relation = allowed.rel_op
    if slope < 0:
        relation = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}.get(relation, relation)
    ceiling, floor = int(sympy.ceiling(root)), int(sympy.floor(root))
    below, above = _Band(high=ceiling - 1), _Band(low=floor + 1)
    match relation:
        case "<":
            return [below]
        case "<=":
            return [_Band(high=floor)]
        case ">":
            return [above]
        case ">=":
            return [_Band(low=ceiling)]
        case "==":
            return [_Band(low=ceiling, high=floor)]
        case "!=":
            return [below, above] if ceiling == floor else [_Band()]
    return None
