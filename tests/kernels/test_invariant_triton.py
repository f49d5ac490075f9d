"""The invariant operators' Triton kernels: interpreted and compiled without a GPU (`invariant_triton` says how), run
where there is one.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels import invariant_triton
from tests.kernels.triton_process import outcomes


def named(interpreted: bool) -> list[object]:
    """A parameter for each name. One worker runs all of a process's cases: the process is started once."""
    return [
        pytest.param(
            name,
            marks=[pytest.mark.xdist_group(f"invariant {interpreted} {kind(name)}"), *slowly(name)],
        )
        for name, _ in invariant_triton.outcomes(interpreted)
    ]


def slowly(name: str) -> list[pytest.MarkDecorator]:
    """Whole attentions and recurrences take the interpreter minutes. Those of their bits stay with the fast tests."""
    return [pytest.mark.slow] if kind(name) in ("attention", "recurrent") else []


def kind(name: str) -> str:
    return name.split(",")[0]


@pytest.mark.parametrize("name", named(True))
def test_interpreted(name: str) -> None:
    assert outcomes("invariant_triton", True, kind(name) + ",")[name] == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", named(False))
def test_compiles_without_a_gpu(name: str) -> None:
    assert outcomes("invariant_triton", False, "compiled")[name] == ""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", invariant_triton.PRODUCTS)
def test_products_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    invariant_triton.product_case(name, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(7, 9), (64, 576), (4096, 1024), (70, 1100), (1, 4096)], ids=str)
def test_products_are_steady_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Every tile, and parts of K side by side or one after the other."""
    from regraft.kernels.invariant import steady_product

    for weight in (torch.randn(shape), torch.randn(shape[::-1]).t()):
        assert steady_product(weight.to("cuda", dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_are_steady_on_a_gpu(transposed: bool, dtype: torch.dtype) -> None:
    from regraft.kernels.invariant import steady_experts

    for shape in ((3, 96, 200), (4, 512, 1024)):
        assert steady_experts(torch.randn(shape).to("cuda", dtype), transposed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "sizes", [(64, 64, 9, 3), (128, 128, 32, 8), (256, 256, 8, 2), (20, 16, 4, 1), (192, 128, 16, 1)]
)  # fmt: skip
def test_attention_is_steady_on_a_gpu(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    from regraft.kernels.invariant import steady_attention

    assert steady_attention(*sizes, dtype, "cuda")
