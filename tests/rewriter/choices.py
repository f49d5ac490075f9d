"""How the operations of random programs pick what they are applied to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from regraft.rewriter.graph import Size

from .programs import Chooser, Program

aten = torch.ops.aten
Maker = Callable[[Program, Chooser], fx.Node | None]
"""Adds one operation to a program. It may propose a call that cannot run: the program then leaves it out."""


def shape(node: fx.Node) -> tuple[Size, ...]:
    found: tuple[Size, ...] = node.meta["shape"]
    return found


def tensor(
    p: Program, c: Chooser, wanted: Callable[[fx.Node], bool] = lambda n: True
) -> fx.Node | None:
    """A tensor made so far, more often one that tokens went into, and one of the last."""
    found = [node for node in p.tensors if wanted(node)]
    if not found:
        return None
    if not c.chance(4):
        found = [node for node in found if node in p.live] or found
    return found[-1 - c.below(min(3, len(found)))] if c.chance(3) else c.pick(found)


def is_float(node: fx.Node) -> bool:
    return bool(node.meta["dtype"] == torch.float64)


def is_whole(node: fx.Node) -> bool:
    return bool(node.meta["dtype"] == torch.int64)


def floats(p: Program, c: Chooser, least: int = 1) -> fx.Node | None:
    return tensor(p, c, lambda n: is_float(n) and len(shape(n)) >= least)


def exact_tensor(p: Program, c: Chooser, least: int = 1) -> fx.Node | None:
    return tensor(p, c, lambda n: n in p.exact and len(shape(n)) >= least)


def dim_of(c: Chooser, node: fx.Node) -> int:
    dim = c.below(len(shape(node)))
    return dim - len(shape(node)) if c.chance(3) else dim


def indices(p: Program, c: Chooser, below: int, ndim: int | None = None) -> fx.Node | None:
    """Whole numbers in 0..below-1: made of a tensor, or a constant."""
    source = tensor(p, c, lambda n: is_whole(n) and (ndim is None or len(shape(n)) == ndim))
    if source is None or c.chance(4):
        return p.weight(*[c.below(3) + 1 for _ in range(ndim or 1 + c.below(2))], high=below)
    return p.call(aten.remainder.Scalar, source, below)


def partner(
    p: Program, c: Chooser, node: fx.Node, wanted: Callable[[fx.Node], bool]
) -> fx.Node | None:
    """A tensor that broadcasts with `node`, perhaps after a new dimension."""

    def fits(other: fx.Node) -> bool:
        pairs = zip(reversed(shape(node)), reversed(shape(other)))
        return wanted(other) and all(a == b or 1 in (a, b) for a, b in pairs)

    return tensor(p, c, fits)
