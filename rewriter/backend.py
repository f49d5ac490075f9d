"""`torch.compile(model, backend="regraft")`: the passes on Dynamo's graph, for calls that keep no cache.

    model = torch.compile(model, backend="regraft")                       # found by entry point: nothing to import
    model = torch.compile(model, backend="regraft", options={"backend": "aot_eager"})

Served are the calls in which people train, score and evaluate: a batch `[B, T]`, plain or padded under an
`attention_mask`, and a packed row whose `position_ids` begin anew at each sequence. Such a graph becomes one packed
row without padding, whose sequences never see each other. Every other graph goes to the inner backend as it is.

What is at a padded place of a result is zero, where the model itself leaves something that nobody should read.

Options:
    backend     the backend that compiles what Regraft has rewritten, and every graph that it leaves alone: the name
                of one, "inductor" by default ("eager" runs the rewritten graph as it is)
    fallback    "replay" (default): a mixing that no pass knows runs over each sequence as it is;
                "refuse": a graph with such a mixing goes to the inner backend
    strict      False (default); True: a graph over token ids that cannot be grafted is an error
    batch_invariant     False (default); True: a token's rows (logits) are the same bits in any batch, and those of an
                engine with batch_invariant=True, but for latent attention, which runs expanded here and absorbed
                there. `backend` is then "eager" (the default) or "aot_eager", and whatever cannot be so is an error

`backend_reports()` says what became of each graph.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import fx
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import ShortenTraceback, TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import CompileContext

from .backend_options import Options, UnknownOption
from .backend_report import GraphReport, record
from .dynamo_break import graph_break
from .dynamo_cut import unknown_nodes
from .dynamo_frame import frame_call
from .dynamo_graft import graft
from .dynamo_hook import lacking_settings, on_failure
from .dynamo_inline import inlined
from .dynamo_inputs import Inputs, example_of, read_inputs, source_name, traced_module
from .dynamo_keep import KeptModules
from .dynamo_leaks import refusing_leaks
from .dynamo_prepare import Preparation, needs_preparation, prepare, token_inputs
from .dynamo_unused import with_unused_inputs
from .errors import RewriteError
from .grafted import Grafted
from .pattern import Declined

Compiled = Callable[..., Any]


class Refused(ShortenTraceback, RewriteError):
    """With `strict` or `batch_invariant`: a graph that cannot be what was asked for."""

    def __init__(self, declined: Declined) -> None:
        fix = "leave strict=True or batch_invariant=True out to run it as it is"
        RewriteError.__init__(self, f"this graph cannot be grafted: {declined}", fix=fix)
        self.first_useful_frame = None


@dataclass(frozen=True)
class _Stage:
    """What an earlier trace of the same frame led to: a preparation, or a reason to leave the graph alone."""

    preparation: Preparation | None = None
    kept: KeptModules | None = None
    declined: Declined | None = None


_stages: dict[object, _Stage] = {}
"""By Dynamo's number of the compilation."""


