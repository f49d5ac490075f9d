"""What batch invariance rests on: one result for an element or a row at every place, beside any neighbours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regraft.kernels.invariant import places, products, reductions
from regraft.kernels.invariant.places import steady_attention, steady_product
from regraft.kernels.invariant.pointwise import FUNCTIONS, pointwise
from regraft.kernels.invariant.products import TILE, paired_product, tiled_product
from regraft.kernels.invariant.reductions import norm, ordered, softmax, sum_over, tree_sum
from regraft.passes.invariant_exact import POWERS
from tests.tolerance import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
SIZES = (1, 2, 3, 8, 15, 16, 17, 31, 33, 64)
"""Rows beside a row: around a tile."""

F = torch.nn.functional
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in "abs ceil cos erf exp expm1 floor neg reciprocal relu round sign sin square tanh trunc".split()
    },
    "sqrt": lambda x: x.abs().sqrt(),
    "log": lambda x: (x.abs() + 0.01).log(),
    "log2": lambda x: (x.abs() + 0.01).log2(),
    "log1p": lambda x: x.abs().log1p(),
    "add": lambda x: x + 0.37,
    "sub": lambda x: 1.7 - x,
    "mul": lambda x: x * 0.37,
    "div": lambda x: x / 3.7,
    "remainder": lambda x: x.remainder(1.3),
    "floor_divide": lambda x: x.div(1.3, rounding_mode="floor"),
    "clamp": lambda x: x.clamp(-1, 1),
    "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu,
    "threshold": lambda x: F.threshold(x, 0.5, 0.25),
    "maximum": lambda x: torch.maximum(x, torch.full_like(x, 0.3)),
    **{f"pow {power}": lambda x, p=power: x.pow(p) for power in POWERS},
    **{f"own {name}": lambda x, n=name: pointwise(x, n) for name in FUNCTIONS if name != "rsqrt"},
    "own rsqrt": lambda x: pointwise(x.abs() + 0.1, "rsqrt"),
}
"""Those of invariant_exact.POINTWISE that compute, and FUNCTIONS."""


def values(dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.randn(4000) * 3, torch.randn(2000) * 60, torch.rand(1000) * 1e4]).to(dtype)  # fmt: skip


def same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


@every_dtype
@pytest.mark.parametrize("name", EXACT)
def test_an_element_has_one_result_at_every_place(name: str, dtype: torch.dtype) -> None:
    """In whole vectors, in the tail of a row, alone, one element further, between others, in other dimensions."""
    check_places(EXACT[name], values(dtype))


def test_rsqrt_has_one_result_in_float32() -> None:
    """In half precision it has not, and is replaced."""
    check_places(lambda x: (x.abs() + 0.1).rsqrt(), values(torch.float32))


def check_places(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    expected = function(x)
    between = torch.empty(len(x), 2, dtype=x.dtype)
    between[:, 0] = x
    assert same(function(between[:, 0]), expected)
    for size in (1, 7, 19):
        pieces = [function(piece.clone()) for piece in x[:700].split(size)]
        assert same(torch.cat(pieces), expected[:700])
    shifted = torch.empty(len(x) + 1, dtype=x.dtype)[1:].copy_(x)
    assert same(function(shifted), expected)
    assert same(function(x.view(70, 100).t()).t(), expected.view(70, 100))


def test_what_is_replaced_is_replaced_for_a_reason() -> None:
    """Torch's own silu and sigmoid round otherwise in the tail of a row: the mode would be false with them."""
    x = torch.randn(4000) * 3
    for function in (F.silu, torch.sigmoid, F.gelu, F.softplus):
        alone = torch.cat([function(one.clone()) for one in x.split(1)])
        assert not torch.equal(alone, function(x))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_torchs_own(name: str) -> None:
    x = torch.linspace(-30, 30, 2001).double()
    theirs = {"gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "exp2": torch.exp2}
    function = theirs.get(name) or getattr(F, name, None) or getattr(torch, name)
    x = x.abs() + 0.01 if name == "rsqrt" else x
    assert_close(pointwise(x, name), function(x))
    assert_close(pointwise(x.float(), name), function(x.float()), scale=4)


SHAPES = ((1, 7), (5, 7), (5, 33), (16, 64), (33, 100), (192, 64), (576, 576), (1000, 96), (64, 1536))  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_a_row_of_a_product_has_one_result(out: int, width: int, dtype: torch.dtype) -> None:
    """At every place of a tile, in any number of rows, with a weight that lies either way."""
    row = torch.randn(width).to(dtype)
    for weight in (torch.randn(out, width).to(dtype), torch.randn(width, out).to(dtype).t()):
        assert steady_product(weight)
        (expected,) = tiled_product(row[None], weight)
        assert_close(expected, weight.double() @ row.double(), dtype=dtype, scale=4 + width / 32)
        for size in SIZES:
            for place in {0, size // 3, size // 2, size - 1}:
                rows = torch.randn(size, width).to(dtype)
                rows[place] = row
                assert torch.equal(tiled_product(rows, weight)[place], expected)


@pytest.mark.parametrize("sizes", [(64, 64, 9, 3), (16, 16, 4, 4), (48, 32, 8, 1), (80, 80, 4, 2)])
def test_a_query_has_one_result(sizes: tuple[int, int, int, int]) -> None:
    assert steady_attention(*sizes, torch.float32)


def by_the_rows_at_hand(tile: Tensor, weight: Tensor) -> Tensor:
    """A mutant: the order of the sum is chosen by where a row is."""
    forward = tile @ weight.t()
    backward = tile.flip(1) @ weight.flip(1).t()
    return torch.cat([forward[: TILE // 2], backward[TILE // 2 :]])


def test_a_product_that_depends_on_the_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "tile_product", by_the_rows_at_hand)
    assert not steady_product(torch.randn(64, 576))


def test_attention_products_that_depend_on_the_batch_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def by_batch(left: Tensor, right: Tensor) -> Tensor:
        half = left.shape[2] // 2 if len(left) > 2 else left.shape[2]
        return left[..., :half] @ right[:, :half] + left[..., half:] @ right[:, half:]

    monkeypatch.setattr(places, "values_of", by_batch)
    assert not steady_attention(64, 64, 4, 2, torch.float32)


ROWWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: sum_over(x, [-1], keepdim=False, mean=False),
    "mean": lambda x: sum_over(x, [1], keepdim=True, mean=True),
    "softmax": lambda x: softmax(x, -1, x.dtype, log=False),
    "log_softmax": lambda x: softmax(x, 1, torch.float32, log=True),
    "layer_norm": lambda x: norm(x, 1, x[0] * 0 + 1.3, x[0] * 0 + 0.2, 1e-5, centered=True),
    "rms_norm": lambda x: norm(x, 1, x[0] * 0 + 1.3, None, 1e-6, centered=False),
    "topk values": lambda x: ordered(x, min(4, x.shape[1]), 1, descending=True)[0],
    "topk places": lambda x: ordered(x, min(4, x.shape[1]), 1, descending=True)[1],
    "cumsum": lambda x: x.cumsum(1),
    "amax": lambda x: x.amax(1),
    "argmax": lambda x: x.argmax(1),
    "max": lambda x: x.max(1).values,
    "paired": lambda x: paired_product(x[:, None], x[:, :, None] * 0.5),
}


def rows_differ(function: Callable[[Tensor], Tensor], row: Tensor) -> bool:
    (width,), dtype = row.shape, row.dtype
    (expected,) = function(row[None])
    for size in SIZES:
        rows = torch.randn(size, width).to(dtype)
        rows[size // 2] = row
        strided = torch.empty(width, size, dtype=dtype).t().copy_(rows)
        if not all(torch.equal(function(x)[size // 2], expected) for x in (rows, strided)):
            return True
    return False


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("width", [1, 2, 7, 64, 100, 1000])
@pytest.mark.parametrize("name", ROWWISE)
def test_a_row_has_one_result(name: str, width: int, dtype: torch.dtype) -> None:
    with_ties = (torch.randn(width) * 4).round().div(4)
    for row in (torch.randn(width), with_ties):
        assert not rows_differ(ROWWISE[name], row.to(dtype))


@pytest.mark.parametrize("name", ["sum", "softmax", "layer_norm", "paired"])
def test_a_sum_that_is_divided_by_the_batch_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant of the one sum that all of these are made of."""

    def by_batch(x: Tensor, dim: int) -> Tensor:
        half = x.shape[dim] // (2 if len(x) > 2 else 3)
        parts = x.narrow(dim, 0, half), x.narrow(dim, half, x.shape[dim] - half)
        return sum(part.sum(dim, keepdim=True) for part in parts)

    monkeypatch.setattr(reductions, "tree_sum", by_batch)
    monkeypatch.setattr(products, "tree_sum", by_batch)
    assert any(rows_differ(ROWWISE[name], torch.randn(100)) for _ in range(8))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 64, 100])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_tree_sum_is_a_sum(size: int, dim: int) -> None:
    shape = [3, 4, 5]
    shape[dim] = size
    x = torch.randn(shape, dtype=torch.float64)
    kept = x.clone()
    assert_close(tree_sum(x, dim), x.sum(dim, keepdim=True))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("fixed", ["left", "right", "none"])
def test_matmul_over_batches(fixed: str) -> None:
    """Rows in a leading dimension, a weight per head, and both with rows."""
    a, b = torch.randn(6, 3, 5, 7), torch.randn(3, 7, 4)
    if fixed == "left":
        a, b = torch.randn(3, 5, 7), torch.randn(6, 3, 7, 4)
    if fixed == "none":
        b = torch.randn(6, 3, 7, 4)
    assert_close(products.matmul(a, b, fixed), a @ b)
