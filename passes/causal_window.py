"""The last K inputs of every token of one row -> of every token of its sequence, with the last
inputs as state.

    before   unfold(pad(x [1, C, T], [K - 1, 0]), dim=2, size=K, step=1)
    after    regraft.causal_window(x [T, C], K, 1, state, sequences) -> [T, C, K]

The windows of a convolution whose taps differ by token; what is done with them is row-local. Not
for windows that skip tokens, look ahead, or are padded with anything but zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

from regraft.kernels.causal_conv import causal_window
from regraft.rewriter.graph import TOKENS, is_aten, named_arguments
from regraft.rewriter.pattern import Declined, Grafting, Pass, Region

from .causal_conv import PADDINGS, pads_with_zeros
from .leaf_rows import (
    Call,
    Sizes,
    as_rows,
    bind_sizes,
    own_state,
    replace_call,
    sequences,
)

ROWS, WINDOWS = "1 C T", "1 C T K"


@dataclass(frozen=True)
class Plan:
    """Windows that the operator serves."""

    call: Call
    sizes: Sizes
    width: int


def pattern(region: Region) -> Call | Declined:
    """An unfold and its padding."""
    unfold = region.closer
    if not is_aten(unfold, "unfold"):
        return Declined("not windows over tokens", unfold)
    arguments = named_arguments(unfold)
    padded = arguments["self"]
    if not is_aten(padded, *PADDINGS) or not pads_with_zeros(padded):
        return Declined("windows of a row that is not padded with zeros", unfold, 0.3)
    left, right = named_arguments(padded)["pad"]
    return Call(region, "unfold", {**arguments, "input": padded.args[0], "beside": (left, right)})


def check(call: Call) -> Plan | Declined:
    """A window per token, the token itself its last place."""
    sizes = bind_sizes(call, {"input": ROWS})
    if isinstance(sizes, Declined):
        return sizes
    arguments = call.arguments
    if arguments["dimension"] not in (2, -1) or arguments["step"] != 1:
        return Declined("the windows skip tokens", call.closer, 0.6)
    if arguments["beside"] != (arguments["size"] - 1, 0):
        beside = "padded by {} and {}".format(*arguments["beside"])
        return Declined(f"windows of {arguments['size']} are {beside}", call.closer, 0.6)
    return Plan(call, sizes, arguments["size"])


def rewrite(plan: Plan, grafting: Grafting) -> None:
    """Rows into the operator, its windows back into unfold's layout."""
    call, channels, width = plan.call, plan.sizes["C"], plan.width
    dtype = call.closer.meta["dtype"]
    out = grafting.call(
        causal_window._opoverload,
        *(as_rows(call, "input", ROWS, grafting), width, 1),
        own_state(grafting, "conv", (channels, width - 1), dtype),
        *sequences(grafting),
        shape=(TOKENS, channels, width),
        dtype=dtype,
    )
    replace_call(call, out, WINDOWS, grafting)


PASS = Pass(
    "causal_window",
    kind="conv",
    operator="regraft::causal_window",
    pattern=pattern,
    check=check,
    rewrite=rewrite,
)
