"""The Triton kernels: interpreted and compiled without a GPU (`paged_triton` says how), run where there is one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regraft.kernels.paged_attention import paged_attention
from regraft.kernels.paged_attention.naive import paged_attention_naive
from tests.kernels import paged_triton
from tests.kernels.paged import Case, check, copied, make
from tests.kernels.triton_process import outcomes
from tests.tolerance import assert_close


def names(interpreted: bool) -> list[str]:
    return [name for name, _ in paged_triton.outcomes(interpreted)]


# One worker runs all of a process's cases: the process is started once.
@pytest.mark.xdist_group("paged_attention_interpreted")
@pytest.mark.parametrize("name", names(True))
def test_interpreted(name: str) -> None:
    assert outcomes("paged_triton", True)[name] == ""


@pytest.mark.slow
@pytest.mark.xdist_group("paged_attention_compiled")
@pytest.mark.parametrize("name", names(False))
def test_compiles_without_a_gpu(name: str) -> None:
    assert outcomes("paged_triton", False)[name] == ""


@pytest.mark.gpu
@pytest.mark.parametrize("name", paged_triton.CASES)
def test_on_a_gpu(name: str) -> None:
    paged_triton.run(name, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", paged_triton.MUTANTS)
def test_mutant_is_noticed_on_a_gpu(name: str) -> None:
    paged_triton.run_mutant(name, "cuda")


@pytest.mark.gpu
def test_past_2_31_elements_on_a_gpu() -> None:
    paged_triton.run_past_2_31_elements("cuda")


LARGE = Case((1, 200, 1, 0, 67, 1), (900, 0, 3, 5, 130, 4097), 8, 2, 64, 64, 16, padding=3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"width": 128, "v_width": 128, "window": 100},
        {"width": 96, "v_width": 96, "sinks": True, "softcap": 3.0},
        {"width": 192, "v_width": 128, "kv_heads": 8, "chunk": 64},
        {"width": 256, "v_width": 256, "alibi": True},
        {"width": 576, "v_width": 512, "kv_heads": 1, "scale": 0.05},
        {"width": 80, "v_width": 80, "reach": 40},
    ],
)
def test_large_on_a_gpu(changes: dict[str, Any], dtype: torch.dtype) -> None:
    case = replace(LARGE, dtype=dtype, scale=0.1) if "scale" not in changes else LARGE
    case = replace(case, dtype=dtype, **changes)
    check(case, paged_attention, "cuda")
    decode = replace(case, news=(1, 1, 1, 0, 1, 1))
    check(decode, paged_attention, "cuda")


@pytest.mark.gpu
def test_a_replayed_cuda_graph_follows_the_lengths() -> None:
    cases = [
        Case((1,) * 4, contexts, heads=8, width=64, v_width=64, page_size=16, dtype=torch.bfloat16)
        for contexts in ((900, 3, 17, 640), (5, 1100, 0, 2), (0, 0, 0, 0))
    ]
    # A batch that shrank: two of the four rows belong to nobody.
    cases.append(replace(cases[0], news=(1, 1, 0, 0), contexts=(33, 700, 0, 0), padding=2))
    arguments = [_same_pools(make(case, "cuda")) for case in cases]
    static = copied(arguments[0])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        paged_attention(**static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(**static)
    for step in arguments:
        for name, x in step.items():
            if isinstance(x, Tensor):
                static[name].copy_(x)
        out.fill_(torch.nan)
        graph.replay()
        expected = paged_attention_naive(
            **{n: x.cpu() if isinstance(x, Tensor) else x for n, x in copied(step).items()}
        )
        assert_close(out, expected)


def _same_pools(arguments: dict[str, Any], pages: int = 120, table: int = 80) -> dict[str, Any]:
    """Arguments whose pools and block table have one size, as a graph needs them."""
    for name in ("k_cache", "v_cache"):
        pool = arguments[name]
        arguments[name] = torch.full((pages, *pool.shape[1:]), torch.nan).to(pool)
        arguments[name][: len(pool)] = pool
    old = arguments["block_table"]
    arguments["block_table"] = old.new_zeros(len(old), table)
    arguments["block_table"][:, : old.shape[1]] = old
    return arguments
