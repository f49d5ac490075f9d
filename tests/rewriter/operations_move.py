"""Makers of operations that move elements: views, parts and joins, lookups, and tensors made from nothing."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
from torch import fx

from regraft.rewriter.graph import TOKENS, Size

from .choices import dim_of, exact_tensor, floats, indices, is_float, is_whole, shape, tensor
from .programs import Chooser, Program

aten = torch.ops.aten


def regrouped(c: Chooser, sizes: Sequence[Size]) -> list[Size]:
    """Another shape of as many elements: factors split, merged, and at times in another order."""
    found: list[Size] = []
    for size in sizes:
        if isinstance(size, int) and size % 2 == 0 and c.chance(2):
            found += [2, size // 2]
        elif found and c.chance(3):
            found[-1] = found[-1] * size
        else:
            found.append(size)
        if c.chance(6):
            found.append(1)
    if c.chance(4):
        found[0], found[-1] = found[-1], found[0]
    while 1 in found and c.chance(2):
        found.remove(1)
    return found


def view(p: Program, c: Chooser) -> fx.Node | None:
    node = tensor(p, c, lambda n: len(shape(n)) > 0)
    if node is None:
        return None
    simple = all(isinstance(s, int) or sympy.cancel(s / TOKENS).is_Integer for s in shape(node))
    if not simple:
        return None
    sizes = [p.size(size) for size in regrouped(c, shape(node))]
    return p.call(aten.reshape.default, node, sizes)


def rejoin(p: Program, c: Chooser) -> fx.Node | None:
    """Tokens and their neighbours into one dimension and apart again, as other factors perhaps."""
    node = tensor(p, c, lambda n: len(shape(n)) >= 2)
    if node is None:
        return None
    at = c.below(len(shape(node)) - 1)
    return p.call(aten.flatten.using_ints, node, at, at + 1)


def unflatten(p: Program, c: Chooser) -> fx.Node | None:
    node = tensor(p, c, lambda n: any(sympy.sympify(s).as_coeff_Mul()[0] > 1 for s in shape(n)))
    if node is None:
        return None
    at = c.pick([d for d, s in enumerate(shape(node)) if sympy.sympify(s).as_coeff_Mul()[0] > 1])
    coefficient = int(sympy.sympify(shape(node)[at]).as_coeff_Mul()[0])
    factor = c.pick([f for f in range(2, coefficient + 1) if coefficient % f == 0])
    sizes = list(shape(node))
    rest = sizes[at] // factor if isinstance(sizes[at], int) else sympy.cancel(sizes[at] / factor)
    sizes[at : at + 1] = [rest, factor] if c.chance(2) else [factor, rest]
    if not all(isinstance(s, int) or sympy.cancel(s / TOKENS).is_Integer for s in sizes):
        return None
    return p.call(aten.reshape.default, node, [p.size(s) for s in sizes])


def transpose(p: Program, c: Chooser) -> fx.Node | None:
    node = tensor(p, c, lambda n: len(shape(n)) >= 2)
    if node is None:
        return None
    kind = c.below(3)
    if kind == 0:
        order = list(range(len(shape(node))))
        order.insert(c.below(len(order)), order.pop(c.below(len(order))))
        return p.call(aten.permute.default, node, order)
    if kind == 1:
        return p.call(aten.movedim.int, node, dim_of(c, node), dim_of(c, node))
    return p.call(aten.transpose.int, node, dim_of(c, node), dim_of(c, node))


def unsqueeze(p: Program, c: Chooser) -> fx.Node | None:
    node = tensor(p, c)
    if node is None:
        return None
    if c.chance(2):
        return p.call(aten.squeeze.default, node)
    return p.call(aten.unsqueeze.default, node, c.below(len(shape(node)) + 1))


def expand(p: Program, c: Chooser) -> fx.Node | None:
    node = tensor(p, c, lambda n: 1 in shape(n))
    if node is None:
        return None
    at = c.pick([d for d, size in enumerate(shape(node)) if size == 1])
    sizes: list[object] = [-1] * len(shape(node))
    sizes[at] = c.pick((3, p.tokens, p.tokens))
    return p.call(aten.expand.default, node, [3, *sizes] if c.chance(3) else sizes)


def twins(p: Program, c: Chooser) -> fx.Node | None:
    """The same rows twice, side by side and behind one another."""
    node = floats(p, c)
    if node is None:
        return None
    at = c.below(len(shape(node)))
    p.call(aten.repeat.default, node, [2 if d == at else 1 for d in range(len(shape(node)))])
    return p.call(aten.repeat_interleave.self_int, node, 2, at)


def repeat(p: Program, c: Chooser) -> fx.Node | None:
    node = exact_tensor(p, c)
    if node is None:
        return None
    times: list[object] = [1] * len(shape(node))
    times[c.below(len(times))] = c.pick((2, 3, p.tokens))
    return p.call(aten.repeat.default, node, times)


def repeat_interleave(p: Program, c: Chooser) -> fx.Node | None:
    node = exact_tensor(p, c)
    return node and p.call(
        aten.repeat_interleave.self_int, node, c.pick((2, 2, p.tokens)), dim_of(c, node)
    )


def cat(p: Program, c: Chooser) -> fx.Node | None:
    node = exact_tensor(p, c)
    if node is None:
        return None
    at = dim_of(c, node) % len(shape(node))
    rest = [s for d, s in enumerate(shape(node)) if d != at]

    def fits(n: fx.Node) -> bool:
        sizes = shape(n)
        same = len(sizes) == len(rest) + 1 and [s for d, s in enumerate(sizes) if d != at] == rest
        return same and n.meta["dtype"] == node.meta["dtype"]

    other = tensor(p, c, fits)
    if other is None:
        return None
    if c.chance(4) and shape(other) == shape(node):
        return p.call(aten.stack.default, [node, other], at)
    parts = [node, other] if c.chance(2) else [other, node]
    return p.call(aten.cat.default, parts, at)


def split(p: Program, c: Chooser) -> fx.Node | None:
    node = exact_tensor(p, c)
    if node is None:
        return None
    at = dim_of(c, node)
    if c.chance(3):
        return p.call(aten.unbind.int, node, at)
    if c.chance(2):
        return p.call(aten.chunk.default, node, 2, at)
    return p.call(aten.split.Tensor, node, c.pick((1, 2)), at)


def slice_(p: Program, c: Chooser) -> fx.Node | None:
    node = exact_tensor(p, c)
    if node is None:
        return None
    start = c.pick((0, 0, 1, -2, -1, p.size(TOKENS - 1), p.size(TOKENS - 3)))
    end = c.pick((1 << 40, 2, 3, -1, p.tokens, p.size(TOKENS - 1)))
    return p.call(aten.slice.Tensor, node, dim_of(c, node), start, end, c.pick((1, 1, 2)))


def narrow_back(p: Program, c: Chooser) -> fx.Node | None:
    """T elements out of a dimension that has more."""
    node = tensor(p, c, lambda n: any(not isinstance(s, int) and s != TOKENS for s in shape(n)))
    if node is None:
        return None
    at = c.pick([d for d, s in enumerate(shape(node)) if not isinstance(s, int) and s != TOKENS])
    start = c.pick((0, 1, 2))
    return p.call(aten.narrow.default, node, at, start, p.tokens)


def select(p: Program, c: Chooser) -> fx.Node | None:
    node = exact_tensor(p, c)
    if node is None:
        return None
    which = c.pick((0, 1, -1, p.size(TOKENS - 4)))
    return p.call(aten.select.int, node, dim_of(c, node), which)


def pad(p: Program, c: Chooser) -> fx.Node | None:
    node = exact_tensor(p, c)
    if node is None:
        return None
    amounts: list[object] = [0] * 2 * len(shape(node))
    amounts[c.below(len(amounts))] = c.pick((1, 2, -1, p.tokens))
    return p.call(aten.constant_pad_nd.default, node, amounts, 5)


def index(p: Program, c: Chooser) -> fx.Node | None:
    node = exact_tensor(p, c)
    if node is None:
        return None
    chosen: list[fx.Node | None] = []
    for size in shape(node):
        below = size if isinstance(size, int) else 5
        chosen.append(indices(p, c, below) if c.chance(2) else None)
    return p.call(aten.index.Tensor, node, chosen) if any(chosen) else None


def index_by_mask(p: Program, c: Chooser) -> fx.Node | None:
    mask = tensor(p, c, lambda n: n.meta["dtype"] == torch.bool and len(shape(n)) > 0)
    return mask and p.call(aten.index.Tensor, mask, [mask])


def index_select(p: Program, c: Chooser) -> fx.Node | None:
    node = exact_tensor(p, c)
    if node is None:
        return None
    at = dim_of(c, node)
    size = shape(node)[at]
    picks = indices(p, c, size if isinstance(size, int) else 5, ndim=1)
    if c.chance(4):
        return picks and p.call(aten.take.default, node, picks)
    return picks and p.call(aten.index_select.default, node, at, picks)


def gather(p: Program, c: Chooser) -> fx.Node | None:
    node = exact_tensor(p, c)
    if node is None:
        return None
    at = dim_of(c, node)
    size = shape(node)[at]
    picks = indices(p, c, size if isinstance(size, int) else 5, ndim=len(shape(node)))
    return picks and p.call(aten.gather.default, node, at, picks)


def scatter(p: Program, c: Chooser) -> fx.Node | None:
    node = tensor(p, c, lambda n: is_float(n) and n in p.exact and len(shape(n)) > 0)
    if node is None:
        return None
    at = dim_of(c, node)
    size = shape(node)[at]
    picks = indices(p, c, size if isinstance(size, int) else 5, ndim=len(shape(node)))
    if picks is None:
        return None
    if c.chance(2):
        return p.call(aten.scatter.value, node, at, picks, 3.0)
    source = tensor(p, c, lambda n: is_float(n) and len(shape(n)) == len(shape(node)))
    return source and p.call(aten.scatter_add.default, node, at, picks, source)


def place(p: Program, c: Chooser) -> fx.Node | None:
    node = exact_tensor(p, c)
    if node is None:
        return None
    other = tensor(
        p, c, lambda n: n.meta["dtype"] == node.meta["dtype"] and shape(n) == shape(node)
    )
    at, kind = dim_of(c, node) % len(shape(node)), c.below(4)
    rest = [size for d, size in enumerate(shape(node)) if d != at]
    if kind < 2 and is_float(node) and all(isinstance(size, int) for size in rest):
        other = p.weight(*rest[:at], 3, *rest[at:])  # type: ignore[arg-type]
    if kind == 0:
        return p.call(
            aten.select_scatter.default, node, p.call(aten.select.int, other, at, 1), at, 0
        )
    if kind == 1:
        bounds = c.pick(((0, 2), (1, 3), (1, 1 << 40)))
        return p.call(
            aten.slice_scatter.default,
            node,
            p.call(aten.slice.Tensor, other, at, 0, 2),
            at,
            *bounds,
        )
    size = shape(node)[at]
    picks = indices(p, c, size if isinstance(size, int) else 5, ndim=1)
    if kind == 2 or picks is None:
        return picks and p.call(aten.index_fill.int_Scalar, node, at, picks, 2)
    source = p.call(aten.index_select.default, other, at, picks)
    return source and p.call(aten.index_add.default, node, at, picks, source)


def one_hot(p: Program, c: Chooser) -> fx.Node | None:
    node = tensor(p, c, is_whole)
    small = node and p.call(aten.remainder.Scalar, node, 4)
    return small and p.call(
        aten.one_hot.default, small, c.pick((4, 5, p.tokens, p.size(TOKENS + 1)))
    )


def uniform(p: Program, c: Chooser) -> fx.Node | None:
    sizes = [c.pick((1, 2, 4, p.tokens, p.tokens)) for _ in range(1 + c.below(3))]
    kind = c.below(4)
    if kind == 0:
        like = floats(p, c)
        return like and p.call(aten.ones_like.default, like)
    if kind == 1:  # a constant row for each token, perhaps all in one dimension
        row = p.call(aten.expand.default, p.weight(1, 4), [p.tokens, 4])
        return row if c.chance(2) else row and p.call(aten.flatten.using_ints, row, 0, 1)
    made = p.call(aten.full.default, sizes, 2.0, dtype=torch.float64)
    return made if kind == 2 else made and p.call(aten.sum.dim_IntList, made, [c.below(len(sizes))])


def arange(p: Program, c: Chooser) -> fx.Node | None:
    return p.call(aten.arange.default, c.pick((p.tokens, p.tokens, p.size(2 * TOKENS), 4)))


def nothing_known(p: Program, c: Chooser) -> fx.Node | None:
    """Operations without a rule."""
    node = tensor(p, c, lambda n: is_whole(n) and len(shape(n)) == 1)
    if node is None or c.chance(2):
        other = floats(p, c)
        return other and p.call(aten.diag_embed.default, other)
    small = p.call(aten.remainder.Scalar, node, 4)
    return small and p.call(aten.bincount.default, small, None, 4)


def as_complex(p: Program, c: Chooser) -> fx.Node | None:
    node = tensor(p, c, lambda n: is_float(n) and shape(n)[-1:] == (2,))
    pair = node and p.call(aten.view_as_complex.default, node)
    return pair and p.call(aten.view_as_real.default, pair)


def bits(p: Program, c: Chooser) -> fx.Node | None:
    """The same memory under another dtype: the last dimension doubles."""
    node = tensor(
        p, c, lambda n: n in p.exact and n.meta["dtype"] == torch.int64 and len(shape(n)) > 0
    )
    half = node and p.call(aten.view.dtype, node, torch.int32)
    return half and p.call(aten._to_copy.default, half, dtype=torch.int64)
