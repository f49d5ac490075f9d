"""The operations that random programs are made of. Each maker picks operands among what a program has so far.

A maker may propose a call that cannot run: the program then leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sympy
import torch
from torch import fx

from regraft.rewriter.graph import TOKENS, Size

from .programs import Chooser, Program

aten = torch.ops.aten
Maker = Callable[[Program, Chooser], fx.Node | None]

UNARY = (aten.neg, aten.relu, aten.abs, aten.square, aten.clone, aten.floor, aten.sign)
ROUGH = (aten.sigmoid, aten.tanh, aten.exp, aten.silu, aten.gelu, aten.softplus)
BINARY = (
    aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.maximum.default, aten.minimum.default, aten.type_as.default,
)  # fmt: skip
COMPARE = (aten.le.Tensor, aten.eq.Tensor, aten.gt.Tensor)
SUMS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.any.dims)
RUNNING = (
    aten.cumsum.default,
    aten.cumprod.default,
    aten.softmax.int,
    aten.log_softmax.int,
    aten.logcumsumexp.default,
)


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


def embedding(p: Program, c: Chooser) -> fx.Node | None:
    table = p.weight(12, c.pick((2, 4, 6)))
    index = p.ids if c.chance(2) else indices(p, c, 12)
    return index and p.call(aten.embedding.default, table, index)


def unary(p: Program, c: Chooser) -> fx.Node | None:
    node = floats(p, c, 0)
    return node and p.call(c.pick(UNARY).default, node)


def rough(p: Program, c: Chooser) -> fx.Node | None:
    node = floats(p, c, 0)
    return node and p.call(c.pick(ROUGH).default, node, exact=False)


def calm(p: Program, c: Chooser) -> fx.Node | None:
    node = exact_tensor(p, c)
    return node and p.call(aten.remainder.Scalar, node, c.pick((5, 7)))


def partner(
    p: Program, c: Chooser, node: fx.Node, wanted: Callable[[fx.Node], bool]
) -> fx.Node | None:
    """A tensor that broadcasts with `node`, perhaps after a new dimension."""

    def fits(other: fx.Node) -> bool:
        pairs = zip(reversed(shape(node)), reversed(shape(other)))
        return wanted(other) and all(a == b or 1 in (a, b) for a, b in pairs)

    return tensor(p, c, fits)


def binary(p: Program, c: Chooser) -> fx.Node | None:
    node = floats(p, c)
    other = node and partner(p, c, node, is_float)
    return other and p.call(c.pick(BINARY), node, other)


def compare(p: Program, c: Chooser) -> fx.Node | None:
    node = exact_tensor(p, c)
    other = node and partner(
        p, c, node, lambda n: n in p.exact and n.meta["dtype"] == node.meta["dtype"]
    )
    if other is None:
        return None
    mask = p.call(c.pick(COMPARE), node, other)
    return (
        mask if c.chance(2) else mask and p.call(aten._to_copy.default, mask, dtype=torch.float64)
    )


def where(p: Program, c: Chooser) -> fx.Node | None:
    mask = tensor(p, c, lambda n: n.meta["dtype"] == torch.bool)
    one = mask and partner(p, c, mask, is_float)
    two = one and partner(p, c, one, is_float)
    if mask is None or one is None or two is None:
        return None
    if c.chance(2):
        return p.call(aten.masked_fill.Scalar, one, mask, -7.0)
    return p.call(aten.where.self, mask, one, two)


def by_tokens(p: Program, c: Chooser) -> fx.Node | None:
    """The number of tokens as a value."""
    node = floats(p, c)
    kind = c.below(4)
    if node is None:
        return None
    if kind == 0:
        return p.call(aten.mul.Tensor, node, p.tokens)
    if kind == 1:
        return p.call(aten.full.default, [2], p.tokens, dtype=torch.float64)
    if kind == 2:
        return p.call(aten.clamp.default, node, None, p.tokens)
    return p.call(aten.scalar_tensor.default, p.tokens, dtype=torch.float64)


def linear(p: Program, c: Chooser) -> fx.Node | None:
    node = tensor(
        p, c, lambda n: is_float(n) and len(shape(n)) > 0 and isinstance(shape(n)[-1], int)
    )
    if node is None:
        return None
    bias = p.weight(4) if c.chance(3) else None
    return p.call(aten.linear.default, node, p.weight(4, shape(node)[-1]), bias)  # type: ignore[arg-type]


def matmul(p: Program, c: Chooser) -> fx.Node | None:
    left = floats(p, c)
    right = floats(p, c)
    if left is None or right is None:
        return None
    if shape(left)[-1] != shape(right)[-2:][0] and len(shape(right)) > 1:
        right = p.call(aten.transpose.int, right, -1, -2)
    return right and p.call(aten.matmul.default, left, right)


def addmm(p: Program, c: Chooser) -> fx.Node | None:
    node = tensor(
        p, c, lambda n: is_float(n) and len(shape(n)) == 2 and isinstance(shape(n)[1], int)
    )
    if node is None:
        return None
    added = p.weight(*c.pick(((4,), (1, 4), (1,), ())))
    return p.call(aten.addmm.default, added, node, p.weight(shape(node)[1], 4))  # type: ignore[arg-type]


def einsum(p: Program, c: Chooser) -> fx.Node | None:
    left, right = floats(p, c, 2), floats(p, c, 2)
    if left is None or right is None:
        return None
    letters = "abcde"[: len(shape(left))]
    other = ""
    for size, fresh in zip(shape(right), "vwxyz"):
        alike = [x for x, s in zip(letters, shape(left)) if s == size and x not in other]
        other += c.pick(alike) if alike and not c.chance(4) else fresh
    out = "".join(sorted({letter for letter in letters + other if not c.chance(3)}))
    return p.call(aten.einsum.default, f"{letters},{other}->{out}", [left, right])


def attention(p: Program, c: Chooser) -> fx.Node | None:
    query = tensor(p, c, lambda n: is_float(n) and len(shape(n)) in (3, 4) and n in p.exact)
    key = query and (
        query if c.chance(2) else partner(p, c, query, lambda n: is_float(n) and len(shape(n)) > 2)
    )
    if key is None or query is None:
        return None
    sizes = (*shape(query)[:-1], shape(key)[-2])[-2:]
    mask = tensor(p, c, lambda n: is_float(n) and shape(n)[-2:] == sizes) if c.chance(2) else None
    causal = mask is None and c.chance(2)
    return p.call(
        aten.scaled_dot_product_attention.default, query, key, key, mask, 0.0, causal, exact=False
    )


def conv(p: Program, c: Chooser) -> fx.Node | None:
    node = tensor(p, c, lambda n: is_float(n) and len(shape(n)) == 3)
    if node is not None and (c.chance(2) or not isinstance(shape(node)[1], int)):
        node = p.call(aten.transpose.int, node, 1, 2)
    if node is None or not isinstance(shape(node)[1], int):
        return None
    channels, width = shape(node)[1], c.pick((1, 2, 3))
    kernel = p.weight(channels, 1, width)
    return p.call(
        aten.conv1d.default, node, kernel, None, [1], [c.pick((0, width - 1))], [1], channels
    )


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


def reduce(p: Program, c: Chooser) -> fx.Node | None:
    node = floats(p, c)
    if node is None:
        return None
    kind = c.pick(SUMS)
    return p.call(kind, node, [dim_of(c, node)], c.chance(2), exact=kind is not aten.mean.dim)


def reduce_all(p: Program, c: Chooser) -> fx.Node | None:
    node = exact_tensor(p, c)
    return node and p.call(c.pick((aten.sum.default, aten.max.default, aten.argmax.default)), node)


def extreme(p: Program, c: Chooser) -> fx.Node | None:
    node = exact_tensor(p, c)
    if node is None:
        return None
    kind = c.below(4)
    at = dim_of(c, node)
    if kind == 0:
        return p.call(aten.max.dim, node, at, c.chance(2))
    if kind == 1:
        return p.call(aten.argmax.default, node, at, c.chance(2))
    if kind == 2:
        return p.call(aten.kthvalue.default, node, 1, at, c.chance(2))
    other = partner(p, c, node, lambda n: n in p.exact)
    return other and p.call(aten.max.other, node, other)


def running(p: Program, c: Chooser) -> fx.Node | None:
    node = floats(p, c)
    kind = c.pick(RUNNING)
    exact = kind is aten.cumsum.default or kind is aten.cumprod.default
    return node and p.call(kind, node, dim_of(c, node), exact=exact)


def sort(p: Program, c: Chooser) -> fx.Node | None:
    node = exact_tensor(p, c)
    if node is None:
        return None
    at, kind = dim_of(c, node), c.below(6)
    if kind == 0:
        return p.call(aten.sort.stable, node, stable=True, dim=at)
    if kind == 1:
        return p.call(aten.argsort.stable, node, stable=True, dim=at)
    if kind == 2:
        return p.call(aten.flip.default, node, [at])
    if kind == 3:
        return p.call(aten.roll.default, node, [1], [] if c.chance(3) else [at])
    if kind == 4:
        return p.call(aten.msort.default, node)
    return p.call(aten.topk.default, node, c.pick((1, 2)), at)


def diff(p: Program, c: Chooser) -> fx.Node | None:
    node = exact_tensor(p, c)
    if node is None:
        return None
    before = None
    if c.chance(2):
        before = p.call(
            aten.slice.Tensor,
            tensor(p, c, lambda n: shape(n) == shape(node)),
            dim_of(c, node),
            0,
            1,
        )
    return p.call(aten.diff.default, node, 1, dim_of(c, node), before)


def norm(p: Program, c: Chooser) -> fx.Node | None:
    node = floats(p, c)
    if node is None:
        return None
    kind = c.below(3)
    if kind == 0:
        return p.call(aten.layer_norm.default, node, [p.size(shape(node)[-1])], exact=False)
    if kind == 1:
        return p.call(
            aten.rms_norm.default, node, [p.size(shape(node)[-1])], None, 1e-6, exact=False
        )
    return p.call(aten.glu.default, node, dim_of(c, node), exact=False)


def triangle(p: Program, c: Chooser) -> fx.Node | None:
    node = floats(p, c, 2)
    return node and p.call(c.pick((aten.tril, aten.triu)).default, node, c.pick((0, 1)))


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


MAKERS: tuple[Maker, ...] = (
    embedding, unary, rough, calm, binary, binary, compare, where, by_tokens, linear, matmul,
    matmul, addmm, einsum, attention, conv, view, view, rejoin, unflatten, transpose, transpose,
    unsqueeze, expand, twins, repeat, repeat_interleave, cat, split, slice_, narrow_back, select,
    pad, reduce, reduce_all, extreme, running, sort, diff, norm, triangle, index, index,
    index_by_mask, index_select, gather, gather, scatter, scatter, place, place, one_hot, uniform,
    uniform, arange, nothing_known, as_complex, bits,
)  # fmt: skip


def program(c: Chooser, length: int, favourite: Maker | None = None) -> Program:
    """Rows in a few layouts, a mask of pairs, and `length` operations on what there is.

    With a favourite, every other operation is that one.
    """
    p = Program()
    rows = p.call(aten.embedding.default, p.weight(12, 4), p.ids)
    flat = p.call(
        aten.select.int, p.call(aten.embedding.default, p.weight(9, 6), p.positions), 0, 0
    )
    column = p.call(aten.unsqueeze.default, p.ids, -1)
    p.call(aten.eq.Tensor, p.positions, p.call(aten.select.int, column, 0, 0))
    p.call(aten.reshape.default, rows, [1, p.tokens, 2, 2])
    p.call(aten.reshape.default, flat, [p.tokens, 3, 2])
    p.weight(4), p.weight(3, 4)
    for _ in range(length):
        maker = favourite if favourite is not None and c.chance(2) else c.pick(MAKERS)
        maker(p, c)
    p.graph.output((p.tensors[-1],))
    return p
