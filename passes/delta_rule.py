"""Gated delta rule over one row -> over the sequences of a packed row, with a state per request.

    before   chunk_gated_delta_rule(query [1, T, Hk, K], key, value [1, T, Hv, V], g, beta [1, T, Hv])
    after    regraft.gated_delta_rule(q [T, Hk, K], k, v, g, beta, state, sequences) -> [T, Hv, V]

Not where the function starts from a state of its caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regraft.kernels.delta_rule import gated_delta_rule
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

LAYOUTS = {
    "query": "1 T Hk K",
    "key": "1 T Hk K",
    "value": "1 T Hv V",
    "g": "1 T Hv",
    "beta": "1 T Hv",
}


@dataclass(frozen=True)
class Plan:
    """A call that the operator serves."""

    call: Call
    sizes: Sizes


def pattern(region: Region) -> Call | Declined:
    """The call of the function."""
    return find_leaf(region, "chunk_gated_delta_rule")


def check(call: Call) -> Plan | Declined:
    """Rows as they should be, heads in groups, and no state that comes from elsewhere."""
    if call.arguments["initial_state"] is not None:
        return Declined(
            "starts from a given state", call.closer, 0.8, fix="the function started from zero"
        )
    sizes = bind_sizes(call, LAYOUTS)
    if isinstance(sizes, Declined):
        return sizes
    if sizes["Hv"] % sizes["Hk"]:
        heads = f"{sizes['Hv']} value heads are no multiple of {sizes['Hk']} key heads"
        return Declined(heads, call.closer, 0.8)
    return Plan(call, sizes)


def rewrite(plan: Plan, grafting: Grafting) -> None:
    """Rows into the operator, its rows back into the function's layout."""
    call, sizes = plan.call, plan.sizes
    rows = [as_rows(call, name, layout, grafting) for name, layout in LAYOUTS.items()]
    heads, width = sizes["Hv"], sizes["V"]
    out = grafting.call(
        gated_delta_rule._opoverload,
        *rows,
        own_state(grafting, "state", (heads, sizes["K"], width), torch.float32),
        *sequences(grafting),
        sizes["K"] ** -0.5,
        call.arguments["use_qk_l2norm_in_kernel"],
        shape=(TOKENS, heads, width),
        dtype=call.node("query").meta["dtype"],
    )
    replace_call(call, out, LAYOUTS["value"], grafting)


PASS = Pass(
    "delta_rule",
    kind="delta_rule",
    operator="regraft::gated_delta_rule",
    pattern=pattern,
    check=check,
    rewrite=rewrite,
)
