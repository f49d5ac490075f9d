from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regraft.kernels.sampling import greedy
from tests.kernels import sampling

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sampling.SIZES)
def test_on_the_cpu(name: str) -> None:
    sampling.check(name, greedy)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(folder)}
    process = subprocess.run(
        [sys.executable, "-m", "tests.kernels.sampling"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return dict(json.loads(line) for line in process.stdout.splitlines())


@pytest.mark.xdist_group("sampling_interpreted")
@pytest.mark.parametrize("name", sampling.SIZES)
def test_triton_interpreted(name: str, interpreted: dict[str, str]) -> None:
    assert interpreted[name] == ""


def test_a_later_one_of_equals_is_noticed() -> None:
    def last(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, best = greedy(logits.flip(-1))
        return logits.shape[1] - 1 - tokens, best

    with pytest.raises(AssertionError):
        sampling.check("several parts", last)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sampling.SIZES)
def test_on_a_gpu(name: str) -> None:
    sampling.check(name, greedy, "cuda")
