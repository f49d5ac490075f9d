from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from regraft.kernels.experts import expert_linear
from regraft.kernels.experts.naive import expert_linear_naive
from tests.kernels import experts
from tests.kernels.triton_process import outcomes
from tests.tolerance import assert_close


@pytest.mark.parametrize("name", experts.CASES)
def test_on_the_cpu(name: str) -> None:
    x, weight, ids, transposed = experts.make(experts.CASES[name])
    expected = expert_linear_naive(x, weight, ids, transposed)
    assert_close(expert_linear(x, weight, ids, transposed), expected, scale=4)  # 40 terms a sum


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight, ids, transposed = experts.make(experts.Case(20, 4))
    whole = expert_linear(x, weight, ids, transposed)
    for row in range(20):
        alone = expert_linear(x[row : row + 1], weight, ids[row : row + 1], transposed)
        assert_close(alone[0], whole[row], scale=4)


@pytest.mark.xdist_group("experts_interpreted")
@pytest.mark.parametrize("name", experts.CASES)
def test_triton_interpreted(name: str) -> None:
    assert outcomes("experts", True)[name] == ""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", experts.CASES)
def test_triton_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    experts.run(replace(experts.CASES[name], dtype=dtype), "cuda")
