"""The Triton kernels' cases, and a program that runs them without a GPU (see `triton_process`).

With TRITON_INTERPRET=1 it runs `CASES` and `MUTANTS` interpreted, with TRITON_INTERPRET=0 it compiles `COMPILED`.

    TRITON_INTERPRET=1 python -m tests.kernels.paged_triton
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.kernels.paged import Case, check, make
from tests.kernels.triton_process import compiling, is_interpreted, run_cases

CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "decode": (Case((1, 1, 1), (0, 3, 21)), {}),
    "decode, heads one to one": (Case((1, 1), (17, 5), heads=3, kv_heads=3), {}),
    "decode, one key head": (Case((1, 1), (17, 5), heads=5, kv_heads=1), {}),
    "decode, 20 heads a group": (Case((1, 1), (17, 5), heads=20, kv_heads=1), {}),
    "decode, heads shared out": (Case((1, 1, 0), (17, 5, 1), heads=71, kv_heads=1, padding=1), {}),
    "mixed, heads shared out": (
        Case((2, 1), (7, 5), heads=74, kv_heads=2, width=130, padding=1),
        {},
    ),
    "decode, split": (
        Case((1, 0, 1, 1), (0, 6, 9, 150), page_size=16),
        {"splits": 3, "min_split": 4},
    ),
    "decode, more splits than keys": (Case((1, 1), (0, 40)), {"splits": 7, "min_split": 4}),
    "decode, split, sinks": (Case((1, 1), (70, 0), sinks=True), {"splits": 2, "min_split": 4}),
    "decode, split, window": (Case((1, 1), (150, 3), window=70), {"splits": 2, "min_split": 4}),
    "decode, window": (Case((1, 1), (9, 2), window=5), {}),
    "decode, window 1": (Case((1, 1), (9, 0), window=1), {}),
    "decode, chunk": (Case((1, 1, 1), (9, 12, 2), chunk=6), {}),
    "decode, everything": (Case((1, 1), (19, 4), window=9, softcap=1.5, sinks=True, reach=3), {}),
    "decode, alibi": (Case((1, 1), (19, 4), alibi=True), {}),
    "decode, row of several": (Case((0, 3, 0, 0), (4, 9, 0, 1)), {}),
    "decode, split, row of several": (
        Case((0, 3, 0, 0, 1), (4, 70, 0, 1, 0), padding=1),
        {"splits": 2, "min_split": 4},
    ),
    "decode, padding": (Case((1, 0, 0, 1), (9, 0, 0, 2), padding=2, width=24, v_width=20), {}),
    "nothing": (Case((0, 0), (3, 0), padding=1), {}),
    "nobody": (Case((), (), padding=2), {}),
    "prefill": (Case((3, 9), (0, 0)), {}),
    "mixed": (Case((3, 1, 0, 17, 1), (0, 9, 4, 5, 0), padding=2), {}),
    "mixed, split": (Case((1, 3, 1), (80, 2, 9), padding=1), {"splits": 2, "min_split": 4}),
    "mixed, several blocks": (Case((70, 1, 30), (3, 4, 66), page_size=16, heads=4, kv_heads=1), {}),
    "mixed, long": (Case((70, 1, 30), (3, 4, 66), page_size=16, kv_heads=1), {"long": 4}),
    "mixed, window": (Case((9, 1), (11, 30), window=5), {}),
    "mixed, window of blocks": (
        Case((60, 2), (70, 9), window=20, heads=4, kv_heads=1, page_size=16),
        {},
    ),
    "mixed, chunk": (Case((9, 1), (11, 30), chunk=6), {}),
    "mixed, everything": (Case((9, 1), (5, 8), window=7, softcap=1.5, sinks=True, reach=3), {}),
    "mixed, alibi in a chunk": (Case((9, 1), (5, 8), chunk=9, alibi=True), {}),
    "width 96 and 80": (Case((3, 1), (5, 8), width=96, v_width=80), {}),
    "width 192 and 128": (Case((3, 1), (5, 8), width=192, v_width=128), {}),
    "width 576 and 512": (Case((3, 1), (5, 8), width=576, v_width=512, kv_heads=1, scale=0.05), {}),
    "shared, few heads": (
        Case((1, 0, 1, 1), (70, 4, 0, 9), 5, 1, 192, 128, dtype=torch.float16, shared=True),
        {},
    ),
    "shared, many heads, split": (
        Case((1, 1), (150, 3), 70, 1, 192, 128, padding=1, dtype=torch.float16, shared=True),
        {"splits": 2, "min_split": 4},
    ),
    "shared, mixed": (
        Case((3, 1), (5, 70), 18, 1, 192, 128, dtype=torch.float16, shared=True, sinks=True),
        {},
    ),
    "shared, window": (
        Case(
            (1, 1),
            (90, 5),
            3,
            1,
            128,
            128,
            window=70,
            softcap=2.0,
            dtype=torch.float16,
            shared=True,
        ),
        {"splits": 2, "min_split": 4},
    ),
    "half": (Case((3, 1), (5, 28), width=40, v_width=24, dtype=torch.float16), {}),
    "half, split": (Case((1, 1), (5, 90), dtype=torch.float16), {"splits": 2, "min_split": 4}),
}
"""Name -> case, and options of the launcher."""

MUTANTS: dict[str, tuple[Case, dict[str, Any]]] = {
    "scale": (CASES["mixed"][0], {"scale": 0.4004}),
    "window one more": (CASES["mixed, window"][0], {"window": 6}),
    "window one less": (CASES["decode, window"][0], {"window": 4}),
    "chunk off": (CASES["mixed, chunk"][0], {"chunk": 0}),
    "sinks off": (CASES["mixed, everything"][0], {"sinks": None}),
    "rel_bias a step late": (CASES["mixed, everything"][0], {"rel_bias": lambda x: x.roll(1, 2)}),
    "written a row late": (CASES["mixed"][0], {"slot_mapping": lambda x: x.roll(1)}),
    "shared, another's pages": (
        CASES["shared, few heads"][0],
        {"block_table": lambda x: x.roll(1, 0)},
    ),
    "context one less": (CASES["decode"][0], {"context_lens": lambda x: (x - 1).clamp(min=0)}),
}
"""Name -> case, and what the kernel alone is told wrongly."""

COMPILED: dict[str, Case] = {
    "bfloat16, 128": Case((3, 1), (5, 8), 32, 8, 128, 128, 16, dtype=torch.bfloat16),
    "bfloat16, 128, long": Case((1030, 1030), (5, 8), 32, 8, 128, 128, 16, dtype=torch.bfloat16),
    "bfloat16, 576 and 512": Case(
        (3, 1), (5, 8), 16, 1, 576, 512, 16, window=9, dtype=torch.bfloat16
    ),
    "bfloat16, 576 and 512, shared": Case(
        (1, 1), (5, 8), 16, 1, 576, 512, 16, dtype=torch.bfloat16, shared=True
    ),
    "bfloat16, 576 and 512, 128 heads, shared": Case(
        (1, 1), (5, 8), 128, 1, 576, 512, 16, dtype=torch.bfloat16, shared=True
    ),
    "float32, 576 and 512": Case((3, 1), (5, 8), 16, 1, 576, 512, 16),
    "float16, 96 and 80, everything": Case(
        (3, 1), (5, 8), 6, 2, 96, 80, 16, 0, 9, 7, 2.0, sinks=True, reach=3, dtype=torch.float16
    ),
    "float32, 256, alibi": Case((3, 1), (5, 8), 4, 1, 256, 256, 16, alibi=True),
}


def run(name: str, device: str) -> None:
    """Check one of `CASES`."""
    from regraft.kernels.paged_attention.triton import paged_attention_triton

    case, options = CASES[name]
    check(case, partial(paged_attention_triton, **options), device)


def run_mutant(name: str, device: str) -> None:
    """Check that one of `MUTANTS` is noticed."""
    from regraft.kernels.paged_attention.triton import paged_attention_triton

    case, changes = MUTANTS[name]
    try:
        check(case, paged_attention_triton, device, **changes)
    except AssertionError:
        return
    raise AssertionError(f"nothing noticed the mutant {name!r}")


def run_past_2_31_elements(device: str) -> None:
    """A token's rows and a page's that start beyond the reach of 32 bits (of memory that is never touched)."""
    from regraft.kernels.paged_attention.triton import paged_attention_triton

    for case in (Case((1, 1), (9, 5)), Case((1, 2), (9, 5))):
        arguments = make(case, device)
        far = {n: _far_apart(arguments[n]) for n in ("q", "k", "v", "k_cache", "v_cache")}
        out = paged_attention_triton(**arguments | far)
        expected = paged_attention_triton(**arguments)
        assert torch.equal(out, expected)
        assert torch.equal(far["k_cache"][1:].nan_to_num(7), arguments["k_cache"][1:].nan_to_num(7))


def _far_apart(x: Tensor) -> Tensor:
    """The same values, with more than 2^31 elements between the first row and the last."""
    step = 2**31 // (len(x) - 1) + 64
    storage = torch.empty(step * (len(x) - 1) + x[0].numel(), dtype=x.dtype, device=x.device)
    far = storage.as_strided(x.shape, (step, *x[0].contiguous().stride()))
    return far.copy_(x)


def compile_kernels(case: Case) -> None:
    """Compile for Hopper every kernel that the launcher would start."""
    from regraft.kernels.paged_attention import triton as launcher

    with compiling({launcher: ("decode_kernel", "combine_kernel", "prefill_kernel")}):
        launcher.paged_attention_triton(**make(case), splits=4)


def outcomes(interpreted: bool) -> Iterator[tuple[str, Any]]:
    """Everything to run, by name."""
    if not interpreted:
        yield from ((f"compiled: {n}", partial(compile_kernels, c)) for n, c in COMPILED.items())
        return
    yield from ((n, partial(run, n, "cpu")) for n in CASES)
    yield from ((f"mutant: {n}", partial(run_mutant, n, "cpu")) for n in MUTANTS)
    yield "past 2^31 elements", partial(run_past_2_31_elements, "cpu")


if __name__ == "__main__":
    run_cases(outcomes(is_interpreted()))
