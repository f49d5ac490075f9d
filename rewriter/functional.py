"""From an exported program to a graph of functional operators.

`ExportedProgram.run_decompositions` makes one by tracing the whole program again, twice over, which takes as long as
the export did. Most programs need little of it: they hold functional operators, some spelled in a way of their own,
and a few that write into a tensor of which nothing else is left. Those are spelled anew here. A program with anything
else is traced again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._ops import OperatorBase, OpOverload
from torch.export import ExportedProgram, default_decompositions

from .graph import is_aten, named_arguments
from .untouched import storage_key
from .wrapped_weights import is_wrapper, reads_part

aten = torch.ops.aten

POINTWISE = ("add_", "sub_", "mul_", "div_", "neg_", "exp_", "sigmoid_", "tanh_", "relu_", "silu_")
"""Operators that write into their first operand. Without the underscore they give the same, if all dtypes are equal."""

LIKE_FIRST = ("masked_fill_", "scatter_", "index_add_")
"""Such operators, whose result has the dtype of their first operand whatever the others have."""

Memory: TypeAlias = dict[int, list[fx.Node]]
"""The nodes whose values lie in the same memory, in the order of the graph."""

CAST = ("dtype", "layout", "device", "pin_memory", "memory_format")
"""What `_to_copy` takes of the arguments of `to`."""


def functional(
    program: ExportedProgram, taken_apart: Mapping[OpOverload, Callable[..., object]]
) -> ExportedProgram:
    """The program, which is changed, without writes and without the operators that are to be taken apart."""
    graph = program.graph_module.graph
    memory = _by_memory(graph)
    if not all(_can_stay(node, taken_apart, memory) for node in graph.nodes):
        return program.run_decompositions({**taken_apart, **_own_composites(graph)})
    for node in list(graph.nodes):
        if is_aten(node, "copy_"):
            _write_part_elsewhere(node)
        elif is_aten(node, *POINTWISE, *LIKE_FIRST):
            _write_elsewhere(node)
        elif is_aten(node, "to"):
            _spell_cast(node)
        elif is_aten(node, "flatten"):
            node.target, node.args = aten.reshape.default, (node.args[0], _flat_shape(node))
        elif is_aten(node, "chunk"):
            node.target, node.args = aten.split.Tensor, (node.args[0], _piece(node), *node.args[2:])
    graph.lint()
    return program


def _can_stay(node: fx.Node, taken_apart: Mapping[OpOverload, object], memory: Memory) -> bool:
    """Whether a node is functional, or can be spelled so."""
    if node.op != "call_function":
        return node.op != "get_attr"  # the graph of an operator over graphs
    target = node.target
    if not isinstance(target, OpOverload):
        return not isinstance(target, OperatorBase)
    if target in taken_apart or _is_own_composite(target):
        return False
    if any(is_wrapper(each.meta.get("val")) for each in node.all_input_nodes):
        return reads_part(node)
    if target._schema.is_mutable:
        can = _fills_part if is_aten(node, "copy_") else _writes_alone
        return can(node, memory)
    if is_aten(node, "chunk"):
        return _piece(node) is not None
    if is_aten(node, "flatten"):
        return _flat_shape(node) is not None
    if is_aten(node, "dropout"):
        return node.args[2] is False
    if torch.Tag.maybe_aliasing_or_mutating in target.tags or is_aten(node, "native_batch_norm"):
        return False  # their schemas do not say what they do
    may_be_view = any(result.alias_info for result in target._schema.returns)
    return not (may_be_view and _is_composite(target)) or is_aten(
        node, "to", "reshape", "contiguous"
    )


def _is_composite(target: OpOverload) -> bool:
    """Whether torch defines an operator by others. Tracing keeps those that can be no view of their operand."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    defined: bool = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key)
    return defined or key in target.py_kernels


def _is_own_composite(target: OpOverload) -> bool:
    """Whether a library defines its operator by others, of which the proof knows more."""
    return target.namespace not in ("aten", "regraft") and _is_composite(target)


def _own_composites(graph: fx.Graph) -> dict[OpOverload, Callable[..., object]]:
    found = {node.target for node in graph.nodes if isinstance(node.target, OpOverload)}
    found = {target for target in found if _is_own_composite(target)}
    table = default_decompositions() if found else {}
    return {target: table[target] for target in found if target in table}


