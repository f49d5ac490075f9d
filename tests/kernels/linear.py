"""Projections of few rows and of many, and a program that runs the Triton kernels without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels.triton_process import compiling, is_interpreted, run_cases
from tests.tolerance import assert_close

PROCESSORS = 132
"""Of the card whose tiles are chosen where there is none."""

CASES = {
    "one row": (1, 70, 1024, False),
    "parts of K": (5, 64, 4096, True),
    "a tile of 64": (33, 200, 640, True),
    "as many as a tile has": (64, 72, 136, False),
    "a tile of 128, parts of K": (100, 130, 2048, False),
    "left to BLAS": (129, 64, 72, True),
    "not evenly in memory": (3, 40, 63, True),
    "none": (0, 64, 128, False),
}
"""Name -> rows, columns, width, whether there is a bias."""

BIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "every other": lambda x: x[::2],
    "a column": lambda x: x.view(16, 2)[:, 1],
    "a number": lambda x: x[3],
    "one element": lambda x: x[3:4],
    "one for all": lambda x: x[3].expand(16),
    "a row": lambda x: x[None, :16],
}
"""Name -> of 32 elements, a bias of 16 columns that does not lie as N elements side by side."""

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def check(name: str, linear: Linear, device: str = "cpu", dtype: torch.dtype = torch.float16) -> None:  # fmt: skip
    """`linear` against the product in float64."""
    rows, columns, width, has_bias = CASES[name]
    x = torch.randn(1, rows, width).to(device, dtype)
    weight = (torch.randn(columns, width) / width**0.5).to(device, dtype)
    bias = torch.randn(columns).to(device, dtype) if has_bias else None
    expected = functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    out = linear(x, weight, bias)
    assert out.dtype == dtype and out.is_contiguous()
    assert_close(out, expected, dtype=dtype, name=name)


def check_interpreted(name: str) -> None:
    """With the tiles of a card."""
    from regraft.kernels.linear import triton

    triton.num_processors = lambda device: PROCESSORS
    check(name, triton.linear_triton)


def check_bias(name: str, linear: Linear, device: str = "cpu") -> None:
    """A bias in another layout, with NaN wherever it has no element."""
    x, weight = torch.randn(1, 3, 64).half(), (torch.randn(16, 64) / 8).half()
    kept = BIASES[name](torch.arange(32)).flatten()
    storage = torch.full((32,), torch.nan).half()
    storage[kept] = torch.randn(32).half()[kept]
    x, weight, bias = x.to(device), weight.to(device), BIASES[name](storage.to(device))
    expected = functional.linear(x.double(), weight.double(), bias.double())
    assert_close(linear(x, weight, bias), expected, dtype=torch.float16, name=name)


def check_bias_interpreted(name: str) -> None:
    """With the tiles of a card."""
    from regraft.kernels.linear import triton

    triton.num_processors = lambda device: PROCESSORS
    check_bias(name, triton.linear_triton)


def check_rows_of_bias_refused() -> None:
    """A bias of several rows is none of these."""
    from regraft.kernels.linear import triton

    x, weight = torch.randn(3, 64).half(), torch.randn(16, 64).half()
    with pytest.raises(ValueError, match="not the same for all rows"):
        triton.linear_triton(x, weight, torch.randn(3, 16).half())


def compile_all() -> None:
    """For Hopper: every tile that few rows take."""
    from regraft.kernels.invariant import triton_products
    from regraft.kernels.linear import triton

    triton.num_processors = lambda device: PROCESSORS
    with compiling({triton_products: ("product_kernel", "add_parts_kernel")}):
        for rows, columns, width, _ in CASES.values():
            if rows <= triton.MOST and width % 8 == 0:
                triton.linear_triton(
                    torch.empty(rows, width).bfloat16(),
                    torch.empty(columns, width).bfloat16(),
                    None,
                )


if __name__ == "__main__":
    if is_interpreted():
        run_cases(
            [
                *((name, partial(check_interpreted, name)) for name in CASES),
                *((f"bias: {name}", partial(check_bias_interpreted, name)) for name in BIASES),
                ("bias: refused", check_rows_of_bias_refused),
            ]
        )
    else:
        run_cases([("compiled", compile_all)])
