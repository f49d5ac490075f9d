"""Contractions: matmul, linear, attention, convolution. One engine on index letters, like einsum.

A letter of the result gets the joined axes of the dimensions that carry it; a letter that is summed over mixes
tokens if its size contains T.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import fx

from .analysis import Facts, Result, rule
from .value import Axis, Value, fitted, has_tokens, join, make, tokens_multiple

Letters = Sequence[str]
Term = tuple[fx.Node, Letters]

CONTRACTS = "contracts tokens"


def contract(facts: Facts, terms: list[Term], out: Letters, why: str) -> Value:
    """The value of an einsum of `terms` into `out`. A dimension of size 1 that broadcasts has a letter of its own."""
    axes: dict[str, Axis] = {}
    mixed, cause, sized = False, "", set()
    for operand, letters in terms:
        value, shape = facts.value(operand), facts.shape(operand)
        mixed, cause = mixed or value.mixed, cause or value.why
        sized |= {letter for letter, size in zip(letters, shape, strict=True) if has_tokens(size)}
        for dim, axis in value.axes:
            axes[letters[dim]] = join(axes.get(letters[dim]), axis)
    summed = (sized | set(axes)) - set(out)
    kept = {out.index(letter): axis for letter, axis in axes.items() if letter in out}
    kept = {dim: fitted(axis, facts.out_shape[dim]) for dim, axis in kept.items()}
    return make(kept, mixed or bool(summed), cause or why)


def _aligned(facts: Facts, operand: fx.Node, letters: Letters) -> Term:
    """The last letters, one a dimension. Size 1 broadcasts: a letter of its own."""
    shape = facts.shape(operand)
    own = letters[len(letters) - len(shape) :]
    return operand, [
        x if size != 1 else f"one {operand} {i}" for i, (x, size) in enumerate(zip(own, shape))
    ]


def _batch(count: int) -> list[str]:
    """Letters of leading dimensions: b0 is the last of them."""
    return [f"b{i}" for i in reversed(range(count))]


@rule("matmul", "bmm", "mm", "_int_mm")
def matmul(facts: Facts) -> Value:
    left, right = facts.tensor(0, "self"), facts.tensor(1, "other")
    ranks = len(facts.shape(left)), len(facts.shape(right))
    batch = _batch(max(*ranks, 2) - 2)
    rows, columns = ["m"] * (ranks[0] > 1), ["n"] * (ranks[1] > 1)
    terms = [
        _aligned(facts, left, [*batch, *rows, "k"]),
        _aligned(facts, right, [*batch, "k", *columns]),
    ]
    return contract(facts, terms, [*batch, *rows, *columns], CONTRACTS)


@rule("linear")
def linear(facts: Facts) -> Value:
    source, weight, bias = (
        facts.tensor(0, "input"),
        facts.tensor(1, "weight"),
        facts.argument(2, "bias"),
    )
    lead = _batch(len(facts.shape(source)) - 1)
    terms: list[Term] = [(source, [*lead, "k"]), (weight, ["n", "k"][-len(facts.shape(weight)) :])]
    if isinstance(bias, fx.Node) and facts.shape(bias):
        terms.append(_aligned(facts, bias, [*lead, "n"]))
    return contract(facts, terms, [*lead, "n"], CONTRACTS)


@rule("addmm", "baddbmm")
def addmm(facts: Facts) -> Value:
    added, left, right = (facts.tensor(i, n) for i, n in enumerate(("self", "mat1", "mat2")))
    lead = ["b"] if facts.name == "baddbmm" else []
    out = [*lead, "m", "n"]
    terms: list[Term] = [(left, [*lead, "m", "k"]), (right, [*lead, "k", "n"])]
    return contract(facts, [_aligned(facts, added, out), *terms], out, CONTRACTS)


@rule("einsum")
def einsum(facts: Facts) -> Result:
    operands: Any = facts.node.args[1]
    text = str(facts.node.args[0]).replace(" ", "")
    if not re.fullmatch(r"[A-Za-z,]+->[A-Za-z]*", text):
        return facts.unknown(f"einsum {text} is not analysed")
    inputs, out = text.split("->")
    names = inputs.split(",")
    if any(len(set(part)) < len(part) for part in names):
        return facts.unknown(f"einsum {text} takes a diagonal")
    return contract(facts, list(zip(operands, names, strict=True)), out, CONTRACTS)


@rule("dot", "mv", "outer", "ger")
def vectors(facts: Facts) -> Value:
    letters = {
        "dot": ("k", "k", ""),
        "mv": ("mk", "k", "m"),
        "outer": ("m", "n", "mn"),
        "ger": ("m", "n", "mn"),
    }
    left, right, out = letters[facts.name]
    first, second = facts.node.args[:2]
    assert isinstance(first, fx.Node) and isinstance(second, fx.Node)
    return contract(facts, [(first, left), (second, right)], out, CONTRACTS)


@rule("scaled_dot_product_attention")
def attention(facts: Facts) -> Value:
    """softmax(q k^T) v: queries keep their place, keys are summed over."""
    query, key, value = (facts.tensor(i, n) for i, n in enumerate(("query", "key", "value")))
    mask, causal = facts.argument(3, "attn_mask"), facts.argument(5, "is_causal", False)
    batch = _batch(max(len(facts.shape(part)) for part in facts.tensors) - 2)
    terms = [
        _aligned(facts, query, [*batch, "q", "e"]),
        _aligned(facts, key, [*batch, "s", "e"]),
        _aligned(facts, value, [*batch, "s", "f"]),
    ]
    if isinstance(mask, fx.Node):
        terms.append(_aligned(facts, mask, [*batch, "q", "s"]))
    result = contract(facts, terms, [*batch, "q", "f"], "attention over tokens")
    heads = (
        len(batch) - 1
    )  # with fewer key heads than query heads, neighbours in this dimension share a key
    if facts.shape(query)[:-2] != facts.shape(key)[:-2] and heads in dict(result.axes):
        return result.mix("attention with grouped heads over a batch of tokens")
    if causal and has_tokens(facts.shape(query)[-2]):
        return result.mix("attention to what comes before the row's own index")
    return result


@rule("conv1d", "conv2d", "convolution")
def convolution(facts: Facts) -> Result:
    """[batch, channels, length...]: a batch of tokens is row-local, a length of tokens is mixed."""
    source, kernel = facts.tensor(0, "input"), facts.tensor(1, "weight")
    weights = [operand for operand in facts.tensors if operand is not source]
    shape, out = facts.shape(source), facts.out_shape
    if not all(facts.value(weight).is_fixed for weight in weights):
        return facts.unknown("convolution with weights that depend on tokens")
    if len(shape) != len(facts.shape(kernel)) or has_tokens(shape[1]):
        return facts.unknown("convolution over tokens as channels")
    value = facts.value(source)
    along = [dim for dim in range(2, len(shape)) if has_tokens(shape[dim])]
    axes = {dim: fitted(axis, out[dim]) for dim, axis in value.axes if dim < 2}
    for dim in along:
        axes[dim] = Axis() if tokens_multiple(out[dim]) == 1 else Axis(kind="odd")
    return make(axes, value.mixed or bool(along), value.why or "convolution over tokens")
