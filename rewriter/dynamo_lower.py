"""From a Dynamo graph over a batch `[B, T]` to the normal form over one packed row `[1, T]`.

The graph is traced again with a batch of one, every token real and the number of tokens free. That is the
graph that the passes know, whatever padding the batch has: the sequences of the batch become the row.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.fx.traceback as fx_traceback
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv, guard_scalar

from regraft.kernels.varlen import stop_gradient

from .dynamo_cut import Cut
from .dynamo_inputs import Inputs, example_of, plain
from .dynamo_own_gradient import own_gradient_of
from .dynamo_range import interval_of
from .dynamo_stops import stops
from .errors import first_line
from .export import export
from .functional import functional
from .graph import CapturedGraph
from .lift import lift
from .module_leaf import attach_calls
from .normal_form import normalize
from .pattern import Declined

EXAMPLE_TOKENS = 37
"""Length of the traced row: odd, so that no division comes out even by chance."""

_IGNORED = ("_log_api_usage_once", "_set_grad_enabled")


class Unknown:
    """The value of what depends on an input of no known meaning (labels, say)."""


UNKNOWN = Unknown()


@dataclass
class Lowered:
    """`captured` computes, for the rows of a packed row, the values that the wanted nodes have in the batch.

    `placeholder_of` maps the graph's weights (attribute names) to the Dynamo graph's placeholders, and `part_of` those
    that are parts of such a weight to their names in it ("qdata").
    """

    captured: CapturedGraph
    placeholder_of: dict[str, fx.Node] = field(default_factory=dict)
    part_of: dict[str, str] = field(default_factory=dict)


def lower(
    module: fx.GraphModule,
    inputs: Inputs,
    examples: Sequence[Any],
    found: Cut,
    translate: Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], Any],
) -> Lowered | Declined:
    """Trace `module` again as said above, up to the rows of `found`.

    `translate(node, args, kwargs)` may give the value of a call that is not to be run as it is, or NotImplemented.
    Declined if the trace holds for no interval of T, or writes into what `found` does not know of.
    """
    row = _Row(module, inputs, examples, tuple(found.rows), translate)
    try:
        program = _export(row)
    except (
        RuntimeError,
        ValueError,
        IndexError,
    ) as error:  # what torch raises for a trace that fails
        return Declined(f"it cannot be traced over a row of any length: {first_line(error)}")
    seen = row.seen
    unknown = _writes_unknown(program, row, found)
    if unknown is not None:
        return unknown
    where = interval_of(seen.shape_env, seen.symbol, EXAMPLE_TOKENS)
    if isinstance(where, Declined):
        return where
    captured = lift(program, row, _prefix(module), seen.symbol, where)
    normalize(captured.module)
    attach_calls(captured.graph)
    placeholders, parts = {}, {}
    for attribute, full in captured.weight_names.items():
        name, _, part = full.partition(".")
        if name not in row.placeholder_of:
            continue
        placeholders[attribute] = row.placeholder_of[name]
        if part and getattr(row, name).requires_grad:
            return Declined(
                "a weight that is trained is made of several tensors", placeholders[attribute]
            )
        if part:
            parts[attribute] = part
    return Lowered(captured, placeholders, parts)


def _writes_unknown(program: ExportedProgram, row: _Row, found: Cut) -> Declined | None:
    """Whether the forward writes into something that the rest of the graph does not write into as well."""
    signature = program.graph_signature
    written = [row.placeholder_of[name] for name in signature.buffers_to_mutate.values()]
    unknown = [node for node in written if node not in found.written]
    if unknown or (signature.user_inputs_to_mutate and not found.written):
        return Declined("the forward writes into its inputs in a way unknown", *unknown[:1])
    return None


class _Seen:
    """What is learnt within a trace, which gives back every attribute that is set on a module."""

    shape_env: ShapeEnv
    symbol: sympy.Symbol


class _Row(nn.Module):
    """The traced call: `(input_ids [1, T], position_ids [1, T]) -> a tuple of tensors`."""

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Inputs,
        examples: Sequence[Any],
        wanted: Sequence[fx.Node],
        translate: Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        super().__init__()
        self._call = (module, inputs, tuple(wanted), translate)  # a tuple: no submodule
        self.placeholder_of: dict[str, fx.Node] = {}
        self.seen = _Seen()
        for index, (node, example) in enumerate(zip(_placeholders(module), examples, strict=True)):
            if node in inputs.weights:
                name = f"weight_{index}"
                self.placeholder_of[name] = node
                if isinstance(example, nn.Parameter):
                    self.register_parameter(name, example)
                else:
                    self.register_buffer(name, example)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        module, inputs, wanted, translate = self._call
        tokens = input_ids.shape[1]
        torch._check(tokens == position_ids.shape[1])
        self.seen.shape_env, self.seen.symbol = tokens.node.shape_env, tokens.node.expr  # type: ignore[attr-defined]
        names = {node: name for name, node in self.placeholder_of.items()}
        run = _Run(module, translate)
        values = [
            self._value(node, inputs, names, input_ids, position_ids)
            for node in _placeholders(module)
        ]
        with fx_traceback.preserve_node_meta():
            run.run(*values, enable_io_processing=False)
        return tuple(run.kept(node) for node in wanted)

    def _value(
        self,
        node: fx.Node,
        inputs: Inputs,
        names: dict[fx.Node, str],
        ids: torch.Tensor,
        positions: torch.Tensor,
    ) -> Any:
        if node in names:
            return getattr(self, names[node])
        if node is inputs.input_ids:
            return ids
        if node is inputs.position_ids:
            return positions.to(example_of(node).dtype)
        if node is inputs.attention_mask:
            return torch.ones_like(ids, dtype=example_of(node).dtype)
        if node in inputs.sizes:
            return _size(node, inputs, ids.shape[1])
        if node in inputs.floats:
            return node
        return UNKNOWN


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def _size(node: fx.Node, inputs: Inputs, tokens: int) -> Any:
    """A size that Dynamo passes in, for a batch of one."""
    value = example_of(node)
    return {inputs.batch: 1, inputs.tokens: tokens}.get(plain(value), UNKNOWN)


class _Run(fx.Interpreter):
    """Runs a Dynamo graph, but for what is unknown, and remembers every value."""

    def __init__(
        self,
        module: fx.GraphModule,
        translate: Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._stops = stops(module)
        self._translate = translate

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        operands = [self.env[operand] for operand in n.all_input_nodes]
        if any(operand is UNKNOWN for operand in operands):
            return UNKNOWN
        if any(isinstance(operand, fx.Node) for operand in operands):
            return guard_scalar(example_of(n))  # item() of a Python float
        if getattr(n.target, "__name__", "") in _IGNORED:
            return None
        with fx_traceback.set_current_meta(n):
            args, kwargs = self._operands(n)
            args = _without_empty_parts(n, args)
            for translate in (own_gradient_of, self._translate):
                translated = translate(n, args, kwargs)
                if translated is not NotImplemented:
                    return translated
            return getattr(self, n.op)(n.target, args, kwargs)

    def _operands(self, n: fx.Node) -> tuple[Any, dict[str, Any]]:
        """Values of the operands, without their history where the model stops a gradient."""

        def value(operand: fx.Node) -> Any:
            held = self.env[operand]
            return stop_gradient(held) if (n, operand) in self._stops else held

        return fx.map_arg(n.args, value), fx.map_arg(n.kwargs, value)

    def kept(self, node: fx.Node) -> Any:
        value = self.env[node]
        assert isinstance(value, torch.Tensor), f"{node} is {value}"
        return value


def _without_empty_parts(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`cat` leaves out one-dimensional empty tensors, with which caches begin; so their shapes never meet the rows'."""
    if node.target is not torch.cat or not args or not isinstance(args[0], (list, tuple)):
        return args
    parts = [part for part in args[0] if tuple(part.shape) != (0,)]
    return (parts or args[0], *args[1:])


def _export(row: _Row) -> ExportedProgram:
    device = next(iter(row.parameters())).device
    ids = torch.zeros(1, EXAMPLE_TOKENS, dtype=torch.long, device=device)
    positions = torch.arange(EXAMPLE_TOKENS, device=device)[None]
    # Dynamo is in the middle of its own trace, whose sizes and guards are none of this one's business.
    with (
        torch._guards.tracing(None),
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg")
        program = export(row, (ids, positions), ({1: Dim.AUTO}, {1: Dim.AUTO}))
        return functional(program, {})


def _prefix(module: fx.GraphModule) -> str:
    """What Dynamo puts before every module path: "L['self']."."""
    for node in module.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            path = str(next(iter(stack.values()))[0])
            return path[: path.index("]") + 1] + "." if "]" in path else ""
    return ""
