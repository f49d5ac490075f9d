"""Which operator takes the place of which: a rule reads a node and says its invariant form, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from regraft.kernels.invariant import schema
from regraft.rewriter.graph import is_row, shape_of
from regraft.rewriter.pattern import Declined
from regraft.rewriter.token_axis.value import has_tokens

operators = torch.ops.regraft


@dataclass(frozen=True)
class Form:
    """The operator to call, with what. With `output`, it is that one of its outputs."""

    operator: Callable[..., Any]
    args: tuple[Any, ...]
    output: int | None = None


Given = Mapping[str, Any]
Rule = Callable[[fx.Node, Given, set[fx.Node]], "Form | Declined | None"]
"""(node, its arguments by name, nodes that are the same in each step); None: the node may stay as it is."""

RULES: dict[str, Rule] = {}
"""By name of the ATen operator, any overload."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


ELEMENTWISE = frozenset(
    ["sigmoid", "silu", "mish", "exp2", "gelu", "softplus", "elu", "rsqrt", "pow"]
)
"""Of RULES, those that compute element by element: on a GPU every element goes through the same instructions."""


def form_of(node: fx.Node, fixed: set[fx.Node], device: str = "cpu") -> Form | Declined | None:
    """What replaces a node on a device of this type."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if device == "cuda" and target.namespace == "aten" and target._opname in ELEMENTWISE:
        return None
    if target.namespace == "regraft" and target._opname in schema.GRAFTED:
        operator = getattr(operators, f"invariant_{target._opname}").default
        return Form(operator, tuple(_given(node).values()))
    if target.namespace != "aten" or target._opname not in RULES:
        return None
    return RULES[target._opname](node, _given(node), fixed)


def _given(node: fx.Node) -> dict[str, Any]:
    """The arguments in the order of the schema, by name, defaults filled in."""
    arguments = node.target._schema.arguments
    given = {**dict(zip([argument.name for argument in arguments], node.args)), **node.kwargs}
    return {a.name: given.get(a.name, a.default_value) for a in arguments}


@rule("linear")
def linear(node: fx.Node, given: Given, fixed: set[fx.Node]) -> Form | Declined:
    if given["weight"] not in fixed:
        return Declined("the weight of a linear map depends on tokens", node)
    if given.get("bias") is not None and not is_row(given["bias"]):
        return Declined("a linear map with a bias of several rows", node)
    return Form(
        operators.invariant_linear.default, (given["input"], given["weight"], given.get("bias"))
    )


@rule("addmm")
def addmm(node: fx.Node, given: Given, fixed: set[fx.Node]) -> Form | Declined:
    if given["mat2"] not in fixed or given["self"] not in fixed:
        return Declined("a product whose weight or bias depends on tokens", node)
    if given["beta"] != 1 or given["alpha"] != 1:
        return Declined("a product with factors", node)
    if not is_row(given["self"]):
        return Declined("a product with a bias of several rows", node)
    weight = transposed(given["mat2"], node)
    return Form(operators.invariant_linear.default, (given["mat1"], weight, given["self"]))


def transposed(weight: fx.Node, before: fx.Node) -> fx.Node:
    """A matrix as [out, in]: a node in front of `before`."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(torch.ops.aten.transpose.int, (weight, 0, 1))
    node.meta.update(weight.meta, shape=tuple(reversed(shape_of(weight))))
    node.meta.pop("val", None)
    return node


@rule("matmul", "mm", "bmm")
def matmul(node: fx.Node, given: Given, fixed: set[fx.Node]) -> Form | Declined:
    left, right = list(given.values())[:2]
    if min(len(shape_of(left)), len(shape_of(right))) < 2:
        return Declined("a product with a vector", node)
    if right in fixed or left in fixed:
        which = "right" if right in fixed else "left"
        return Form(operators.invariant_matmul.default, (left, right, which))
    if any(map(has_tokens, (*shape_of(left)[-2:], *shape_of(right)[-2:]))):
        return Declined("a product of tokens with tokens", node)
    return Form(operators.invariant_matmul.default, (left, right, "none"))


