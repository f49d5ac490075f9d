from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from regraft.kernels.linear import linear
from tests.kernels import linear as cases
from tests.kernels.triton_process import outcomes


@pytest.mark.parametrize("name", cases.CASES)
def test_on_the_cpu(name: str) -> None:
    cases.check(name, linear)


@pytest.mark.xdist_group("linear_interpreted")
@pytest.mark.parametrize("name", cases.CASES)
def test_triton_interpreted(name: str) -> None:
    assert outcomes("linear", True)[name] == ""


@pytest.mark.xdist_group("linear_interpreted")
@pytest.mark.parametrize("name", [*cases.BIASES, "refused"])
def test_a_bias_in_another_layout_interpreted(name: str) -> None:
    assert outcomes("linear", True)[f"bias: {name}"] == ""


@pytest.mark.slow
def test_triton_compiles_without_a_gpu() -> None:
    assert outcomes("linear", False) == {"compiled": ""}


def test_a_part_of_k_that_is_left_out_is_noticed() -> None:
    def half(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        width = weight.shape[1] // 2
        return functional.linear(x[..., :width], weight[:, :width], bias)

    with pytest.raises(AssertionError):
        cases.check("parts of K", half)


def test_shape_and_dtype_are_known_beforehand() -> None:
    x = torch.empty(1, 3, 8, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(16, 8, dtype=torch.bfloat16, device="meta")
    out = linear(x, weight, None)
    assert out.shape == (1, 3, 16) and out.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", cases.CASES)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    cases.check(name, linear, "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases.BIASES)
def test_a_bias_in_another_layout_on_a_gpu(name: str) -> None:
    cases.check_bias(name, linear, "cuda")


@pytest.mark.gpu
def test_a_chain_gives_the_bits_of_calls_one_by_one() -> None:
    """Each launched while the one before it ends: none may read what is not written yet, or overwrite what is read."""
    weights = [torch.randn(512, 512, device="cuda").bfloat16() / 22 for _ in range(40)]
    first = torch.randn(1, 7, 512, device="cuda").bfloat16()

    def chain(between) -> Tensor:
        x = first
        for weight in weights:
            x = linear(x, weight, None)
            between()
        return x

    expected = chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(lambda: None)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
        assert torch.equal(chain(lambda: None), expected)
