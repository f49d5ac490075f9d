from __future__ import annotations

import pytest
import torch

from regraft.kernels.sampling import greedy
from tests.kernels import sampling
from tests.kernels.triton_process import outcomes


@pytest.mark.parametrize("name", sampling.SIZES)
def test_on_the_cpu(name: str) -> None:
    sampling.check(name, greedy)


@pytest.mark.xdist_group("sampling_interpreted")
@pytest.mark.parametrize("name", sampling.SIZES)
def test_triton_interpreted(name: str) -> None:
    assert outcomes("sampling", True)[name] == ""


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
