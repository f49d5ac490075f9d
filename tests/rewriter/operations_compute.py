"""Makers of operations that compute: element by element, by contraction, along a dimension."""

from __future__ import annotations

import torch
from torch import fx

from .choices import dim_of, exact_tensor, floats, indices, is_float, partner, shape, tensor
from .programs import Chooser, Program

aten = torch.ops.aten

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
    above = shape(node)[-2] if len(shape(node)) > 1 else 1
    rows = above if isinstance(above, int) else 1
    bias = p.weight(*c.pick([(4,), (1,), (), (rows, 4)])) if c.chance(3) else None
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
