"""A module whose loop over blocks of tokens is linear attention with a constant decay -> the operator, and the rest of
the module around it.

    before   module_leaf([x [1, T, C], ...])
    after    what the module computes before its scan, regraft.decayed_linear(...), what it computes after it

Found within one block, where the loop runs once (passes/decayed_scan.py). That the module goes on like this from block
to block is measured, on random rows, against its own forward.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn

from regraft.rewriter.errors import RewriteError
from regraft.rewriter.graph import TOKENS, is_aten
from regraft.rewriter.leaf_trace import LeafTrace, trace_leaf
from regraft.rewriter.leaves import LeafUnsupported
from regraft.rewriter.meta_twin import on_meta
from regraft.rewriter.module_leaf import ModuleCall
from regraft.rewriter.opaque import twin_key
from regraft.rewriter.pattern import Declined, Grafting, Pass
from regraft.rewriter.pipeline import Rewriting
from regraft.rewriter.pipeline import rewrite as rewrite_graph

from . import decayed_scan
from .leaf_copy import copy_leaf
from .leaf_rows import own_state
from .module_calls import TOLERANCE, LeafCall, find_call, relative_difference, with_numbers

aten = torch.ops.aten

SHORT = 7
"""Tokens that the module is traced over. One with shorter blocks is declined."""

METADATA = ("cu_seqlens", "context_lens", "state_slots")


@dataclass(frozen=True)
class Plan:
    """The module as a graph with the operator in it. `looked_at` is the call that was traced and is compared with."""

    found: LeafCall
    looked_at: ModuleCall
    trace: LeafTrace
    state: Rewriting


def check(found: LeafCall) -> Plan | Declined:
    """One scan in it and nothing else that mixes, of rows only, and the same over several blocks."""
    call = with_numbers(found.call, only_buffers=True)
    plan = _look(found, call)
    if isinstance(plan, Declined):
        return plan
    state = plan.state
    read = {str(node.target) for node in state.graph.nodes if node.op == "get_attr"}
    for i, node in enumerate(found.given):
        if plan.trace.tables.get(i) in read and node not in found.region.inputs:
            return Declined("the module reads what is not one row per token", node, 0.7)
    error = difference(plan) if call is found.call else _difference_at_random(plan)
    dtype = found.region.closer.meta["dtype"]
    if not error <= TOLERANCE.get(dtype, 0.0):
        return Declined(
            f"over several blocks the module is not this linear attention: {error:.1e} off",
            found.region.closer,
            0.9,
        )
    return plan


_declined: WeakKeyDictionary[fx.Graph, dict[Hashable, Declined]] = WeakKeyDictionary()
"""By graph, why modules of a kind are declined: a trace of a whole layer takes seconds, and a model has many alike."""


def _look(found: LeafCall, call: ModuleCall) -> Plan | Declined:
    """The module over few tokens, its scan grafted."""
    closer = found.region.closer
    trace = _trace(found, call)
    if isinstance(trace, Declined):
        return trace
    try:
        state = rewrite_graph(
            trace.captured, [decayed_scan.ZEROS, decayed_scan.PASS], fallback="refuse"
        )
    except RewriteError as problem:
        return Declined(f"over {SHORT} tokens, {problem.problem}", closer, 0.3)
    if len(state.served) != 1:
        return Declined(f"{len(state.served)} scans over {SHORT} tokens", closer, 0.3)
    return Plan(found, call, trace, state)


_MEASURED: WeakKeyDictionary[type[nn.Module], dict[str, float]] = WeakKeyDictionary()
"""By class of module and text of its graph: what `difference` is for weights at random."""


def _difference_at_random(plan: Plan) -> float:
    """For a module without weights. Measured once for all layers of the same code and shapes: at a model's real width
    it takes seconds, and between such layers only numbers differ, of which the decays were looked at.
    """
    captured = plan.trace.captured
    shapes = {name: (*weight.shape, weight.dtype) for name, weight in captured.weights.items()}
    kind = f"{captured.max_tokens} {shapes} {captured.graph}"
    measured = _MEASURED.setdefault(type(plan.found.call.module), {})
    if kind not in measured:
        drawn = _look(plan.found, with_numbers(plan.found.call, only_buffers=False))
        measured[kind] = float("nan") if isinstance(drawn, Declined) else difference(drawn)
    return measured[kind]


def _trace(found: LeafCall, call: ModuleCall) -> LeafTrace | Declined:
    """The module over few tokens. Of modules whose code and shapes are alike, only one is traced in vain."""
    known = _declined.setdefault(found.leaf.graph, {})
    shapes = tuple(node.meta["shape"] for node in found.given)
    kind = (twin_key(call.module), on_meta(call.module), str(call.arguments), shapes, found.result)
    if kind in known:
        return replace(known[kind], node=found.region.closer)
    trace = _trace_anew(found, call)
    if isinstance(trace, Declined):
        known[kind] = replace(trace, node=None)  # a node would keep the graph alive
    return trace


def _trace_anew(found: LeafCall, call: ModuleCall) -> LeafTrace | Declined:
    try:
        trace = trace_leaf(call, found.given, found.result, SHORT)
    except LeafUnsupported as problem:
        return Declined(str(problem), found.region.closer, 0.1)
    placeholders = (node for node in trace.captured.graph.nodes if node.op == "placeholder")
    waiting = {node.target for node in placeholders if node.users}
    for i, name in trace.others.items():
        if name in waiting:
            return Declined("the module reads what is not [1, T, C]", found.given[i], 0.5)
    return trace


@torch.no_grad()
def difference(plan: Plan) -> float:
    """The largest difference to the module's own forward on random rows of several blocks, as a part of the largest
    magnitude.
    """
    captured, call = plan.trace.captured, plan.looked_at
    block = (captured.max_tokens or 64) + 1
    length = 2 * block + block // 2 + 1
    device = next(t.device for t in captured.weights.values())
    random = torch.Generator().manual_seed(0)
    given = []
    for i, node in enumerate(plan.found.given):
        shape = [length if size == TOKENS else int(size) for size in node.meta["shape"]]
        tensor = torch.zeros(shape, dtype=node.meta["dtype"], device=device)
        if i in plan.trace.tables:
            tensor.copy_(torch.randn(shape, generator=random))
            captured.module.get_parameter(plan.trace.tables[i]).data = tensor[0]
        given.append(tensor)
    expected = call.run(given, [])[plan.found.result]
    inputs = _one_sequence(plan.state, length, device)
    order = [node for node in captured.graph.nodes if node.op == "placeholder"]
    actual = captured.module(*[inputs.get(node) for node in order])[0]
    return relative_difference(actual, expected)


def _one_sequence(
    state: Rewriting, length: int, device: torch.device
) -> dict[fx.Node, torch.Tensor]:
    """Inputs of the grafted graph for the rows of its tables, in order, as one new sequence."""
    values = {
        "input_ids": torch.arange(length)[None],
        "cu_seqlens": torch.tensor([0, length], dtype=torch.int32),
        "context_lens": torch.tensor([0], dtype=torch.int32),
        "state_slots": torch.tensor([1]),
    }
    for served in state.served:
        for spec in served.states:
            values[spec.name] = torch.zeros(2, *spec.shape, dtype=spec.dtype)
    return {state.inputs[name]: value.to(device) for name, value in values.items()}


def rewrite(plan: Plan, grafting: Grafting) -> None:
    """Copy the module's graph to where the leaf is."""
    call = plan.found.call
    result = copy_leaf(plan.trace, call.module, call.path, _inputs(plan, grafting), grafting)
    grafting.replace(plan.found.region.closer, result)
    if plan.looked_at is not call:
        grafting.notes.append(
            "without weights: the decays are those that the model's own code fills in, and whether the module goes on "
            "like this from block to block was measured with weights at random"
        )


def _inputs(plan: Plan, grafting: Grafting) -> dict[fx.Node, fx.Node]:
    """What stands in the model's graph for each input of the module's: arguments, metadata, states."""
    state = plan.state
    copies: dict[fx.Node, fx.Node] = {}
    tables = {attribute: plan.found.given[i] for i, attribute in plan.trace.tables.items()}
    for node in state.graph.nodes:
        if is_aten(node, "embedding") and str(node.args[0].target) in tables:
            copies[node] = tables[str(node.args[0].target)]
    copies[state.inputs["input_ids"]] = grafting.inputs["input_ids"]
    for field in METADATA:
        copies[state.inputs[field]] = grafting.sequence(field)
    for served in state.served:
        for spec in served.states:
            copies[state.inputs[spec.name]] = own_state(grafting, "state", spec.shape, spec.dtype)
    return copies


PASS = Pass(
    "decayed_linear",
    kind="decayed_linear",
    operator="regraft::decayed_linear",
    pattern=find_call,
    check=check,
    rewrite=rewrite,
)
