"""Mamba-2's scan over one row -> over the sequences of a packed row, with a state per request.

    before   mamba_chunk_scan_combined(hidden_states [1, T, H, P], dt [1, T, H], A [H], B, C [1, T, G, S], D, dt_bias)
    after    regraft.ssd(x [T, H, P], dt, A, B, C, D, dt_bias, ..., state, sequences) -> [T, H, P]

The limits on dt hold for every token, as in the function; transformers' own one-token update
forgets them. Not where the function starts from a state of its caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regraft.kernels.ssd import ssd
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

ROWS = {"hidden_states": "1 T H P", "dt": "1 T H", "B": "1 T G S", "C": "1 T G S"}
WEIGHTS = {"A": "H", "D": "H", "dt_bias": "H"}


@dataclass(frozen=True)
class Plan:
    """A call that the operator serves."""

    call: Call
    sizes: Sizes
    dt_limit: tuple[float, float]


def pattern(region: Region) -> Call | Declined:
    """The call of the function."""
    return find_leaf(region, "mamba_chunk_scan_combined")


def check(call: Call) -> Plan | Declined:
    """Rows and weights as they should be, heads in groups, and no state that comes from elsewhere."""
    if call.arguments["initial_states"] is not None:
        return Declined(
            "starts from a given state", call.closer, 0.8, fix="the function started from zero"
        )
    sizes = bind_sizes(call, ROWS | WEIGHTS)
    if isinstance(sizes, Declined):
        return sizes
    if sizes["H"] % sizes["G"]:
        heads = f"{sizes['H']} heads are no multiple of {sizes['G']} groups"
        return Declined(heads, call.closer, 0.8)
    low, high = (float(limit) for limit in call.arguments["dt_limit"])
    return Plan(call, sizes, (low, high))


def rewrite(plan: Plan, grafting: Grafting) -> None:
    """Rows into the operator, its rows back into the function's layout."""
    call, sizes = plan.call, plan.sizes
    x, dt, B, C = (as_rows(call, name, layout, grafting) for name, layout in ROWS.items())
    A, D, dt_bias = (call.arguments[name] for name in WEIGHTS)
    heads, width = sizes["H"], sizes["P"]
    out = grafting.call(
        ssd._opoverload,
        *(x, dt, A, B, C, D, dt_bias, call.arguments["dt_softplus"], *plan.dt_limit),
        own_state(grafting, "state", (heads, width, sizes["S"]), torch.float32),
        *sequences(grafting),
        shape=(TOKENS, heads, width),
        dtype=torch.float32,
    )
    replace_call(call, out, ROWS["hidden_states"], grafting)


PASS = Pass(
    "ssd", kind="ssd", operator="regraft::ssd", pattern=pattern, check=check, rewrite=rewrite
)
