"""A module that loops over the experts its tokens chose -> rows sorted by expert.

    before   module_leaf([x [T, C], ids [T, K], weights [T, K]]):  for e in ids: out[t] += f_e(x[t], weights[t, k])
    after    f of the T * K rows, each matrix W[e] in it by regraft.expert_linear(rows, W, ids); the sum over k

f_e is what the module's own forward does with a few tokens that all chose e (passes/expert_program.py). Experts of one
range of numbers must do the same with their own matrices; ranges may differ (an identity beside products). That the
module is this sum for any choice is measured against its own forward, with every expert chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

import regraft.kernels.experts  # noqa: F401 (registers the operator)
from regraft.rewriter.graph import TOKENS, is_aten, shape_of
from regraft.rewriter.leaf_trace import LeafTrace, trace_leaf
from regraft.rewriter.leaves import LeafUnsupported
from regraft.rewriter.meta_twin import on_meta
from regraft.rewriter.module_leaf import ModuleCall, Slot, owned_tensors
from regraft.rewriter.pattern import Declined, Grafting, Pass

from .expert_program import COUNT, Program, record
from .leaf_copy import copy_leaf
from .module_calls import TOLERANCE, LeafCall, device_of, find_call, relative_difference

TOKENS_TRACED = 7


@dataclass(frozen=True)
class Arguments:
    """Which of the module's arguments is what: the tokens' rows, the experts that they chose, and by how much."""

    x: int
    ids: int
    weights: int
    experts: int


@dataclass(frozen=True)
class Range:
    """Experts from number `first` to number `last`, which run the same program."""

    first: int
    last: int
    program: Program


@dataclass(frozen=True)
class Plan:
    """The module as a graph without a loop."""

    found: LeafCall
    arguments: Arguments
    trace: LeafTrace
    ranges: tuple[Range, ...]
    measured: bool


def check(found: LeafCall) -> Plan | Declined:
    """Rows, choices and weights go in; the module is a sum over choices of what each expert does with a row."""
    arguments = _read_arguments(found)
    if isinstance(arguments, Declined):
        return arguments
    closer, call = found.region.closer, found.call
    try:
        ranges = _ranges(found, arguments)
        looped = replace(call, forward=_without_loop(call, arguments, ranges))
        trace = trace_leaf(looped, found.given, found.result, TOKENS_TRACED)
    except LeafUnsupported as problem:
        return Declined(str(problem), closer, 0.6)
    plan = Plan(found, arguments, trace, ranges, not on_meta(call.module))
    if plan.measured:
        error = difference(plan)
        if not error <= TOLERANCE.get(closer.meta["dtype"], 0.0):
            return Declined(
                f"the module is no sum over chosen experts: {error:.1e} off", closer, 0.9
            )
    return plan


def _read_arguments(found: LeafCall) -> Arguments | Declined:
    """Three tensors [T, C], [T, K], [T, K]; the integers are a top-k's choice."""
    closer, given = found.region.closer, found.given
    if len(given) != 3 or list(found.call.arguments) != [Slot.TENSOR] * 3:
        return Declined("not a module of rows, choices and weights", closer)
    ids = [i for i, node in enumerate(given) if node.meta["dtype"] == torch.int64]
    shapes = [shape_of(node) for node in given]
    if len(ids) != 1 or any(len(shape) != 2 or shape[0] != TOKENS for shape in shapes):
        return Declined("not a module of rows, choices and weights", closer)
    others = [i for i in range(3) if i != ids[0]]
    weights = [i for i in others if shapes[i] == shapes[ids[0]]]
    if len(weights) != 1:
        return Declined("not a module of rows, choices and weights", closer)
    experts = _number_of_experts(given[ids[0]])
    if experts is None:
        return Declined("the experts are not chosen by a top-k", given[ids[0]], 0.5)
    (x,) = (i for i in others if i != weights[0])
    return Arguments(x, ids[0], weights[0], experts)


def _number_of_experts(ids: fx.Node) -> int | None:
    """Among how many the top-k chose whose indices these are."""
    topk = ids.args[0] if ids.op == "call_function" and len(ids.args) == 2 else None
    if not is_aten(topk, "topk") or ids.args[1] != 1:
        return None
    assert isinstance(topk, fx.Node) and isinstance(topk.args[0], fx.Node)
    size = shape_of(topk.args[0])[-1]
    return size if isinstance(size, int) else None


