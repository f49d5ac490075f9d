"""What Dynamo is told before it traces a frame a second time, so that its graph can be grafted.

A backend sees a graph only after the trace. By then the number of tokens has been fixed (Dynamo does so on a first
call), loops over time have been unrolled, and experts are sorted by token. So the backend asks Dynamo to start over,
with a few changes that last for that one trace and are undone when it ends, however it ends:

    sizes     the dimensions of the token inputs are marked as dynamic
    leaves    functions that loop over time (rewriter/leaves.py) go into the graph as one call each
    experts   go through the batched form, which is row-local by plain algebra
    modules   Dynamo is followed from module to module, and those that it must not look into become one call each
    values    where the graph broke at an operation whose shape or number depends on values, Dynamo may keep it
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.callback import CallbackArgs, callback_handler

from .dynamo_hook import lacking_settings
from .dynamo_inline import nodes_within
from .dynamo_inputs import Inputs, mark_dynamic, traced_module
from .dynamo_keep import KeptModules
from .dynamo_unused import unread_positions
from .leaf_calls import stand_in
from .leaves import LEAVES, kernel_name

_EXPERTS = ("grouped_mm", "batched_mm")


@dataclass
class Preparation:
    """Changes that are in force, and how to undo them."""

    undo: list[Callable[[], None]] = field(default_factory=list)

    def end(self, _: CallbackArgs | None = None) -> None:
        """Undo everything; a second call does nothing."""
        while self.undo:
            self.undo.pop()()


def needs_preparation(module: fx.GraphModule, inputs: Inputs) -> bool:
    """Whether a second trace would differ from this one."""
    fixed = isinstance(inputs.tokens, int) or (isinstance(inputs.batch, int) and inputs.batch > 1)
    return (
        fixed
        or bool(_leaf_functions(module))
        or _has_experts(module)
        or bool(_settings_it_lacks(module))
    )


def token_inputs(module: fx.GraphModule, inputs: Inputs, examples: Sequence[Any]) -> list[Tensor]:
    """The tensors that may be as long as the batch: whole numbers `[B, T]` that are no weights."""
    placeholders = module.graph.find_nodes(op="placeholder")
    found = [
        example
        for node, example in zip(placeholders, examples, strict=True)
        if isinstance(example, Tensor)
        and not example.dtype.is_floating_point
        and example.dim() == 2
        and node not in inputs.weights
    ]
    unread = unread_positions(module)
    return found if unread is None else [*found, unread[1]]


def prepare(
    module: fx.GraphModule | None,
    tokens: Sequence[Tensor],
    kept: KeptModules | None = None,
) -> Preparation:
    """Make the changes, for inputs `tokens`. They end with `end`, or else when Dynamo has finished this frame.

    `module` is the graph so far, None if there is none.
    """
    done = Preparation()
    callback_handler.register_end_callback(done.end)
    done.undo.append(lambda: callback_handler.remove_end_callback(done.end))
    done.undo.extend(mark_dynamic(tensor) for tensor in tokens)
    for namespace, name, value in _leaf_functions(module):
        leaf = LEAVES[kernel_name(value) or ""]
        _replace(namespace, name, stand_in(leaf, value), done)
    lacking = {} if module is None else _settings_it_lacks(module)
    if kept is not None:
        kept.settings |= lacking
    elif lacking:
        patched = torch._dynamo.config.patch(lacking)
        patched.__enter__()
        done.undo.append(lambda: patched.__exit__(None, None, None))
    mapping = _experts_mapping()
    if mapping is not None:
        _replace(mapping, _EXPERTS[0], mapping[_EXPERTS[1]], done)
    if kept is not None:
        done.undo.append(kept.watch())
    return done


def _replace(namespace: dict[str, Any], name: str, value: Any, done: Preparation) -> None:
    before = namespace[name]
    namespace[name] = value
    done.undo.append(lambda: namespace.__setitem__(name, before))


def _leaf_functions(module: fx.GraphModule | None) -> list[tuple[dict[str, Any], str, Any]]:
    """Functions to keep whole in the files that the modules of a graph, and of the traced frame, are written in."""
    kinds: set[type] = set()
    for node in () if module is None else nodes_within(module):
        for _, kind in (node.meta.get("nn_module_stack") or {}).values():
            if isinstance(kind, type):
                kinds.add(kind)
    traced = traced_module()
    kinds |= {type(part) for part in (traced.modules() if traced is not None else ())}
    bases = {base.__module__ for kind in kinds for base in kind.__mro__}
    files = {file for file in bases if not file.startswith("torch.")}
    namespaces = [vars(sys.modules[name]) for name in sorted(files) if name in sys.modules]
    return [
        (namespace, name, value)
        for namespace in namespaces
        for name, value in namespace.items()
        if kernel_name(value) in LEAVES
    ]


def _settings_it_lacks(module: fx.GraphModule) -> dict[str, bool]:
    """Settings under which Dynamo may not end the graph where it did."""
    reason = getattr(module, "compile_subgraph_reason", None)
    return lacking_settings(str(reason.reason)) if reason is not None and reason.graph_break else {}


def _experts_mapping() -> dict[str, Any] | None:
    """transformers' experts functions by name, None if it has no such table."""
    integration = sys.modules.get("transformers.integrations.moe")
    functions = getattr(integration, "ALL_EXPERTS_FUNCTIONS", None)
    mapping = getattr(functions, "_global_mapping", None)
    known = isinstance(mapping, dict) and all(name in mapping for name in _EXPERTS)
    return mapping if known else None


def _has_experts(module: fx.GraphModule) -> bool:
    mapping = _experts_mapping()
    if mapping is None:
        return False
    code = mapping[_EXPERTS[0]].__code__
    place = f'File "{code.co_filename}", line '
    return any(
        place in trace and f"in {code.co_name}" in trace
        for node in nodes_within(module)
        if (trace := node.meta.get("stack_trace") or "")
    )