@rule("sum", "mean")
def total(node: fx.Node, given: Given, fixed: set[fx.Node]) -> Form | Declined | None:
    source, dims = given["self"], given.get("dim")
    if not source.meta["dtype"].is_floating_point:
        return None
    if dims is None or dims == []:
        return Declined("a sum over all of a tensor", node)
    dims = [dims] if isinstance(dims, int) else list(dims)
    source = as_dtype(source, node.meta["dtype"], node)
    args = (source, dims, given.get("keepdim", False), node.target._opname == "mean")
    return Form(operators.invariant_sum.default, args)


def as_dtype(source: fx.Node, dtype: torch.dtype, before: fx.Node) -> fx.Node:
    """`source` converted, where it is of another dtype."""
    if source.meta["dtype"] == dtype:
        return source
    with before.graph.inserting_before(before):
        node = before.graph.call_function(
            torch.ops.aten._to_copy.default, (source,), {"dtype": dtype}
        )
    node.meta.update(source.meta, dtype=dtype)
    node.meta.pop("val", None)
    return node


@rule("softmax", "_softmax", "log_softmax", "_log_softmax")
def softmax(node: fx.Node, given: Given, fixed: set[fx.Node]) -> Form:
    is_log = "log" in node.target._opname
    args = (given["self"], given["dim"], node.meta["dtype"], is_log)
    return Form(operators.invariant_softmax.default, args)


@rule("layer_norm", "rms_norm")
def norm(node: fx.Node, given: Given, fixed: set[fx.Node]) -> Form:
    eps = given["eps"]
    if eps is None:
        eps = torch.finfo(node.meta["dtype"]).eps
    args = (
        given["input"], len(given["normalized_shape"]), given.get("weight"), given.get("bias"), eps,
        node.target._opname == "layer_norm",
    )  # fmt: skip
    return Form(operators.invariant_norm.default, args)


@rule("topk")
def topk(node: fx.Node, given: Given, fixed: set[fx.Node]) -> Form:
    args = (given["self"], given["k"], given["dim"], given["largest"])
    return Form(operators.invariant_topk.default, args)


@rule("sort", "argsort")
def sort(node: fx.Node, given: Given, fixed: set[fx.Node]) -> Form:
    args = (given["self"], given["dim"], given["descending"])
    output = 1 if node.target._opname == "argsort" else None
    return Form(operators.invariant_sort.default, args, output)


@rule("sigmoid", "silu", "mish", "exp2")
def plain(node: fx.Node, given: Given, fixed: set[fx.Node]) -> Form:
    return pointwise(node, given, node.target._opname)


@rule("gelu")
def gelu(node: fx.Node, given: Given, fixed: set[fx.Node]) -> Form:
    return pointwise(node, given, "gelu_tanh" if given["approximate"] == "tanh" else "gelu")


@rule("softplus")
def softplus(node: fx.Node, given: Given, fixed: set[fx.Node]) -> Form:
    return pointwise(node, given, "softplus", given["beta"], given["threshold"])


@rule("elu")
def elu(node: fx.Node, given: Given, fixed: set[fx.Node]) -> Form:
    return pointwise(node, given, "elu", given["alpha"], given["scale"], given["input_scale"])


@rule("rsqrt")
def rsqrt(node: fx.Node, given: Given, fixed: set[fx.Node]) -> Form | None:
    is_half = node.meta["dtype"] in (torch.float16, torch.bfloat16)
    return pointwise(node, given, "rsqrt") if is_half else None


@rule("pow")
def power(node: fx.Node, given: Given, fixed: set[fx.Node]) -> Form | None:
    return pointwise(node, given, "rsqrt") if given.get("exponent") == -0.5 else None


def pointwise(node: fx.Node, given: Given, function: str, *options: float) -> Form:
    args = (given["self"], function, [float(option) for option in options])
    return Form(operators.invariant_pointwise.default, args)
