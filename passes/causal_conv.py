"""Causal depthwise convolution over one row -> over the sequences of a packed row, with the last
inputs as state.

    before   causal_conv1d_fn(x [1, C, T], weight [C, K], bias, activation)
    or       conv1d(x, weight [C, 1, K], bias, padding=W, dilation=d, groups=C)[:, :, :T]      W = (K - 1) d
    or       conv1d(pad(x, [W, 0]), weight, bias, dilation=d, groups=C)
    after    regraft.causal_conv(x [T, C], weight, bias, activation, d, state, sequences) -> [T, C]

Not for a convolution that mixes channels, strides, looks ahead, or is padded with anything but
zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from regraft.kernels.causal_conv import causal_conv
from regraft.kernels.causal_conv.schema import ACTIVATIONS
from regraft.rewriter.graph import TOKENS, is_aten, named_arguments, shape_of
from regraft.rewriter.leaves import is_leaf
from regraft.rewriter.pattern import Declined, Grafting, Pass, Region

from .leaf_rows import (
    Call,
    Sizes,
    as_rows,
    bind_sizes,
    find_leaf,
    own_state,
    replace_call,
    sequences,
)

aten = torch.ops.aten

LEAF = "causal_conv1d_fn"
ROWS = "1 C T"
SAME_ACTIVATION = {"swish": "silu"}
PADDINGS = ("pad", "constant_pad_nd")


@dataclass(frozen=True)
class Plan:
    """A call that the operator serves."""

    call: Call
    sizes: Sizes
    activation: str | None
    dilation: int


def pattern(region: Region) -> Call | Declined:
    """The function's call, or a convolution and its padding."""
    closer = region.closer
    if is_leaf(closer, LEAF):
        return find_leaf(region, LEAF)
    conv = named_arguments(closer)["self"] if is_aten(closer, "slice") else closer
    if not is_aten(conv, "conv1d"):
        return Declined("not a convolution over tokens", closer)
    if closer is not conv and not _keeps_first_tokens(closer):
        return Declined("not the first T places of a padded convolution", closer, 0.3)
    return Call(region, "conv1d", conv_arguments(conv))


def conv_arguments(conv: fx.Node) -> dict[str, Any]:
    """The arguments of conv1d by name, zeros beside its input seen through. `left`: zeros before
    it, None if unknown.
    """
    arguments = named_arguments(conv)
    padding = arguments["padding"]
    arguments["left"] = None if isinstance(padding, str) else padding[0]
    source = arguments["input"]
    if is_aten(source, *PADDINGS) and pads_with_zeros(source):
        beside = named_arguments(source)["pad"]
        arguments["input"] = source.args[0]
        arguments["left"] = beside[0] if arguments["left"] == 0 else None
    return arguments


def pads_with_zeros(node: fx.Node) -> bool:
    """Whether this padding is of the last dimension alone, with zeros."""
    arguments = named_arguments(node)
    constant = arguments.get("mode", "constant") == "constant"
    return constant and not arguments["value"] and len(arguments["pad"]) == 2


def _keeps_first_tokens(node: fx.Node) -> bool:
    """Whether this is x[:, :, :T]."""
    arguments, shape = named_arguments(node), shape_of(node)
    from_start = arguments["start"] in (None, 0) and arguments["step"] == 1
    return from_start and arguments["dim"] % len(shape) == 2 and shape[2] == TOKENS


def check(call: Call) -> Plan | Declined:
    """Depthwise, causal, and one row per token."""
    if call.name == LEAF:
        sizes = bind_sizes(call, {"hidden_states": ROWS, "weight": "C K", "bias": "C"})
        if isinstance(sizes, Declined):
            return sizes
        activation = call.arguments["activation"]
        activation = SAME_ACTIVATION.get(activation, activation)
        if activation is not None and activation not in ACTIVATIONS:
            return Declined(f"activation {activation!r} is not known", call.closer, 0.8)
        return Plan(call, sizes, activation, 1)
    return _check_plain(call)


def _check_plain(call: Call) -> Plan | Declined:
    if is_aten(call.arguments["input"], *PADDINGS):
        return Declined("padded with other than zeros", call.node("input"), 0.6)
    sizes = bind_sizes(call, {"input": ROWS})
    if isinstance(sizes, Declined):
        return sizes
    if call.arguments["groups"] != sizes["C"]:
        return Declined("the convolution mixes channels", call.closer, 0.6)
    sizes = bind_sizes(call, {"input": ROWS, "weight": "C 1 K", "bias": "C"})
    if isinstance(sizes, Declined):
        return sizes
    (dilation,) = call.arguments["dilation"]
    window = (sizes["K"] - 1) * dilation
    if [*call.arguments["stride"]] != [1]:
        return Declined("the convolution skips tokens", call.closer, 0.6)
    if call.arguments["left"] != window:
        padding = f"padded by {call.arguments['left']} on the left, causal would be {window}"
        return Declined(f"the convolution is {padding}", call.closer, 0.6)
    return Plan(call, sizes, None, dilation)


def rewrite(plan: Plan, grafting: Grafting) -> None:
    """Rows into the operator, its rows back into the convolution's layout."""
    call, sizes = plan.call, plan.sizes
    source = "hidden_states" if call.name == LEAF else "input"
    x, weight = as_rows(call, source, ROWS, grafting), call.node("weight")
    channels, width = sizes["C"], sizes["K"]
    if len(shape_of(weight)) == 3:
        dtype = weight.meta["dtype"]
        shape = (channels, width)
        weight = grafting.call(aten.select.int, weight, 1, 0, shape=shape, dtype=dtype)
    dtype = call.node(source).meta["dtype"]
    out = grafting.call(
        causal_conv._opoverload,
        *(x, weight, call.arguments["bias"], plan.activation, plan.dilation),
        own_state(grafting, "conv", (channels, (width - 1) * plan.dilation), dtype),
        *sequences(grafting),
        shape=(TOKENS, channels),
        dtype=dtype,
    )
    replace_call(call, out, ROWS, grafting)


PASS = Pass(
    "causal_conv",
    kind="conv",
    operator="regraft::causal_conv",
    pattern=pattern,
    check=check,
    rewrite=rewrite,
)
