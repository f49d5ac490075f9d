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
    assert outcomes("sampling", True)[f"{name}, alone"] == ""


def test_a_later_one_of_equals_is_noticed() -> None:
    def last(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, best = greedy(logits.flip(-1))
        return logits.shape[1] - 1 - tokens, best

    with pytest.raises(AssertionError):
        sampling.check("several parts", last)


def test_a_sum_of_the_best_part_alone_is_noticed() -> None:
    def of_a_part(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, _ = greedy(logits)
        return tokens, greedy(logits[:, : logits.shape[1] // 2])[1]

    with pytest.raises(AssertionError):
        sampling.check("one row", of_a_part)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sampling.SIZES)
def test_on_a_gpu(name: str) -> None:
    sampling.check(name, greedy, "cuda")
    sampling.check_alone(name, greedy, "cuda")
