"""Mamba-1's scan over one row -> over the sequences of a packed row, with a state per request.

    before   selective_scan_fn(hidden_states [1, C, T], dt, A [C, S], B, C [1, S, T], D, z, delta_bias)
    after    regraft.selective_scan(x [T, C], dt, A, B, C, D, z, dt_bias, state, sequences) -> [T, C]

A mixer with several heads calls the function once a head; each call keeps a state of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regraft.kernels.selective_scan import selective_scan
from regraft.rewriter.graph import TOKENS
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

ROWS = {
    "hidden_states": "1 C T",
    "dt": "1 C T",
    "B": "1 S T",
    "C": "1 S T",
    "z": "1 C T",
}
WEIGHTS = {"A": "C S", "D": "C", "delta_bias": "C"}


@dataclass(frozen=True)
class Plan:
    """A call that the operator serves."""

    call: Call
    sizes: Sizes


def pattern(region: Region) -> Call | Declined:
    """The call of the function."""
    return find_leaf(region, "selective_scan_fn")


def check(call: Call) -> Plan | Declined:
    """Rows and weights as they should be."""
    sizes = bind_sizes(call, ROWS | WEIGHTS)
    return sizes if isinstance(sizes, Declined) else Plan(call, sizes)


def rewrite(plan: Plan, grafting: Grafting) -> None:
    """Rows into the operator, its rows back into the function's layout."""
    call, sizes = plan.call, plan.sizes
    x, dt, B, C, z = (as_rows(call, name, layout, grafting) for name, layout in ROWS.items())
    A, D, bias = (call.arguments[name] for name in WEIGHTS)
    dtype = call.node("hidden_states").meta["dtype"]
    for other in (D, z):
        if other is not None:
            dtype = torch.promote_types(dtype, other.meta["dtype"])
    out = grafting.call(
        selective_scan._opoverload,
        *(x, dt, A, B, C, D, z, bias, call.arguments["delta_softplus"]),
        own_state(grafting, "state", (sizes["C"], sizes["S"]), torch.float32),
        *sequences(grafting),
        shape=(TOKENS, sizes["C"]),
        dtype=dtype,
    )
    replace_call(call, out, ROWS["hidden_states"], grafting)


PASS = Pass(
    "selective_scan",
    kind="selective_scan",
    operator="regraft::selective_scan",
    pattern=pattern,
    check=check,
    rewrite=rewrite,
)