def _ranges(found: LeafCall, arguments: Arguments) -> tuple[Range, ...]:
    """Experts may differ where one of the module's stacks of matrices ends. Raises LeafUnsupported."""
    held = owned_tensors(found.call.module)
    stacks = {len(tensor) for _, _, tensor in held if tensor.dim() == 3}
    ends = sorted({size for size in stacks if size < arguments.experts} | {arguments.experts})
    ranges: list[Range] = []
    for first, end in zip([0, *ends], ends):
        tried = dict.fromkeys((first, (first + end) // 2, end - 1))
        programs = [_program(found, arguments, expert) for expert in tried]
        if any(program != programs[0] for program in programs):
            raise LeafUnsupported(f"experts {first} to {end - 1} do not all do the same")
        if ranges and ranges[-1].program == programs[0]:
            ranges[-1] = replace(ranges[-1], last=end - 1)
        else:
            ranges.append(Range(first, end - 1, programs[0]))
    return tuple(ranges)


def _program(found: LeafCall, arguments: Arguments, expert: int) -> Program:
    given = []
    for i, node in enumerate(found.given):
        device = (
            torch.device("cpu")
            if i == arguments.ids and on_meta(found.call.module)
            else device_of(found.call)
        )
        size = (COUNT, shape_of(node)[1])
        fill = expert if i == arguments.ids else 1
        given.append(torch.full(size, fill, dtype=node.meta["dtype"], device=device))
    return record(found.call, tuple(given), arguments.x, arguments.ids, arguments.weights)


def _without_loop(call: ModuleCall, arguments: Arguments, ranges: tuple[Range, ...]) -> Any:
    """A forward of the module's arguments that computes a row for each token and choice."""

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        given = pytree.tree_leaves((args, kwargs))
        x, ids, weights = (given[i] for i in (arguments.x, arguments.ids, arguments.weights))
        choices = ids.shape[1]
        rows = x.unsqueeze(1).expand(-1, choices, -1).flatten(0, 1)
        chosen, shares = ids.flatten(), weights.flatten()
        total: Tensor | None = None
        for part in ranges:
            # a row of another range is computed as if of the nearest expert, and left out
            own = chosen.clamp(part.first, part.last)
            result = part.program.run(call.module, rows, own, shares)
            if total is not None:
                result = torch.where((chosen >= part.first).unsqueeze(1), result, total)
            total = result
        assert total is not None
        return total.unflatten(0, (-1, choices)).sum(1)

    return forward


@torch.no_grad()
def difference(plan: Plan) -> float:
    """The largest difference to the module's own forward on random rows that choose every expert, as a part of the
    largest magnitude.
    """
    found, arguments, captured = plan.found, plan.arguments, plan.trace.captured
    device = device_of(found.call)
    random = torch.Generator().manual_seed(0)
    choices = shape_of(found.given[arguments.ids])[1]
    assert isinstance(choices, int)
    whole = arguments.experts // choices * choices
    orders = [torch.randperm(arguments.experts, generator=random) for _ in range(4)]
    ids = torch.cat([order[:whole].view(-1, choices) for order in orders])
    # those that do not come out even lead the next round
    rest = torch.arange(arguments.experts)
    ids = torch.cat([ids, *(rest.roll(-i)[:choices][None] for i in range(arguments.experts))])
    given = []
    for i, node in enumerate(found.given):
        if i == arguments.ids:
            given.append(ids.to(device))
            continue
        width = shape_of(node)[1]
        assert isinstance(width, int)
        tensor = torch.randn(len(ids), width, generator=random)
        given.append(tensor.to(device, node.meta["dtype"]))
    expected = found.call.run(given, [])[found.result]
    values = {plan.trace.others[i]: tensor for i, tensor in enumerate(given)}
    inputs = [node for node in captured.graph.nodes if node.op == "placeholder"]
    tokens = torch.zeros(1, len(ids), dtype=torch.long, device=device)
    actual = captured.module(*[values.get(str(node.target), tokens) for node in inputs])[0]
    return relative_difference(actual, expected)


def rewrite(plan: Plan, grafting: Grafting) -> None:
    """Copy the graph without the loop to where the leaf is."""
    found, trace = plan.found, plan.trace
    others = {trace.others[i]: node for i, node in enumerate(found.given)}
    inputs = {
        node: others.get(str(node.target), grafting.inputs["input_ids"])
        for node in trace.captured.graph.nodes if node.op == "placeholder"
    }  # fmt: skip
    result = copy_leaf(trace, found.call.module, found.call.path, inputs, grafting)
    grafting.replace(found.region.closer, result)
    for part in plan.ranges:
        products = part.program.products
        does = f"{products} products each" if products else "no product"
        grafting.notes.append(f"experts {part.first} to {part.last}: {does}")
    if not plan.measured:
        grafting.notes.append("without weights, not compared with the module")


PASS = Pass(
    "expert_loop",
    kind="experts",
    operator="regraft::expert_linear",
    pattern=find_call,
    check=check,
    rewrite=rewrite,
)
