"""Rewritten models cut into steps, each distinct one compiled once: on the CPU, with the compiler's front half."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.backends.debugging import aot_eager

import regraft
from regraft.rewriter.declare import reaches_of
from regraft.rewriter.validate import reference_logits
from regraft.runtime import cuda_graphs
from regraft.runtime.outline import layer_of
from regraft.runtime.runner import Runner
from tests.families.models import FAMILIES, build
from tests.runtime.test_cuda_graphs import called_again

LENGTHS = (37, 1, 5, 24)


@functools.cache
def compiled_engine(name: str) -> tuple[Any, regraft.Engine]:
    model = build(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._inductor, "compile", aot_eager)
        engine = regraft.wrap(
            model, compile=True, validate="off", page_size=4, cache_tokens=600, max_requests=8
        )
    return model, engine


def runner_of(engine: regraft.Engine) -> Runner:
    return engine._loop.runner


@pytest.mark.parametrize(
    ("name", "bodies"),
    [
        ("qwen3", 4),  # before the layers, the first, the others, behind them
        ("qwen3_moe", 5),
        ("gemma2", 5),  # two page tables
    ],
)
def test_layers_share_a_body_that_is_compiled_once_for_all_sizes(name, bodies):
    model, engine = compiled_engine(name)
    compiled = runner_of(engine)._compiled
    assert compiled.program.num_bodies == compiled.num_compiled == bodies
    texts = [FAMILIES[name].prompt(n, seed=n).tolist() for n in LENGTHS]
    expected = reference_logits(model, texts)
    for schedule in ("prefill", "decode", 1, 3, 7):
        for found, wanted in zip(engine.score(texts, schedule=schedule), expected):
            assert (found - wanted).abs().max() <= 1e-4, schedule
    assert compiled.num_compiled == bodies
    assert engine.report.notes == []


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_graphs_of_any_bucket_run_what_was_compiled(name, monkeypatch):
    """Their inputs lie as those that layers were compiled for: nothing is compiled again, nothing left out."""
    monkeypatch.setattr(cuda_graphs, "_PAGES", (3, 8))
    model, engine = compiled_engine(name)
    runner = runner_of(engine)
    bodies = runner._compiled.num_compiled
    runner._graphs = cuda_graphs.StepGraphs(
        runner._compiled, runner.pools, runner.last_tokens, 8, 40, called_again,
        reaches=reaches_of(engine.model.rows), max_tokens=64,
    )  # fmt: skip
    texts = [FAMILIES[name].prompt(n, seed=n).tolist() for n in LENGTHS]
    expected = reference_logits(model, texts)
    for found, wanted in zip(engine.score(texts, schedule="decode"), expected):
        assert (found - wanted).abs().max() <= 1e-4
    assert {key.width for key in runner._graphs._recorded} == {3, 8, 40}
    for length in (16, 16, 13):  # the last one fills its bucket up with another sequence
        prompt = FAMILIES[name].prompt(length).tolist()
        (logits,) = reference_logits(model, [prompt])
        (output,) = engine.generate([prompt], max_new_tokens=2, do_sample=False)
        assert output.token_ids[0] == int(logits[-1].argmax())
    with_prompts = [key for key in runner._graphs._recorded if not key.is_decode]
    assert with_prompts == [(16, 2, 8, False)]
    assert runner._compiled.num_compiled == bodies
    assert engine.report.notes == []
    runner._graphs = None


def test_a_replayed_region_stays_outside_and_the_report_says_so():
    name = "rwkv"
    model, engine = compiled_engine(name)
    compiled = runner_of(engine)._compiled
    assert not compiled.is_recordable
    (note,) = [note for note in engine.report.notes if "run on the host" in note]
    assert any(layer.path in note for layer in engine.report.layers)
    texts = [FAMILIES[name].prompt(n, seed=n).tolist() for n in (9, 1, 4)]
    for found, wanted in zip(engine.score(texts, schedule=3), reference_logits(model, texts)):
        assert (found - wanted).abs().max() <= 1e-4


def test_a_weight_that_is_changed_or_replaced_reaches_every_layer_that_has_it():
    model, engine = compiled_engine("qwen3")
    texts = [FAMILIES["qwen3"].prompt(9).tolist()]
    layers = model.model.layers
    before = engine.score(texts)[0]
    with torch.no_grad():
        layers[1].mlp.up_proj.weight.mul_(0.5)
    layers[2].mlp.down_proj.weight = torch.nn.Parameter(layers[2].mlp.down_proj.weight * 2)
    layers[0].mlp.gate_proj.weight.data = layers[0].mlp.gate_proj.weight.data * 2
    found = engine.score(texts)[0]
    assert (found - reference_logits(model, texts)[0]).abs().max() <= 1e-4
    assert (found - before).abs().max() > 1e-3
    assert runner_of(engine)._compiled.num_compiled == 4
    compiled_engine.cache_clear()


@pytest.mark.slow
def test_inductor_itself():
    model = build("qwen3")
    engine = regraft.wrap(
        model, compile=True, validate="off", page_size=4, cache_tokens=600, max_requests=8
    )
    texts = [FAMILIES["qwen3"].prompt(n, seed=n).tolist() for n in LENGTHS]
    expected = reference_logits(model, texts)
    for schedule in ("prefill", "decode"):
        for found, wanted in zip(engine.score(texts, schedule=schedule), expected):
            assert (found - wanted).abs().max() <= 1e-4, schedule
    assert runner_of(engine)._compiled.num_compiled == 4


def test_a_body_that_fixes_a_size_runs_operator_by_operator(monkeypatch):
    from regraft.runtime import compiled as module

    monkeypatch.setattr(torch._inductor, "compile", aot_eager)
    monkeypatch.setattr(torch._dynamo, "maybe_mark_dynamic", lambda tensor, dim: None)
    graph = fx.Graph()
    ids = graph.placeholder("input_ids")
    rows = graph.placeholder("logits_rows")
    picked = graph.call_function(torch.ops.aten.index_select.default, (ids, 1, rows))
    graph.output((picked,))
    toy = Toy(fx.GraphModule(torch.nn.Module(), graph), ("input_ids", "logits_rows"))
    notes: list[str] = []
    program = module.CompiledProgram(toy, {}, notes)
    assert notes == ["not compiled, since the code fixes a size: outside the layers"]
    inputs = {"input_ids": torch.arange(9)[None], "logits_rows": torch.tensor([8, 2])}
    assert program(inputs).tolist() == [[8, 2]]


class Toy:
    rows = states = ()
    vocab_size, min_tokens = 1, 1
    device = torch.device("cpu")

    def __init__(self, module: fx.GraphModule, input_names: tuple[str, ...]) -> None:
        self.module, self.input_names = module, input_names


def test_the_layer_of_a_module_path():
    assert layer_of("model.layers.3.mlp.experts.7") == "model.layers.3"
    assert layer_of("transformer.h.11") == "transformer.h.11"
    assert layer_of("model.norm") == layer_of("") == ""
