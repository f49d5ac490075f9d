"""The invariant operators' Triton kernels: their cases, and a program that runs them as `paged_triton` does its own.

The interpreter's product is numpy's, whose sums in float32 go in an order that depends on the shape. Here it is taken
in float64, and has one result: what is left to differ is what the kernels order themselves.

TRITON_INTERPRET=1 python -m tests.kernels.invariant_triton [how a name begins]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.kernels import invariant_cases, paged_triton, recurrent_triton
from tests.kernels.paged import Case, check, make
from tests.kernels.triton_process import compiling, is_interpreted, run_cases
from tests.tolerance import assert_close

PRODUCTS = {
    "few rows": (3, 70, 40),
    "odd sizes": (33, 67, 9),
    "several tiles": (131, 130, 65),
    "parts of K": (5, 70, 1100),
    "parts of K, many rows": (70, 64, 1504),
    "two tiles of 256 rows": (300, 64, 1120),
    "one": (1, 1, 1),
}
"""Name -> rows, columns and width."""

DTYPES = {"float32": torch.float32, "float16": torch.float16}

ROWWISE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sum": lambda on, x: on.sum_over(x, [-1], keepdim=False, mean=False),
    "mean over two": lambda on, x: on.sum_over(x, [0, 2], keepdim=True, mean=True),
    "softmax": lambda on, x: on.softmax(x, -1, x.dtype, log=False),
    "log_softmax, not the last": lambda on, x: on.softmax(x, 1, torch.float32, log=True),
    "layer_norm": lambda on, x: on.norm(x, 1, x[0, 0] + 1, x[0, 0] * 0.2, 1e-5, centered=True),
    "rms_norm over two": lambda on, x: on.norm(x, 2, x[0] + 1, None, 1e-6, centered=False),
}
"""Functions of the module `on`, `reductions` or its twin."""

ATTENTION = {name: case for name, (case, options) in paged_triton.CASES.items() if not options}
SEGMENT = 64
"""Keys of a segment in these tests: two tiles of float32."""

RECURRENT = ("gated_delta_rule", "kda", "decayed_linear", "ssd", "selective_scan", "causal_conv")
LENGTH, CUTS, CROWDS = 45, ([20], [1, 2, 3, 44]), ([], [5, 1])


def product_case(name: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Every form against float64, with a bias and with a weight that lies the other way."""
    from regraft.kernels.invariant import triton_products

    rows, columns, width = PRODUCTS[name]
    x, weight = torch.randn(2, rows, width).to(dtype), torch.randn(2, columns, width).to(dtype)
    bias = torch.randn(columns).to(dtype)
    expected = x.double() @ weight.double().mT + bias.double()
    lying = weight, weight.mT.contiguous().mT
    loaded, fetched = (product_forms(columns, width, dtype, kind) for kind in (False, True))
    cases = [(form, x, w, expected) for form in loaded for w in lying]
    cases += [(form, x[:1], weight[:1], expected[:1]) for form in fetched]
    for form, x, weight, expected in cases:
        operands = [t.to(device) for t in (x, weight, bias)]
        for parts in (1, 2):
            out = triton_products.product(*operands, form=form, parts=parts)
            assert_close(out, expected, dtype=dtype, scale=4 + width / 32, name=str(form))


def product_forms(columns: int, width: int, dtype: torch.dtype, is_fetched: bool) -> list[Any]:
    """Of one part or of two, on a card with few processors and on one with many; none where tiles cannot be fetched."""
    from regraft.kernels.invariant.product_forms import forms

    if is_fetched and (dtype.itemsize > 2 or width % 8):
        return []
    found = [forms(columns, dtype, n, on, is_fetched) for n in (1, 2) for on in (1, 132)]
    return list(dict.fromkeys(form for some in found for form in some))


def chosen_by_fetching() -> None:
    """A weight that lies evenly takes the fetched tiles, any other one those that are loaded; and all are met."""
    from regraft.kernels.invariant import triton_products

    even = torch.randn(24, 40).half()
    assert all(form.is_fetched for form in triton_products.forms_of(even))
    for weight in (even[:, 1:], even.t().contiguous().t(), even.float(), even[:, :36].contiguous()):
        assert not any(form.is_fetched for form in triton_products.forms_of(weight))
        (out,) = triton_products.product(weight[None], weight[None])
        assert_close(out, weight @ weight.t(), dtype=even.dtype, scale=4)
    tiles = {form.M for form in product_forms(4096, 4096, torch.bfloat16, True)}
    assert tiles == {16, 64, 128, 256}


