"""The recurrent operators' Triton kernels: interpreted and compiled without a GPU (`recurrent_triton` says how), run
where there is one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import recurrent_triton
from tests.kernels.recurrent_triton import OPERATORS, Case, check, form, make, state_name
from tests.kernels.triton_process import outcomes
from tests.tolerance import assert_close


def named(interpreted: bool) -> list[object]:
    """A parameter for each name. One worker runs all of a process's cases: the process is started once."""
    found = [name for name, _ in recurrent_triton.outcomes(interpreted)]
    return [
        pytest.param(
            name, marks=pytest.mark.xdist_group(f"recurrent {interpreted} {begin_of(name)}")
        )
        for name in found
    ]


def begin_of(name: str) -> str:
    """What the names of one process begin with: an operator, or "compiled"."""
    return name.split(",")[0].split(":")[0]


@pytest.mark.parametrize("name", named(True))
def test_interpreted(name: str) -> None:
    assert outcomes("recurrent_triton", True, begin_of(name) + ",")[name] == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", named(False))
def test_compiles_without_a_gpu(name: str) -> None:
    assert outcomes("recurrent_triton", False, begin_of(name))[name] == ""


@pytest.mark.gpu
@pytest.mark.parametrize("name", recurrent_triton.CASES)
def test_on_a_gpu(name: str) -> None:
    recurrent_triton.run(name, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", recurrent_triton.MUTANTS)
def test_mutant_is_noticed_on_a_gpu(name: str) -> None:
    recurrent_triton.run_mutant(name, "cuda")


# By one worker, one after the other: each takes much memory.
@pytest.mark.gpu
@pytest.mark.xdist_group("recurrent past 2^31 elements")
@pytest.mark.parametrize("operator", OPERATORS)
def test_past_2_31_elements_on_a_gpu(operator: str) -> None:
    recurrent_triton.run_past_2_31_elements(operator, "cuda")


LARGE: dict[str, dict[str, Any]] = {
    "gated_delta_rule": {"keys": 128, "width": 128, "heads": 8, "key_heads": 4},
    "kda": {"keys": 128, "width": 128, "heads": 4},
    "decayed_linear": {"keys": 96, "width": 96, "heads": 4},
    "ssd": {"heads": 8, "groups": 2, "width": 64, "size": 128},
    "selective_scan": {"channels": 1000, "size": 16},
    "causal_conv": {"channels": 1000},
    "causal_window": {"channels": 1000},
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operator", LARGE)
def test_large_on_a_gpu(operator: str, dtype: torch.dtype) -> None:
    registered = recurrent_triton.operator(operator)
    mixed = Case(
        operator, (1, 200, 1, 0, 67, 1), (900, 0, 3, 5, 130, 4), 3, dtype, LARGE[operator], 4.0
    )
    check(mixed, registered, "cuda")
    check(mixed, device="cuda")  # by chunks, whatever the operator would take
    check(replace(mixed, news=(1, 1, 1, 0, 1, 1)), registered, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_replayed_cuda_graph_follows_the_lengths(operator: str) -> None:
    cases = [
        Case(operator, (1,) * 4, contexts, dtype=torch.bfloat16)
        for contexts in ((900, 3, 17, 640), (5, 1100, 0, 2), (0, 0, 0, 0))
    ]
    # A batch that shrank: two of the four rows belong to nobody.
    cases.append(replace(cases[0], news=(1, 1, 0, 0), contexts=(33, 700, 0, 0), padding=2))
    steps = [make(case, "cuda") for case in cases]
    name, static = state_name(cases[0]), make(cases[0], "cuda")
    registered = recurrent_triton.operator(operator)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        registered(**static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = registered(**static)
    for step in steps:
        for key, x in step.items():
            if isinstance(x, Tensor):
                static[key].copy_(x)
        out.fill_(torch.nan)
        graph.replay()
        theirs = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in step.items()}
        expected = form(operator, "naive")(**theirs)
        assert_close(out, expected, dtype=torch.bfloat16)
        used = theirs["state_slots"][theirs["cu_seqlens"].diff() > 0]
        assert_close(static[name].cpu()[used], theirs[name][used], dtype=torch.bfloat16)
