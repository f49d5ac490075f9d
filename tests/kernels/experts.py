"""Routed rows for the experts operator, and a program that runs the Triton kernel without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from regraft.kernels.experts.naive import expert_linear_naive
from tests.kernels.triton_process import run_cases
from tests.tolerance import assert_close


@dataclass(frozen=True)
class Case:
    rows: int
    experts: int
    width: int = 40
    out: int = 72
    transposed: bool = False
    only: tuple[int, ...] = ()
    """Experts that get rows; all by default."""
    dtype: torch.dtype = torch.float32


CASES = {
    "one row": Case(1, 4),
    "fewer rows than experts": Case(5, 37),
    "transposed": Case(33, 3, transposed=True),
    "empty experts, first and last": Case(50, 6, only=(2, 4)),
    "one expert": Case(70, 1),
    "several blocks an expert": Case(150, 3, width=17, out=9),
    "no row": Case(0, 3),
}


def make(case: Case, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """The operator's arguments; x is a strided view."""
    shape = (case.width, case.out) if case.transposed else (case.out, case.width)
    weight = torch.randn(case.experts, *shape, device=device).to(case.dtype)
    x = torch.randn(case.rows, 2 * case.width, device=device).to(case.dtype)[:, ::2]
    ids = torch.randint(0, case.experts, (case.rows,), device=device)
    if case.only:
        ids = torch.tensor(case.only, device=device)[ids % len(case.only)]
    return x, weight, ids, case.transposed


def run(case: Case, device: str = "cpu") -> None:
    """The Triton kernel against the naive twin in float64."""
    from regraft.kernels.experts.triton import expert_linear_triton

    x, weight, ids, transposed = make(case, device)
    expected = expert_linear_naive(x.double(), weight.double(), ids, transposed)
    actual = expert_linear_triton(x, weight, ids, transposed)
    assert_close(actual, expected, dtype=case.dtype, scale=case.width**0.5)


if __name__ == "__main__":
    run_cases((name, partial(run, case)) for name, case in CASES.items())