def rows_differ(product: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether a row's bits depend on how many rows there are, or on where it is."""
    weight, row = torch.randn(70, 1500), torch.randn(1, 1500)
    (expected,) = product(row, weight)
    for count in (2, 31, 33, 65, 130):
        rows = torch.randn(count, 1500)
        at = [0, count // 2, count - 1]
        rows[at] = row
        if not torch.equal(product(rows, weight)[at], expected.expand(3, -1)):
            return True
    return False


def product_bits(is_mutant: bool) -> None:
    """A mutant: parts of K by the number of rows."""
    from regraft.kernels.invariant import triton_products

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        parts = 1 if is_mutant and len(rows) > 32 else 2
        return triton_products.product(rows[None], weight[None], parts=parts)[0]

    assert rows_differ(product) == is_mutant


def form_bits() -> None:
    """Side by side or one after the other, fetched or loaded, turned or not, parts come to the same."""
    from regraft.kernels.invariant import triton_products

    for dtype, width in ((torch.float32, 1500), (torch.float16, 1504)):
        x, weight = torch.randn(1, 5, width).to(dtype), torch.randn(1, 70, width).to(dtype)
        found = [product_forms(70, width, dtype, is_fetched) for is_fetched in (False, True)]
        for parts in (2, 3):
            results = [
                triton_products.product(x, weight, form=form, parts=parts)
                for form in (*found[0], *found[1])
            ]
            assert len(results) >= 2
            assert all(torch.equal(result, results[0]) for result in results)


def matmul_case(fixed: str) -> None:
    from regraft.kernels.invariant import cuda

    a, b = torch.randn(6, 3, 5, 7), torch.randn(3, 7, 4)
    if fixed == "left":
        a, b = torch.randn(3, 5, 7), torch.randn(6, 3, 7, 4)
    if fixed == "none":
        b = torch.randn(6, 3, 7, 4)
    assert_close(cuda.matmul(a, b, fixed), a @ b, scale=4)


def expert_case(transposed: bool) -> None:
    """Both tiles against the definition."""
    from regraft.kernels.experts.naive import expert_linear_naive
    from regraft.kernels.experts.triton import expert_linear_triton
    from regraft.kernels.invariant import cuda

    weight = torch.randn(5, 24, 16) if transposed else torch.randn(5, 16, 24)
    x, ids = torch.randn(40, 24), torch.randint(0, 5, (40,))
    expected = expert_linear_naive(x, weight, ids, transposed)
    assert_close(cuda.expert_linear(x, weight, ids, transposed), expected, scale=4)
    half = [t.half() for t in (x, weight)]
    for mean in (1, 32):
        tiles = cuda.expert_tiles(mean, torch.float16)
        out = expert_linear_triton(*half, ids, transposed, tiles)
        assert_close(out, expected, dtype=torch.float16, scale=8)


def rowwise_case(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Against the CPU's, and a row alone against the row among others: bit by bit."""
    from regraft.kernels.invariant import reductions, triton_rows

    x = torch.randn(shape).to(dtype)
    x[1] = x[0]
    mine, theirs = ROWWISE[name](triton_rows, x), ROWWISE[name](reductions, x)
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape and mine.is_contiguous()
    assert_close(mine, theirs, dtype=dtype, scale=4)
    if "two" not in name:
        assert torch.equal(mine[0], mine[1])
        assert torch.equal(mine[0], ROWWISE[name](triton_rows, x[:1])[0])


def rowwise_mutant() -> None:
    """Blocks by the number of rows."""
    from regraft.kernels.invariant import triton_rows

    plain = triton_rows._tiles
    x = torch.randn(1, 3000)

    def by_rows(rows: int, width: int) -> Any:
        grid, tiles = plain(rows, width)
        return grid, tiles | {"BLOCK": 1024 if rows > 1 else tiles["BLOCK"]}

    def alone_and_beside() -> list[Tensor]:
        both = torch.cat([x, torch.randn(4, 3000)])
        return [triton_rows.sum_over(rows, [1], False, False)[0] for rows in (x, both)]

    assert torch.equal(*alone_and_beside())
    triton_rows._tiles = by_rows
    try:
        assert not torch.equal(*alone_and_beside())
    finally:
        triton_rows._tiles = plain


def attention_case(name: str) -> None:
    """Every form against the definition, in short segments."""
    from regraft.kernels.invariant import triton_attention

    triton_attention.SEGMENT = SEGMENT
    case = ATTENTION[name]
    for form in triton_attention.forms(max(case.width, case.v_width), case.dtype.itemsize):
        torch.manual_seed(0)
        check(case, partial(triton_attention.paged_attention, form=form))


def recurrent_case(name: str) -> None:
    """A case of the plain operator's, through the invariant one."""
    from regraft.kernels.invariant import cuda

    case = recurrent_triton.CASES[name]
    names = [a.name for a in recurrent_triton.operator(case.operator).default._schema.arguments]
    run = getattr(cuda, case.operator)
    recurrent_triton.check(case, lambda **given: run(*(given[name] for name in names)))


def sequence_bits(name: str, is_mutant: bool) -> None:
    """A sequence in pieces, alone and beside others. The mutant is the plain operator, which may take chunks."""
    from regraft.kernels.invariant import cuda, triton_attention

    triton_attention.SEGMENT = SEGMENT
    case = invariant_cases.cases()[name]
    op = getattr(cuda, case.name)
    if is_mutant:
        module = recurrent_triton.form(case.name, "triton")

        def op(*args: Any) -> Tensor:
            return module(*args, by_chunks=len(args[0]) > 8)

    count = invariant_cases.differing(case, op, "cpu", LENGTH, CUTS, CROWDS)
    assert (count > 0) == is_mutant, f"{count} outputs differ"


WIDE: dict[str, Case] = {
    "128": Case((3, 1), (5, 800), 32, 8, 128, 128, 16, dtype=torch.bfloat16),
    "256": Case((3, 1), (5, 800), 8, 2, 256, 256, 16, dtype=torch.bfloat16),
    "576 and 512": Case((3, 1), (5, 800), 16, 1, 576, 512, 16, dtype=torch.bfloat16, shared=True),
    "float32, 128, everything": Case((3, 1), (5, 800), 32, 8, 128, 128, 16, 0, 9, 7, 2.0, sinks=True, reach=3),
}  # fmt: skip


def compile_attention(case: Case) -> None:
    """Compile for Hopper every form."""
    from regraft.kernels.invariant import triton_attention

    kernels = {triton_attention: ("write_kernel", "segment_kernel", "combine_kernel")}
    for form in triton_attention.forms(max(case.width, case.v_width), case.dtype.itemsize):
        with compiling(kernels):
            triton_attention.paged_attention(**make(case), form=form)


def compile_products(dtype: torch.dtype) -> None:
    """Compile for Hopper every form, for even and for odd sizes."""
    from regraft.kernels.invariant import triton_products

    for columns, width in ((512, 4096), (70, 1100)):
        x, weight = torch.empty(1, 200, width, dtype=dtype), torch.empty(1, columns, width, dtype=dtype)  # fmt: skip
        for is_fetched in (False, True):
            for form in product_forms(columns, width, dtype, is_fetched):
                with compiling({triton_products: ("product_kernel", "add_parts_kernel")}):
                    triton_products.product(x, weight, x[0, 0, :columns], form=form, parts=2)


def compile_rows() -> None:
    from regraft.kernels.invariant import triton_rows

    x = torch.empty(5, 3, 5000, dtype=torch.bfloat16)
    with compiling({triton_rows: ("sum_kernel", "softmax_kernel", "norm_kernel")}):
        for function in ROWWISE.values():
            function(triton_rows, x)


def compile_experts() -> None:
    from regraft.kernels.experts import triton as experts
    from regraft.kernels.invariant import cuda

    x, weight = torch.empty(40, 512, dtype=torch.bfloat16), torch.empty(8, 256, 512, dtype=torch.bfloat16)  # fmt: skip
    for mean in (1, 32):
        with compiling({experts: ("expert_kernel",)}):
            tiles = cuda.expert_tiles(mean, x.dtype)
            experts.expert_linear_triton(x, weight, torch.arange(40) % 8, False, tiles)


def exact_products() -> None:
    """The interpreter's products in float64."""
    from triton.runtime import interpreter

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = a.data.astype("float64") @ b.data.astype("float64") + d.data
        return interpreter.TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def outcomes(interpreted: bool) -> Iterator[tuple[str, Any]]:
    """Everything to run, by name."""
    if not interpreted:
        yield from ((f"compiled: attention, {n}", partial(compile_attention, c)) for n, c in WIDE.items())  # fmt: skip
        for dtype in (torch.float32, torch.bfloat16):
            yield f"compiled: products, {dtype}", partial(compile_products, dtype)
        yield "compiled: rows", compile_rows
        yield "compiled: experts", compile_experts
        return
    for name in PRODUCTS:
        for label, dtype in DTYPES.items():
            yield f"product, {name}, {label}", partial(product_case, name, dtype)
    for mutant in (False, True):
        yield f"product, bits{', mutant' * mutant}", partial(product_bits, mutant)
    yield "product, forms", form_bits
    yield "product, fetched or loaded", chosen_by_fetching
    for fixed in ("left", "right", "none"):
        yield f"product, {fixed} fixed", partial(matmul_case, fixed)
    yield from ((f"product, experts, {t}", partial(expert_case, t)) for t in (False, True))
    for name in ROWWISE:
        for shape in ((3, 2, 5), (2, 3, 100), (2, 2, 4500)):
            yield f"rows, {name}, {shape}", partial(rowwise_case, name, shape, torch.float32)
        yield f"rows, {name}, half", partial(rowwise_case, name, (3, 4, 33), torch.float16)
    yield "rows, mutant", rowwise_mutant
    yield from ((f"attention, {name}", partial(attention_case, name)) for name in ATTENTION)
    for name, case in recurrent_triton.CASES.items():
        if case.operator in RECURRENT and "several tiles" not in name:
            yield f"recurrent, {name}", partial(recurrent_case, name)
    for name in invariant_cases.cases():
        if "bfloat16" not in name:
            yield f"bits, {name}", partial(sequence_bits, name, False)
    for name in ("gated delta", "kda", "ssd", "lightning"):
        yield f"bits, mutant, {name}", partial(sequence_bits, name, True)


if __name__ == "__main__":
    if is_interpreted():
        exact_products()
    run_cases(outcomes(is_interpreted()))
