"""The package face: ties capture, passes and runtime together. Everything below it is private."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from regraft.loading import meta_model
from regraft.passes import few_rows, merge_linears
from regraft.passes.invariant import make_invariant
from regraft.passes.logits import select_rows
from regraft.passes.registry import pipeline
from regraft.rewriter.admit import admit
from regraft.rewriter.artifact import Artifact, LiveWeights, Merged
from regraft.rewriter.capture import capture
from regraft.rewriter.coarse import coarse_rounding
from regraft.rewriter.errors import RewriteError
from regraft.rewriter.graph import shape_of
from regraft.rewriter.pipeline import Rewriting, rewrite
from regraft.rewriter.prefix import check_prefix
from regraft.rewriter.report import RewriteReport, make_report
from regraft.rewriter.returned_rows import mark_returned_rows
from regraft.rewriter.row_wise import mark_row_wise
from regraft.rewriter.structure import Structure
from regraft.rewriter.validate import (
    Validation,
    ValidationError,
    check_positions,
    reference_logits,
    samples,
    validate_likewise,
)
from regraft.runtime import install as installing
from regraft.runtime.config import EngineConfig
from regraft.runtime.engine import Engine
from regraft.runtime.install import Installation

PREFIX_TOKENS = 64
"""Length of the text on which replayed regions are tested."""

SCHEDULES: dict[str, Any] = {"prefill": "prefill", "chunk 7": 7, "decode": "decode"}


def wrap(
    model: nn.Module, tokenizer: Any = None, config: EngineConfig | None = None, **settings: Any
) -> Engine:
    """Trace, rewrite, prove and validate `model`; returns an engine that serves it. The model is not changed.

    model      any causal LM of transformers, on one device, in eval mode
    tokenizer  for prompts given as text, and for text in the results
    config     EngineConfig, or its fields as keywords

    Raises RewriteError if the model cannot be served soundly, ValidationError if rewritten and original disagree,
    ValueError for a wrong setting.
    """
    config = _settings(config, settings)
    if not isinstance(model, nn.Module):
        raise RewriteError(
            f"{type(model).__name__} {str(model)[:40]!r} is no model",
            fix="pass what AutoModelForCausalLM.from_pretrained returns (regraft.inspect takes ids and configurations)",
        )
    if any(p.is_meta for p in model.parameters()):
        raise RewriteError(
            "the model has no weights (it is on the meta device)",
            fix="load its weights, or use regraft.inspect(model) for a report alone",
        )
    start = time.perf_counter()
    device = next(model.parameters()).device
    is_compiled = config.compiles_on(device)
    admit(model)
    _settle(model)
    state = _rewrite(model, config.fallback, config.row_wise)
    report = _report(model, state, time.perf_counter() - start)
    merged: tuple[Merged, ...] = ()
    if device.type == "cuda" and is_compiled:
        merged = merge_linears.merge(state.captured)
        report.notes.append(
            f"{len(merged)} merged projections: parameters of the model are views into shared storage"
        )
    artifact = _artifact(model, state, merged)
    if artifact.rounding:
        report.notes.append(
            f"validated as in half precision, since rows are rounded by {artifact.rounding}"
        )
    if config.batch_invariant:
        count = make_invariant(state.captured, config.allow_variant)
        report.notes.append(f"batch invariant: {count} operations have a fixed order per row")
    elif device.type == "cuda" and is_compiled:
        few_rows.take_few_rows(state.captured)
    engine = Engine(
        artifact,
        config,
        tokenizer=tokenizer,
        generation_config=getattr(model, "generation_config", None),
        report=report,
        validator=lambda size="quick", *, seed=0: _validate(engine, artifact, model, size, seed),
    )
    _test_replays(engine, model, state)
    if config.validate != "off":
        report.validation = engine.validate(config.validate)
        if not report.validation.passed:
            raise ValidationError(report.validation)
    report.seconds = time.perf_counter() - start
    return engine


def install(
    model: nn.Module, tokenizer: Any = None, config: EngineConfig | None = None, **settings: Any
) -> Installation:
    """Wrap `model` and put the engine behind its continuous batching, until `uninstall`.

    `model.generate_batch`, `init_continuous_batching` and `continuous_batching_context_manager` then
    go to the engine. The result is a context manager that uninstalls at its end. Arguments and errors are those of
    `wrap`; a model that is installed already is a ValueError.
    """
    return installing.install(model, lambda: wrap(model, tokenizer, config, **settings))


def inspect(
    model_or_config: Any, *, fallback: str = "replay", row_wise: tuple[str, ...] = ()
) -> RewriteReport:
    """The report of a rewrite, without weights: of a model, a configuration, a hub id, a folder or a config.json.

    `fallback` and `row_wise` are those of an EngineConfig.
    """
    model = (
        model_or_config if isinstance(model_or_config, nn.Module) else meta_model(model_or_config)
    )
    start = time.perf_counter()
    has_weights = not any(p.is_meta for p in model.parameters())
    if has_weights:
        admit(model)
        _settle(model)
    state = _rewrite(model, fallback, row_wise)
    report = _report(model, state, time.perf_counter() - start)
    if not has_weights and any(served.replay for served in state.served):
        report.notes.append(
            "without weights, the prefix stability of replayed regions was not tested"
        )
    return report


def _settings(config: EngineConfig | None, settings: dict[str, Any]) -> EngineConfig:
    known = {field.name for field in fields(EngineConfig)}
    for name in settings:
        if name not in known:
            raise ValueError(
                f"unknown setting {name!r}: EngineConfig has {', '.join(sorted(known))}"
            )
    if config is not None and not isinstance(config, EngineConfig):
        raise ValueError(
            f"config is a {type(config).__name__}: give an EngineConfig, or its fields as keywords"
        )
    if config is not None and settings:
        raise ValueError(f"give either config or its fields, not both ({', '.join(settings)})")
    return config or EngineConfig(**settings)


def _settle(model: nn.Module) -> None:
    """One forward pass over a short text: some models rewrite their weights in the first (RWKV rescales them)."""
    if not hasattr(model, "get_input_embeddings"):
        raise RewriteError(
            f"{type(model).__name__} is no language model of transformers (it has no get_input_embeddings)",
            fix="pass what AutoModelForCausalLM.from_pretrained returns",
        )
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    longest = _named_positions(model) or PREFIX_TOKENS
    text = samples(model, embedding.num_embeddings, longest, "quick", 0)[0]
    (counted,) = reference_logits(model, [text])
    check_positions(model, text, counted)


def _rewrite(model: nn.Module, fallback: str, row_wise: tuple[str, ...]) -> Rewriting:
    captured = capture(model)
    measured = mark_row_wise(captured, row_wise)
    mark_returned_rows(captured)
    state = rewrite(captured, pipeline(), fallback=fallback)
    state.notes += [f"{name} has no rule; measured: {what}" for name, what in measured.items()]
    return state


def _report(model: nn.Module, state: Rewriting, seconds: float) -> RewriteReport:
    config = _text_config(model)
    return make_report(
        state,
        type(model).__name__,
        getattr(config, "layer_types", None),
        _max_positions(model, state),
        seconds,
    )


def _text_config(model: nn.Module) -> Any:
    config: Any = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _named_positions(model: nn.Module) -> int | None:
    """The limit that the configuration names; None for any number (for which XLNet's says -1)."""
    named = getattr(_text_config(model), "max_position_embeddings", None)
    return named if isinstance(named, int) and named > 0 else None


def _max_positions(model: nn.Module, state: Rewriting) -> int | None:
    """The model's own limit, or the captured graph's where that is lower."""
    known = [n for n in (_named_positions(model), state.captured.max_tokens) if n is not None]
    return min(known) if known else None


def _artifact(model: nn.Module, state: Rewriting, merged: tuple[Merged, ...] = ()) -> Artifact:
    select_rows(state)
    names = {node: name for name, node in state.inputs.items()}
    order = tuple(names[node] for node in state.graph.nodes if node.op == "placeholder")
    rows = {spec.name: spec for served in state.served for spec in served.rows}
    states = {spec.name: spec for served in state.served for spec in served.states}
    logits = state.captured.logits
    vocab_size = shape_of(logits)[-1]
    assert isinstance(vocab_size, int)
    first = next(model.parameters())
    return Artifact(
        module=state.captured.module,
        input_names=order,
        rows=tuple(rows.values()),
        states=tuple(states.values()),
        vocab_size=vocab_size,
        max_positions=_max_positions(model, state),
        dtype=first.dtype,
        device=first.device,
        min_tokens=state.shortest_row,
        switch_lengths=tuple(sorted(state.switch_lengths)),
        weights=LiveWeights.of(model, state.captured.weight_names, merged),
        structure=Structure.of(model),
        rounding=coarse_rounding(state.graph, first.dtype),
    )


def _validate(
    engine: Engine, artifact: Artifact, model: nn.Module, size: str, seed: int
) -> Validation:
    """Score random texts packed, chunked and token by token, and compare with the original model."""
    # a row of several tokens is not there before all of them are
    reaching = max((2 * row.every + 1 for row in artifact.rows if row.every > 1), default=0)
    texts = samples(model, artifact.vocab_size, _longest_sample(engine), size, seed, reaching)
    expected = reference_logits(model, texts)
    scored = {name: engine.score(texts, schedule=schedule) for name, schedule in SCHEDULES.items()}
    found = Validation.of(texts, expected, scored, artifact.precision)
    if found.passed:
        return found

    def score(schedule: Any) -> list[torch.Tensor]:
        return engine.score(texts, schedule=schedule)

    likewise = validate_likewise(artifact, model, texts, score, SCHEDULES)
    return likewise if likewise is not None and likewise.passed else found


def _longest_sample(engine: Engine) -> int:
    limit = engine.model.max_positions
    return min(limit, engine.max_cached) if limit is not None else engine.max_cached


@torch.no_grad()
def _test_replays(engine: Engine, model: nn.Module, state: Rewriting) -> None:
    """Measure the contract of every replayed region on one text run through the engine."""
    replays = [(served, served.replay) for served in state.served if served.replay is not None]
    if not replays:
        return
    longest = min(PREFIX_TOKENS, _longest_sample(engine))
    (text, *_) = samples(model, engine.model.vocab_size, longest, "prefix", 1)
    for _, replay in replays:
        replay.probe = []
    engine.score([text])
    for served, replay in replays:
        rows, replay.probe = replay.probe, None
        assert rows is not None
        check_prefix(served, rows, engine.model.max_positions)
    engine.report.notes.append(
        f"{len(replays)} replayed regions passed the prefix test, on these weights and on drawn ones"
    )
