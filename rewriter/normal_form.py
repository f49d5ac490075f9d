"""Normal form: one shape per concept, so that a pass has one spelling to match.

Each rule looks at one node and says what it equals, or None. The graph is functional, so copies and aliases are
their inputs, and every reshaping is spelled `reshape`: a graph in normal form does not depend on strides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from .aliases import first_name
from .graph import TOKENS, is_aten, token_count
from .sink_gates import spell_sink_gates

aten = torch.ops.aten

Value: TypeAlias = Any
"""A node, or a number: what a node equals."""

Rule: TypeAlias = Callable[[fx.Node], Value | None]

ASSERTIONS = (
    "_assert_tensor_metadata",
    "_assert_scalar",
    "_assert_async",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
)


def normalize(module: fx.GraphModule) -> None:
    """Bring a captured graph into normal form, in place. Expects `meta` as rewriter/graph.py describes it."""
    graph = module.graph
    _drop_assertions(graph)
    _unify_sizes(graph)
    for node in list(graph.nodes):
        _spell(node)
        for rule in RULES:
            value = rule(node)
            if value is not None:
                node.replace_all_uses_with(value)
                graph.erase_node(node)
                break
    spell_sink_gates(graph)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()


def _drop_assertions(graph: fx.Graph) -> None:
    """Assertions repeat what `meta` and the guards say, and keep dead values alive."""
    for node in reversed(graph.nodes):
        if is_aten(node, *ASSERTIONS):
            graph.erase_node(node)


def _unify_sizes(graph: fx.Graph) -> None:
    """One node for T, one node per other size, and a plain int for what does not depend on T."""
    ids = next(
        node for node in graph.nodes if node.op == "placeholder" and node.target == "input_ids"
    )
    anchor = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(anchor):
        tokens = graph.call_function(aten.sym_size.int, (ids, 1))
    tokens.meta.update(
        shape=None, dtype=None, path="", source="", size=TOKENS, val=ids.meta["val"].shape[1]
    )
    nodes: dict[sympy.Basic, fx.Node] = {TOKENS: tokens}
    for node in list(graph.nodes):
        size = node.meta.get("size")
        if size is None or node is tokens or node.op != "call_function":
            continue
        if size.is_Integer:
            replacement: fx.Node | int = int(size)
        else:
            replacement = nodes.setdefault(size, node)
        if replacement is not node:
            _replace(node, replacement)


def _replace(node: fx.Node, value: Value) -> None:
    if isinstance(value, fx.Node):
        node.replace_all_uses_with(value)
    else:
        for user in list(node.users):
            user.args = fx.map_arg(user.args, lambda n: value if n is node else n)
            user.kwargs = fx.map_arg(user.kwargs, lambda n: value if n is node else n)


def _spell(node: fx.Node) -> None:
    """Same operation, one name."""
    if isinstance(node.target, torch._ops.OpOverload):
        node.target = first_name(node.target)
    if is_aten(node, "view", "_unsafe_view", "reshape"):
        node.target = aten.reshape.default
        _name_open_size(node)
    elif is_aten(node, "t"):
        node.target, node.args = aten.transpose.int, (node.args[0], 0, 1)
    elif is_aten(node, *FILLS):
        _spell_fill(node)
    elif is_aten(node, "index_put") and _writes_one_number(node):
        target, (mask,), number = node.args[:3]
        node.target, node.args, node.kwargs = aten.where.self, (mask, number, target), {}


def _name_open_size(node: fx.Node) -> None:
    """reshape(x, [1, -1, 64]): what -1 stands for, where that is a number or T."""
    shape = node.meta["shape"]
    if shape is None or -1 not in node.args[1]:
        return
    place = list(node.args[1]).index(-1)
    size = token_count(node.graph) if shape[place] == TOKENS else shape[place]
    if isinstance(size, (int, fx.Node)):
        node.args = (node.args[0], [*node.args[1][:place], size, *node.args[1][place + 1 :]])


def _writes_one_number(node: fx.Node) -> bool:
    """target[mask] = number, the mask of the target's own shape."""
    target, indices, number, *accumulate = node.args
    if len(indices) != 1 or any(accumulate) or node.kwargs.get("accumulate", False):
        return False
    (mask,) = indices
    return (
        isinstance(mask, fx.Node)
        and mask.meta["dtype"] == torch.bool
        and mask.meta["shape"] == target.meta["shape"]
        and number.meta["shape"] == ()
        and number.meta["dtype"] == target.meta["dtype"]
    )


FILLS = {"new_empty": 0, "new_zeros": 0, "new_ones": 1, "new_full": None, "empty": 0, "empty_like": 0, "zeros_like": 0,
         "ones_like": 1, "full_like": None}  # fmt: skip