def regraft_backend(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """The entry point. Raises UnknownOption (a ValueError), and Refused (a RewriteError) with `strict`."""
    if mode is not None:
        raise UnknownOption(
            f"mode={mode!r} is an option of Inductor: regraft takes options={{...}} only"
        )
    chosen = Options.of(options)
    stage = _stages.pop(CompileContext.current_compile_id(), None)
    if stage is not None and stage.preparation is not None:
        stage.preparation.end()
    if stage is not None and stage.declined is not None:
        return _leave_to_the_model(module, example_inputs, stage.declined, chosen)
    inputs = _read(module, example_inputs)
    if isinstance(inputs, Declined):
        return _leave_alone(module, example_inputs, inputs, chosen)
    if stage is None and needs_preparation(module, inputs):
        _prepare(module, token_inputs(module, inputs, example_inputs), _modules_to_keep())
    example_inputs = with_unused_inputs(module, example_inputs)
    grafted = _graft(module, example_inputs, chosen)
    if not isinstance(grafted, Declined):
        grafted.report.ends = graph_break(module)
        if grafted.report.ends and stage is not None and stage.kept is not None:
            grafted.report.ends += _why_not(stage.kept)
        record(grafted.report)
        return grafted.as_function()
    tokens = token_inputs(module, inputs, example_inputs)
    if stage is None:
        _prepare(module, tokens, _modules_to_keep())
    if (kept := stage.kept) is not None:
        reason = kept.fixing(example_of(inputs.input_ids).shape)
        if reason is not None and kept.add(reason):
            _prepare(module, tokens, kept)
        grafted = replace(grafted, reason=grafted.reason + _why_not(kept))
    if chosen.strict or chosen.batch_invariant:
        raise Refused(grafted)
    return _start_over(_Stage(declined=grafted))


def _why_not(kept: KeptModules) -> str:
    return f"; no module can be kept whole: {kept.given_up}" if kept.given_up else ""


def _modules_to_keep() -> KeptModules | None:
    """None as yet."""
    call = frame_call()
    return None if call is None else KeptModules(call)


def _prepare(
    module: fx.GraphModule | None,
    tokens: Sequence[torch.Tensor],
    kept: KeptModules | None,
) -> NoReturn:
    preparation = prepare(module, tokens, kept)
    compilation = CompileContext.current_compile_id()
    preparation.undo.append(partial(_forget, compilation))
    _start_over(_Stage(preparation, kept))


def _forget(compilation: object) -> None:
    _stages.pop(compilation, None)


def _failed(tx: InstructionTranslator, error: BaseException) -> None:
    """A frame's trace has failed within a function. The frame may be one that no backend is called for."""
    if not _is_ours(tx.output.compiler_fn) or CompileContext.current_compile_id() in _stages:
        return
    kept = _modules_to_keep()
    if kept is not None:
        kept.settings = lacking_settings(str(error))
        _prepare(None, list(kept.call.given.values()), kept)


def _is_ours(compiler: object) -> bool:
    """Whether Dynamo traces for this backend, under whatever it wraps a backend in."""
    while compiler is not None and compiler is not regraft_backend:
        inner = getattr(compiler, "_torchdynamo_orig_backend", None)
        compiler = inner or getattr(compiler, "compiler_fn", None)
    return compiler is not None


on_failure(_failed)


def _graft(module: fx.GraphModule, examples: Sequence[Any], options: Options) -> Grafted | Declined:
    module = inlined(module)
    inputs = read_inputs(module, examples)
    if isinstance(inputs, Declined):
        return inputs
    passes = importlib.import_module("regraft.passes")  # late: passes are written on this package
    finish = None
    if options.batch_invariant:
        finish = importlib.import_module("regraft.passes.invariant_training").make_trainable
    return graft(
        module,
        inputs,
        examples,
        passes.PIPELINE,
        options.backend,
        options.fallback,
        traced_module(),
        finish,
    )


def _read(module: fx.GraphModule, examples: Sequence[Any]) -> Inputs | Declined:
    """The inputs, declined also where a second trace would not help: a step of a generation, which reads a cache."""
    inputs = read_inputs(module, examples)
    if isinstance(inputs, Declined):
        return inputs
    if inputs.tokens == 1:
        return Declined("one token: a step that reads a cache", inputs.input_ids)
    unknown = unknown_nodes(module, inputs)
    returned = module.graph.output_node().all_input_nodes
    if returned and all(node in unknown or node.op == "placeholder" for node in returned):
        names = ", ".join(sorted({source_name(node) for node in inputs.others})[:3])
        return Declined(f"all that it returns depends on inputs of no known meaning ({names})")
    return inputs


def _start_over(stage: _Stage) -> NoReturn:
    """Let Dynamo trace this frame again, without what it remembers of the calls in its first trace."""
    _stages[CompileContext.current_compile_id()] = stage
    InstructionTranslator.current_tx().output.root_tx.speculation_log.clear()
    raise TensorifyScalarRestartAnalysis(restart_reason="regraft: trace again")


def _leave_to_the_model(
    module: fx.GraphModule, examples: Sequence[Any], declined: Declined, options: Options
) -> Compiled:
    """The same for a graph over token ids, which a packed row may not leak through."""
    if isinstance(read_inputs(module, examples), Declined):
        return _leave_alone(module, examples, declined, options)
    examples = with_unused_inputs(module, examples)
    compiled = _leave_alone(module, examples, declined, options)
    inputs = read_inputs(module, examples)
    assert not isinstance(inputs, Declined)
    return refusing_leaks(compiled, module, inputs, frame_call(), str(declined))


def _leave_alone(
    module: fx.GraphModule, examples: Sequence[Any], declined: Declined, options: Options
) -> Compiled:
    """Hand a graph to the inner backend."""
    if options.batch_invariant:
        raise Refused(declined)
    report = GraphReport(served=False, reason=str(declined), num_nodes=len(module.graph.nodes))
    report.ends = graph_break(module)
    record(report)
    compiled: Compiled = lookup_backend(options.backend)(module, list(examples))
    return compiled
