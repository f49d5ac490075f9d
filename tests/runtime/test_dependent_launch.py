from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters

from regraft.runtime import dependent_launch
from regraft.runtime.dependent_launch import compile_graph
from tests.tolerance import assert_close

SOUND, UNSOUND = "a = 1", "no program ("
DEVICE = torch.device("cpu")


def traced() -> fx.GraphModule:
    return fx.symbolic_trace(lambda x: (x.sin() + 1,))


@pytest.fixture
def compilations(monkeypatch):
    """The options of each compilation on a card that launches kernels early; it generates `sources`."""
    calls: list[object] = []
    sources = [SOUND]

    def compiled_by(graph, examples, options=None):
        from torch._inductor.graph import GraphLowering

        calls.append(options)
        if GraphLowering.save_output_code is not None:
            for source in sources:
                GraphLowering.save_output_code(source)
        return graph

    monkeypatch.setattr(torch._inductor, "compile", compiled_by)
    monkeypatch.setattr(dependent_launch, "is_dependent", lambda device: True)
    return calls, sources


EARLY = {"triton.enable_pdl": True}


def test_a_program_that_keeps_the_order_is_launched_early(compilations):
    calls, _ = compilations
    notes: list[str] = []
    compile_graph(traced(), [], DEVICE, notes)
    assert (calls, notes) == ([EARLY], [])


@pytest.mark.parametrize("sources", [[], [SOUND, UNSOUND]], ids=["unknown", "one does not"])
def test_others_are_compiled_the_common_way(compilations, sources):
    calls, generated = compilations
    generated[:] = sources
    notes: list[str] = []
    for _ in range(2):
        compile_graph(traced(), [], DEVICE, notes)
    assert calls == [EARLY, None] * 2
    assert notes == [dependent_launch.COMMON]


def test_inductor_compiles_a_graph_again(monkeypatch):
    """As it does where a program does not keep the order: the first time must leave the graph as it was."""
    read: list[str] = []
    monkeypatch.setattr(dependent_launch, "is_dependent", lambda device: True)
    monkeypatch.setattr(dependent_launch, "keeps_order", read.append)

    def function(x, at):
        scores = x.softmax(-1)
        mask = torch.zeros_like(scores).scatter_(-1, at, 1.0)
        return scores.masked_fill(mask == 0, 0.0).add_(x.mean(-1, keepdim=True))

    x, at = torch.randn(6, 8), torch.randint(8, (6, 3))
    out = torch.compile(function, backend=partial(compile_graph, device=DEVICE, notes=[]))(x, at)
    assert len(read) == 1
    assert_close(out, function(x, at))


def test_elsewhere_nothing_is_asked_for(compilations, monkeypatch):
    calls, _ = compilations
    monkeypatch.setattr(dependent_launch, "is_dependent", lambda device: False)
    compile_graph(traced(), [], DEVICE, [])
    assert calls == [None]


def test_what_inductor_generates_is_seen_also_from_its_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    hits = counters["inductor"]["fxgraph_cache_hit"]
    found: list[list[str]] = []

    def backend(graph, examples):
        with dependent_launch._generated() as sources:
            compiled = torch._inductor.compile(graph, examples)
        found.append(sources)
        return compiled

    for _ in range(2):
        out = torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(8))
        assert torch.equal(out, torch.ones(8).sin() + 1)
        torch._dynamo.reset()
    assert counters["inductor"]["fxgraph_cache_hit"] == hits + 1
    assert found[0] == found[1] and "def call" in found[0][0]