"""Tensors filled with one number (what `empty` holds is unspecified, so 0 will do), and where the number comes from."""


def _spell_fill(node: fx.Node) -> None:
    """`full(size, value)`: the tensor that lends its shape or dtype is no operand any more."""
    known = {TOKENS: token_count(node.graph)}
    sizes: list[object] = [
        size if isinstance(size, int) else known.get(size) for size in node.meta["shape"]
    ]
    if None in sizes:
        return  # another size in T: the graph has no node for it
    name = node.target._opname
    value = FILLS[name]
    if value is None:
        value = node.args[2 if name == "new_full" else 1]
    fake = node.meta["val"]
    node.target = aten.full.default
    node.args = (sizes, value)
    node.kwargs = {"dtype": node.meta["dtype"], "device": fake.device, "pin_memory": False}


def _same(node: fx.Node, other: object) -> bool:
    """Both hold one tensor of the same shape and dtype."""
    return (
        isinstance(other, fx.Node)
        and node.meta["shape"] is not None
        and node.meta["shape"] == other.meta["shape"]
        and node.meta["dtype"] == other.meta["dtype"]
    )


def copy_of(node: fx.Node) -> Value | None:
    """clone, alias, detach and the like: in a functional graph a copy is its source."""
    if is_aten(node, "clone", "alias", "detach", "contiguous", "lift_fresh_copy", "lift_fresh"):
        return node.args[0]
    if is_aten(node, "copy") and _same(node, node.args[1]):
        return node.args[1]  # copy(destination, source): nothing of the destination survives
    return None


def same_shape(node: fx.Node) -> Value | None:
    """A reshaping or selection that keeps the shape keeps every element where it is."""
    named = is_aten(
        node, "reshape", "expand", "squeeze", "unflatten", "flatten", "slice", "narrow", "repeat"
    )
    if not named or not _same(node, node.args[0]):
        return None
    if is_aten(node, "slice") and len(node.args) > 4 and node.args[4] != 1:
        return None
    return node.args[0]


def same_cast(node: fx.Node) -> Value | None:
    """A cast to what the tensor already is."""
    if not is_aten(node, "_to_copy", "to", "type_as") or not _same(node, node.args[0]):
        return None
    one, two = node.meta["val"], node.args[0].meta["val"]
    return node.args[0] if one.device == two.device and one.layout == two.layout else None


def no_dropout(node: fx.Node) -> Value | None:
    """Dropout outside training, or with probability zero."""
    if is_aten(node, "dropout", "native_dropout", "feature_dropout", "alpha_dropout"):
        probability, training = node.args[1], node.args[2] if len(node.args) > 2 else True
        if (probability == 0 or training is False) and node.meta["shape"] is not None:
            return node.args[0]
    return None


def neutral_element(node: fx.Node) -> Value | None:
    """x * 1, x / 1, and x + 0 of integers (for floats -0.0 + 0 is 0.0)."""
    if len(node.args) != 2 or node.kwargs or not _same(node, node.args[0]):
        return None
    left, right = node.args
    if is_aten(node, "mul", "div") and isinstance(right, (int, float)) and right == 1:
        return left
    whole = node.meta["dtype"] is not None and not node.meta["dtype"].is_floating_point
    if is_aten(node, "add", "sub") and isinstance(right, int) and right == 0 and whole:
        return left
    return None


def identity_permutation(node: fx.Node) -> Value | None:
    """A permutation of dimensions that moves none."""
    if is_aten(node, "permute") and list(node.args[1]) == list(range(len(node.args[1]))):
        return node.args[0]
    if is_aten(node, "transpose") and node.meta["shape"] is not None:
        rank = len(node.meta["shape"])
        if node.args[1] % rank == node.args[2] % rank:
            return node.args[0]
    return None


def single_cat(node: fx.Node) -> Value | None:
    """Concatenation of one tensor."""
    if is_aten(node, "cat") and len(node.args[0]) == 1:
        return node.args[0][0]
    return None


def no_padding(node: fx.Node) -> Value | None:
    """Padding by nothing."""
    if is_aten(node, "pad", "constant_pad_nd") and all(width == 0 for width in node.args[1]):
        return node.args[0]
    return None


def taken_from_split(node: fx.Node) -> Value | None:
    """The only piece of a split into one."""
    if node.op != "call_function" or node.target is not operator.getitem or node.args[1] != 0:
        return None
    source = node.args[0]
    if is_aten(source, "split", "split_with_sizes", "chunk") and _same(node, source.args[0]):
        return source.args[0]
    return None


RULES: tuple[Rule, ...] = (
    copy_of,
    same_shape,
    same_cast,
    no_dropout,
    neutral_element,
    identity_permutation,
    single_cat,
    no_padding,
    taken_from_split,
)
