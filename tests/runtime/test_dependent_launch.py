from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters

from regraft.runtime import dependent_launch
from regraft.runtime.dependent_launch import all_wait, compile_graph

KERNEL = "x = async_compile.triton('triton_poi_0', '''\n{}\n''')\n"
WAITING = KERNEL.format("tl.extra.cuda.gdc_wait()\ntl.load(in_ptr0)")
FILLING = KERNEL.format("tl.store(out_ptr0, 0)")
DEVICE = torch.device("cpu")


def traced() -> fx.GraphModule:
    return fx.symbolic_trace(lambda x: (x.sin() + 1,))


@pytest.mark.parametrize(
    ("source", "expected"),
    [("", True), (WAITING, True), (WAITING + FILLING, False), (FILLING + WAITING, False)],
)
def test_every_kernel_of_a_program_has_to_wait(source, expected):
    assert all_wait(source) is expected


@pytest.fixture
def compilations(monkeypatch):
    """The options of each compilation on a card that launches kernels early; it generates `sources`."""
    calls: list[object] = []
    sources = [WAITING]

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


def test_kernels_that_all_wait_are_launched_early(compilations):
    calls, _ = compilations
    compile_graph(traced(), [], DEVICE)
    assert calls == [EARLY]


@pytest.mark.parametrize("sources", [[], [WAITING, FILLING]], ids=["unknown", "one does not"])
def test_others_are_compiled_the_common_way(compilations, sources):
    calls, generated = compilations
    generated[:] = sources
    compile_graph(traced(), [], DEVICE)
    assert calls == [EARLY, None]


def test_elsewhere_nothing_is_asked_for(compilations, monkeypatch):
    calls, _ = compilations
    monkeypatch.setattr(dependent_launch, "is_dependent", lambda device: False)
    compile_graph(traced(), [], DEVICE)
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
