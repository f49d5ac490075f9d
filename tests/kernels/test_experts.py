from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regraft.kernels.experts import expert_linear
from regraft.kernels.experts.naive import expert_linear_naive
from tests.kernels import experts
from tests.tolerance import assert_close

ROOT = Path(__file__).parents[2]


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


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("triton")
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.run(
        [sys.executable, "-m", "tests.kernels.experts"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return dict(json.loads(line) for line in process.stdout.splitlines())


@pytest.mark.xdist_group("experts_interpreted")
@pytest.mark.parametrize("name", experts.CASES)
def test_triton_interpreted(name: str, interpreted: dict[str, str]) -> None:
    assert interpreted[name] == ""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", experts.CASES)
def test_triton_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    experts.run(replace(experts.CASES[name], dtype=dtype), "cuda")
