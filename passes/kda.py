"""Kimi delta attention over one row -> over the sequences of a packed row, with a state per
request.

    before   chunk_kda(query [1, T, H, K], key, value [1, T, H, V], g [1, T, H, K], beta [1, T, H])
    after    regraft.kda(q [T, H, K], k, v, g, beta, state, sequences) -> [T, H, V]

Not where the function starts from a state of its caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regraft.kernels.kda import kda
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
    "query": "1 T H K",
    "key": "1 T H K",
    "value": "1 T H V",
    "g": "1 T H K",
    "beta": "1 T H",
}


@dataclass(frozen=True)
class Plan:
    """A call that the operator serves."""

    call: Call
    sizes: Sizes


def pattern(region: Region) -> Call | Declined:
    """The call of the function."""
    return find_leaf(region, "chunk_kda")


def check(call: Call) -> Plan | Declined:
    """Rows as they should be, and no state that comes from elsewhere."""
    if call.arguments["initial_state"] is not None:
        return Declined(
            "starts from a given state", call.closer, 0.8, fix="the function started from zero"
        )
    sizes = bind_sizes(call, LAYOUTS)
    return sizes if isinstance(sizes, Declined) else Plan(call, sizes)


def rewrite(plan: Plan, grafting: Grafting) -> None:
    """Rows into the operator, its rows back into the function's layout."""
    call, sizes = plan.call, plan.sizes
    rows = [as_rows(call, name, layout, grafting) for name, layout in LAYOUTS.items()]
    heads, width = sizes["H"], sizes["V"]
    out = grafting.call(
        kda._opoverload,
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
    "kda", kind="kda", operator="regraft::kda", pattern=pattern, check=check, rewrite=rewrite
)
