from __future__ import annotations

import pytest
import torch

from tests.tolerance import assert_close


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rounding_passes_and_an_error_of_kind_does_not(dtype: torch.dtype) -> None:
    exact = torch.randn(50, 7, dtype=torch.float64)
    assert_close(exact.to(dtype), exact)
    with pytest.raises(AssertionError, match=r"max abs error 5.0.*worst at"):
        assert_close(exact.to(dtype) * 1.0 + torch.eye(50, 7, dtype=dtype) * 5, exact)
    with pytest.raises(AssertionError, match=r"max abs error"):
        assert_close((exact * 1.05).to(dtype), exact)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_nan_or_a_lone_infinity_never_passes(poison: float) -> None:
    clean, spoilt = torch.zeros(3), torch.tensor([0.0, poison, 0.0])
    for actual, expected in ((clean, spoilt), (spoilt, clean)):
        with pytest.raises(AssertionError, match=r"1 of 3 elements off, the worst at \(1,\)"):
            assert_close(actual, expected)


def test_the_same_infinity_passes_but_not_the_same_nan() -> None:
    infinite = torch.tensor([float("inf"), float("-inf")])
    assert_close(infinite, infinite.clone())
    with pytest.raises(AssertionError):
        assert_close(torch.full((2,), torch.nan), torch.full((2,), torch.nan))


def test_shapes_are_not_broadcast() -> None:
    with pytest.raises(AssertionError, match=r"logits: expected shape \[1, 3\], got \[3\]"):
        assert_close(torch.zeros(3), torch.zeros(1, 3), name="logits")


def test_integers_must_be_equal() -> None:
    assert_close(torch.arange(3), torch.arange(3))
    with pytest.raises(AssertionError):
        assert_close(torch.arange(3), torch.arange(1, 4))