def _writes_alone(node: fx.Node, memory: Memory) -> bool:
    """Whether op_(x, y) gives what op(x, y) gives, and whatever else lies in the memory of x is not read any more."""
    pointwise = is_aten(node, *POINTWISE)
    if not pointwise and not is_aten(node, *LIKE_FIRST):
        return False
    base = node.args[0]
    value = base.meta["val"]
    if value.shape != node.meta["val"].shape or (pointwise and not value.dtype.is_floating_point):
        return False
    operands = [operand.meta["val"] for operand in node.all_input_nodes]
    if pointwise and not all(getattr(each, "dtype", None) == value.dtype for each in operands):
        return False
    return _is_alone(node, base, memory)


def _fills_part(node: fx.Node, memory: Memory) -> bool:
    """x[..., i:j] = y of one shape and dtype, where nothing but x lies in its memory."""
    part, source = node.args[:2]
    if not is_aten(part, "slice") or not isinstance(source, fx.Node):
        return False
    one, two = part.meta["val"], source.meta["val"]
    return (
        one.shape == two.shape
        and one.dtype == two.dtype
        and [*part.users] == [node]
        and not node.users
        and storage_key(one) != storage_key(two)
        and _is_alone(node, _whole(part), memory)
    )


def _whole(part: fx.Node) -> fx.Node:
    """What a slice, of a slice, is a part of."""
    while is_aten(part, "slice"):
        part = part.args[0]
    return part


def _is_alone(write: fx.Node, base: fx.Node, memory: Memory) -> bool:
    """Whether no node before a write shares the memory of `base` and is read after it, and none of them is given."""
    return all(
        node.op == "call_function"
        and (node is base or all(user < write or user is write for user in node.users))
        for node in memory[storage_key(base.meta["val"])]
        if node < write
    )


def _by_memory(graph: fx.Graph) -> Memory:
    found: Memory = defaultdict(list)
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            found[storage_key(value)].append(node)
    return found


def _write_elsewhere(node: fx.Node) -> None:
    """x.op_(y) as op(x, y), which is what x is from here on."""
    base, written = node.args[0], node.target
    assert isinstance(base, fx.Node) and isinstance(written, OpOverload)
    packet = getattr(aten, written._opname.removesuffix("_"))
    node.target = getattr(packet, written._overloadname)
    base.replace_all_uses_with(node, delete_user_cb=lambda user: node < user)


def _write_part_elsewhere(node: fx.Node) -> None:
    """x[i:j] = y as slice_scatter(x, y, ...), which is what x is from here on; the same for a slice of a slice."""
    part, written = node.args[:2]
    assert isinstance(part, fx.Node)
    base = _whole(part)
    while part is not base:
        within, *place = part.args
        assert isinstance(within, fx.Node)
        with node.graph.inserting_before(node):
            written = node.graph.call_function(
                aten.slice_scatter.default, (within, written, *place)
            )
        written.meta = {**node.meta, "val": within.meta["val"]}
        part = within
    assert isinstance(written, fx.Node)
    base.replace_all_uses_with(written, delete_user_cb=lambda user: node < user)
    node.graph.erase_node(node)


def _spell_cast(node: fx.Node) -> None:
    """`to` as a copy; the normal form drops those that change nothing."""
    arguments = named_arguments(node)
    if "other" in arguments:
        wanted = node.meta["val"]
        arguments |= {"dtype": wanted.dtype, "device": wanted.device}
    node.target, node.args = aten._to_copy.default, (node.args[0],)
    node.kwargs = {name: arguments[name] for name in CAST if arguments.get(name) is not None}


def _flat_shape(node: fx.Node) -> list[int] | None:
    """The shape that `flatten` makes, a size in tokens as -1; None if there are several of these."""
    sizes = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
    return sizes if sizes.count(-1) <= 1 else None


def _piece(node: fx.Node) -> int | None:
    """The size of each piece of a `chunk`; None if it is not the same number in all, or depends on the tokens."""
    arguments = named_arguments(node)
    pieces: list[Any] = node.meta["val"]
    sizes = [piece.shape[arguments["dim"]] for piece in pieces]
    if len(sizes) != arguments["chunks"] or not all(isinstance(size, int) for size in sizes):
        return None
    return sizes[0] if len(set(sizes)) == 1 else None
