"""Contractions: matmul, linear, attention, convolution. One engine on index letters, like einsum.

A letter of the result gets the joined axes of the dimensions that carry it; a letter that is summed over mixes
tokens if its size contains T.
"""

from __future__ import annotations

import re

from torch import fx

from .analysis import Facts, rule
from .value import PERM, Axis, Value, fitted, has_tokens, join, make, tokens_multiple

Letters = list[str]


def contract(facts: Facts, terms: list[tuple[fx.Node, Letters]], out: Letters, why: str) -> Value:
    """The value of an einsum of `terms` into `out`."""
    axes: dict[str, Axis] = {}
    mixed, cause, sized = False, "", set()
    for operand, letters in terms:
        value, shape = facts.value(operand), facts.shape(operand)
        mixed, cause = mixed or value.mixed, cause or value.why
        sized |= {letter for letter, size in zip(letters, shape, strict=True) if has_tokens(size)}
        for dim, axis in value.axes:
            joined = join(axes.get(letters[dim]), axis)
            assert joined is not None
            axes[letters[dim]] = joined
    summed = (sized | set(axes)) - set(out)
    kept = {out.index(letter): axis for letter, axis in axes.items() if letter in out}
    kept = {dim: fitted(axis, facts.out_shape[dim]) for dim, axis in kept.items()}
    return make(kept, mixed or bool(summed), cause or why)


def _batch(facts: Facts, operand: fx.Node, count: int) -> Letters:
    """Letters of the leading dimensions, right-aligned: b0 is next to the matrix. Size 1 broadcasts: no letter."""
    shape = facts.shape(operand)[:count]
    return [f"b{count - 1 - i}" if size != 1 else f"one{id(operand)}{i}" for i, size in enumerate(shape)]


@rule("matmul", "bmm", "mm")
def matmul(facts: Facts) -> Value:
    left, right = facts.node.args[:2]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    ndim_left, ndim_right = len(facts.shape(left)), len(facts.shape(right))
    left_letters = [*_batch(facts, left, max(ndim_left - 2, 0)), "m", "k"][-max(ndim_left, 1) :]
    right_letters = [*_batch(facts, right, max(ndim_right - 2, 0)), "k", "n"]
    if ndim_left == 1:
        left_letters = ["k"]
    if ndim_right == 1:
        right_letters = ["k"]
    batch = max(ndim_left, ndim_right, 2) - 2
    out = [f"b{batch - 1 - i}" for i in range(batch)]
    out += ["m"] * (ndim_left > 1) + ["n"] * (ndim_right > 1)
    return contract(facts, [(left, left_letters), (right, right_letters)], out, "contracts tokens")


@rule("linear")
def linear(facts: Facts) -> Value:
    source, weight = facts.node.args[:2]
    bias = facts.argument(2, "bias")
    assert isinstance(source, fx.Node) and isinstance(weight, fx.Node)
    lead = [f"b{i}" for i in range(len(facts.shape(source)) - 1)]
    terms = [(source, [*lead, "k"]), (weight, ["n", "k"][-len(facts.shape(weight)) :])]
    if isinstance(bias, fx.Node):
        terms.append((bias, ["n"]))
    return contract(facts, terms, [*lead, "n"], "contracts tokens")


@rule("addmm", "baddbmm", "addmv", "addbmm")
def addmm(facts: Facts) -> Value:
    added, left, right = facts.node.args[:3]
    assert isinstance(added, fx.Node) and isinstance(left, fx.Node) and isinstance(right, fx.Node)
    name = facts.node.target._opname  # type: ignore[union-attr]
    if name in ("addmv", "addbmm"):
        axes = {d: PERM for d, size in enumerate(facts.out_shape) if has_tokens(size)}
        return make(axes, True, f"no rule for {name}")
    lead = ["b"] if name == "baddbmm" else []
    out = [*lead, "m", "n"]
    shape = facts.shape(added)
    letters = [o if size != 1 else f"one{i}" for i, (o, size) in enumerate(zip(out[-len(shape) :], shape, strict=True))]
    terms = [(added, letters), (left, [*lead, "m", "k"]), (right, [*lead, "k", "n"])]
    return contract(facts, terms, out, "contracts tokens")


