"""One Dynamo graph, grafted: from the graph to something that is called with its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx, nn

from regraft.kernels.varlen import STATELESS, WINDOWED

from .backend_report import GraphReport
from .dynamo_cut import Cut, cut, remainder
from .dynamo_inputs import Inputs
from .dynamo_lower import UNKNOWN, Lowered, lower
from .dynamo_range import dynamo_interval
from .errors import RewriteError
from .grafted import CompiledLater, Given, Grafted
from .graph import CapturedGraph
from .kept_calls import kept_call_of
from .leaf_calls import leaf_call_of
from .own_weights import Held, added_weights
from .pattern import Declined, Pass
from .pipeline import GraphPass, Rewriting, rewrite
from .sizes import Interval
from .stateless import Stateless, stateless
from .token_axis import analyse


def graft(
    module: fx.GraphModule,
    inputs: Inputs,
    examples: Sequence[Any],
    passes: Sequence[Pass | GraphPass],
    backend: str,
    fallback: str,
    root: nn.Module | None,
    finish: Callable[[Stateless, CapturedGraph], None] | None = None,
) -> Grafted | Declined:
    """Graft a graph of known inputs, traced from a method of `root`; declined if any part of it is not understood.

    `finish` rewrites the grafted graph once more, given also what it was made of, or raises RewriteError; with it, a
    batch that cannot be packed is an error.
    """
    fixed = _fixed(inputs)
    if fixed is not None:
        return fixed
    found = cut(module, inputs)
    if isinstance(found, Declined):
        return found
    branches = dynamo_interval(inputs)
    if isinstance(branches, Declined):
        return branches
    lowered = lower(module, inputs, examples, found, _translate)
    if isinstance(lowered, Declined):
        return lowered
    misplaced = _misplaced(lowered, found)
    if misplaced is not None:
        return misplaced
    captured = lowered.captured
    try:
        served = [step for step in passes if _is_stateless(step)]
        with torch._guards.tracing(
            None
        ):  # passes trace modules, which is none of Dynamo's business
            state = rewrite(captured, served, fallback=fallback)
        added = added_weights(captured, lowered.placeholder_of, root)
        form = stateless(state, {**lowered.placeholder_of, **added})
        if isinstance(form, Declined):
            return form
        if finish is not None:
            finish(form, captured)
    except RewriteError as error:
        return Declined(str(error))
    holds = branches.meet(Interval(captured.min_tokens, captured.max_tokens))
    own = {**added, **form.own}
    grafted = _assemble(module, inputs, found, lowered, state, form, holds, backend, own)
    return replace(grafted, must_pack=finish is not None)


def _fixed(inputs: Inputs) -> Declined | None:
    """Whether Dynamo fixed a size, or takes two for one, so that a row of any length cannot be traced."""
    if not isinstance(inputs.tokens, sympy.Symbol):
        return Declined(f"the number of tokens is fixed to {inputs.tokens}", inputs.input_ids)
    if inputs.batch != 1 and (
        not isinstance(inputs.batch, sympy.Symbol) or inputs.batch == inputs.tokens
    ):
        return Declined(f"the size of the batch is fixed to {inputs.batch}", inputs.input_ids)
    return None


def _translate(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Leaf functions and modules kept whole as their operators."""
    kept = kept_call_of(node)
    if kept is not None:
        return kept.emit(args, kwargs)
    call = leaf_call_of(node)
    return NotImplemented if call is None else call.emit(args, kwargs, UNKNOWN)


def _is_stateless(step: Pass | GraphPass) -> bool:
    """Whether the pass's operator has a form without a cache (or keeps none)."""
    if isinstance(step, GraphPass):
        return True
    return step.operator in STATELESS or not step.operator.startswith("regraft::")


def _misplaced(lowered: Lowered, found: Cut) -> Declined | None:
    """Whether a wanted value is not what it must be: one row per token, where the batch's graph has it."""
    graph = lowered.captured.graph
    analysis = analyse(graph)
    outputs = graph.output_node().args[0]
    for node, (wanted, place) in zip(outputs, found.rows.items(), strict=True):
        value = analysis.value(node)
        if not value.is_fixed and not (value.has_row_shape and value.token_dim == place.token_dim):
            return Declined(f"what is returned as {wanted} is not one row per token", node)
    return None


def _has_windows(graph: fx.Graph) -> bool:
    """Whether an operator makes windows of tokens, counted from a text's first one."""
    return any(node.target in WINDOWED for node in graph.nodes)


def _assemble(
    module: fx.GraphModule,
    inputs: Inputs,
    found: Cut,
    lowered: Lowered,
    state: Rewriting,
    form: Stateless,
    holds: Interval,
    backend: str,
    own: Mapping[str, Held],
) -> Grafted:
    order = {node: i for i, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    mask, positions = inputs.attention_mask, inputs.position_ids
    report = GraphReport(
        served=True,
        num_nodes=len(module.graph.nodes),
        form="padded" if mask else "packed" if positions else "plain",
        layers=state.served,
        proof=str(state.proof),
    )
    return Grafted(
        original=module,
        ids=order[inputs.input_ids],
        attention_mask=None if mask is None else order[mask],
        position_ids=None if positions is None else order[positions],
        compiled=form.module if backend == "eager" else CompiledLater(form.module, backend),
        sequence_inputs=form.sequence_inputs,
        weights=tuple(
            own[name]
            if name in own
            else Given(order[lowered.placeholder_of[name]], lowered.part_of.get(name, ""))
            for name in form.weights
        ),
        places=tuple(found.rows.values()),
        rest=remainder(module, found),
        holds=holds,
        report=report,
        counts_places=bool(form.replays) or _has_windows(form.module.graph),
    )