@rule("einsum")
def einsum(facts: Facts) -> Value:
    equation, operands = facts.node.args[:2]
    text = str(equation).replace(" ", "")
    assert isinstance(operands, (list, tuple))
    if not re.fullmatch(r"[A-Za-z,]+->[A-Za-z]*", text):
        axes = {d: PERM for d, size in enumerate(facts.out_shape) if has_tokens(size)}
        return make(axes, True, f"einsum {text} is not analysed")
    inputs, out = text.split("->")
    names = inputs.split(",")
    repeated = any(len(set(part)) < len(part) for part in names)
    terms = [(operand, list(part)) for operand, part in zip(operands, names, strict=True)]
    value = contract(facts, terms, list(out), "contracts tokens")
    return value.mix("einsum takes a diagonal") if repeated else value


@rule("dot", "mv", "outer", "ger")
def vectors(facts: Facts) -> Value:
    letters = {"dot": ("k", "k", ""), "mv": ("mk", "k", "m"), "outer": ("m", "n", "mn"), "ger": ("m", "n", "mn")}
    left, right, out = letters[facts.node.target._opname]  # type: ignore[union-attr]
    first, second = facts.node.args[:2]
    assert isinstance(first, fx.Node) and isinstance(second, fx.Node)
    return contract(facts, [(first, list(left)), (second, list(right))], list(out), "contracts tokens")


@rule("scaled_dot_product_attention")
def attention(facts: Facts) -> Value:
    """softmax(q k^T) v: queries keep their place, keys are summed over."""
    query, key, value = facts.node.args[:3]
    mask = facts.argument(3, "attn_mask")
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node) and isinstance(value, fx.Node)
    count = len(facts.shape(query)) - 2
    out = [f"b{count - 1 - i}" for i in range(count)] + ["q", "f"]
    grouped = facts.shape(query)[:-2] != facts.shape(key)[:-2]
    terms = [
        (query, [*_batch(facts, query, count), "q", "e"]),
        (key, [*_batch(facts, key, count), "s", "e"]),
        (value, [*_batch(facts, value, count), "s", "f"]),
    ]
    if isinstance(mask, fx.Node):
        sizes = facts.shape(mask)
        names = [f"b{count - 1 - i}" for i in range(count)] + ["q", "s"]
        names = names[len(names) - len(sizes) :]
        terms.append((mask, [n if s != 1 else f"m{i}" for i, (n, s) in enumerate(zip(names, sizes, strict=True))]))
    result = contract(facts, terms, out, "attention over tokens")
    if grouped and any(dim < count and axis.kind == "ok" for dim, axis in result.axes):
        return result.mix("attention with grouped heads over a batch of tokens")
    return result


@rule("conv1d", "conv2d", "convolution")
def convolution(facts: Facts) -> Value:
    """[batch, channels, length...]: a batch of tokens is row-local, a length of tokens is mixed."""
    source = facts.node.args[0]
    assert isinstance(source, fx.Node)
    value = facts.value(source)
    weights = [operand for operand in facts.operands if operand is not source]
    if not all(facts.value(weight).is_fixed for weight in weights) or len(facts.shape(source)) < 3:
        axes = {d: PERM for d, size in enumerate(facts.out_shape) if has_tokens(size)}
        return make(axes, True, "convolution with weights that depend on tokens")
    axes = dict(value.axes)
    channels = axes.pop(1, None)
    axes = {dim: fitted(axis, facts.out_shape[dim]) for dim, axis in axes.items()}
    length = any(has_tokens(size) for size in facts.shape(source)[2:]) or channels is not None
    plain = all(tokens_multiple(facts.out_shape[dim]) == 1 for dim in axes if dim >= 2)
    if length and not plain:
        axes = {dim: (axis if dim < 2 else Axis(kind="odd")) for dim, axis in axes.items()}
    return make(axes, value.mixed or length, value.why or "convolution over tokens")
