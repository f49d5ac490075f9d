"""Rows and settings to draw with, what is right of a draw, and a program that runs the Triton kernel without a GPU."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from unittest.mock import patch

import torch
from torch import Tensor

from regraft.kernels.sampling.naive import weights_naive
from tests.kernels.triton_process import TYPES, compiling, is_interpreted, run_cases
from tests.tolerance import TOLERANCE, assert_close

Draw = Callable[..., tuple[Tensor, Tensor]]
Setting = tuple[float, int, float, float]
"""Temperature, top-k, top-p, min-p."""

OFF: Setting = (1.0, 0, 1.0, 0.0)
UNIFORMS = (0.37, 0.0, 1 - 2**-53, 0.93, 0.06, 0.71)

SETTINGS: list[Setting] = [
    OFF,
    *((temperature, 0, 1.0, 0.0) for temperature in (1e-4, 0.6, 100.0)),
    *((1.0, k, 1.0, 0.0) for k in (1, 2, 4, 50, 4999, 20000, 20001, 10**9)),
    *((1.0, 0, p, 0.0) for p in (0.0, 1e-9, 0.3, 0.9, 0.999, 1 - 1e-12)),
    *((1.0, 0, 1.0, p) for p in (1e-3, 0.2, 1.0)),
    (0.7, 20, 0.8, 0.0),
    (1.5, 300, 0.95, 0.05),
    (100.0, 6000, 0.5, 0.0),
    (100.0, 0, 0.7, 0.9),
    (1e-4, 0, 0.9, 0.1),
    (1e-4, 3, 0.5, 0.0),
    (2.0, 4, 1.0, 1.0),
]


def normal(rows: int, vocab: int) -> Tensor:
    return 3 * torch.randn(rows, vocab)


def levels(rows: int, vocab: int) -> Tensor:
    """Whole numbers, of which few differ, and both zeros."""
    logits = torch.randint(-2, 3, (rows, vocab)).float()
    return torch.where(torch.rand(rows, vocab) < 0.5, logits, -logits)


def forbidden(rows: int, vocab: int) -> Tensor:
    """Some -inf in each row; of every third nothing else but two tokens."""
    logits = normal(rows, vocab).masked_fill(torch.rand(rows, vocab) < 0.4, -torch.inf)
    logits[:, 1] = 0.5
    logits[::3, 2:] = -torch.inf
    logits[::3, 0] = 0.25
    return logits


def not_fit(rows: int, vocab: int) -> Tensor:
    """NaN, +inf, both, nothing but -inf, finite until it is divided by a low temperature; every sixth row is fit."""
    logits = normal(rows, vocab)
    logits[1::6, vocab // 2] = torch.nan
    logits[2::6, vocab - 1] = torch.inf
    logits[3::6, 0] = torch.nan
    logits[3::6, 1] = torch.inf
    logits[4::6] = -torch.inf
    logits[5::6, 3] = 3e38
    return logits


CASES: dict[str, tuple[Callable[[int, int], Tensor], int, torch.dtype]] = {
    "vocabulary of five": (normal, 5, torch.float32),
    "a block": (normal, 4096, torch.float32),
    "a block and one": (normal, 4097, torch.float32),
    "many tokens": (normal, 20001, torch.float32),
    "half precision": (normal, 20001, torch.bfloat16),
    "float16": (normal, 7001, torch.float16),
    "few levels": (levels, 20001, torch.float32),
    "few levels of few tokens": (levels, 300, torch.bfloat16),
    "all equal": (torch.zeros, 20001, torch.float32),
    "forbidden tokens": (forbidden, 9000, torch.float32),
    "forbidden tokens of few": (forbidden, 6, torch.float32),
    "not fit": (not_fit, 5000, torch.float32),
}


def make(name: str, device: str = "cpu") -> tuple[Tensor, ...]:
    """The arguments of `draw`: every setting a row, in rows that are apart in memory, with NaN in between."""
    build, vocab, dtype = CASES[name]
    rows = len(SETTINGS)
    apart = torch.full((rows, vocab + 3), torch.nan, dtype=dtype, device=device)
    apart[:, :vocab] = build(rows, vocab)
    uniforms = [UNIFORMS[row % len(UNIFORMS)] for row in range(rows)]
    return apart[:, :vocab], *arguments(SETTINGS, uniforms, device)


def arguments(
    settings: Sequence[Setting], uniforms: Sequence[float], device: str = "cpu"
) -> tuple[Tensor, ...]:
    """Settings and uniforms as `draw` takes them."""
    dtypes = (torch.float64, torch.int64, torch.float64, torch.float64)
    columns = list(zip(*settings)) or [()] * len(dtypes)
    tensors = [torch.tensor(x, dtype=dtype, device=device) for x, dtype in zip(columns, dtypes)]
    return *tensors, torch.tensor(uniforms, dtype=torch.float64, device=device)


def check(draw: Draw, logits: Tensor, *given: Tensor) -> None:
    """Each token has the log-probability that the definition gives it, and its share of the sum is at the uniform.

    Sums are of float32, so that within their tolerance of an end of its share either token is right.
    """
    tokens, logprobs = draw(logits, *given)
    assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32
    assert tokens.shape == logprobs.shape == logits.shape[:1]
    slack = TOLERANCE[torch.float32][0]
    results = zip(logits.cpu(), zip(*(x.tolist() for x in given)), tokens.tolist(), logprobs.cpu())
    for row, (*setting, uniform), token, logprob in results:
        weights = weights_naive(row, *setting)
        total = sum(weights)
        assert 0 <= token < len(row)
        assert bool(logprob.isnan()) == (total != total), setting
        if total != total:
            continue
        assert weights[token] > 0, f"{setting} drops token {token}"
        expected = torch.tensor(math.log(weights[token] / total), dtype=torch.float64)
        assert_close(logprob, expected, name=str(setting))
        below = sum(weights[:token]) / total
        assert below - slack <= uniform <= below + weights[token] / total + slack, setting


def check_case(name: str, draw: Draw, device: str = "cpu") -> None:
    """`draw` is right on a case's rows."""
    check(draw, *make(name, device))


def check_exact(draw: Draw, device: str = "cpu") -> None:
    """Of equal scores as many are kept as the words say, the last ones, and every one of them is drawn."""
    for vocab, p in product((8, 8192), (1.0, 0.5, 0.375, 0.3)):
        kept = math.ceil(p * vocab)
        # Where a share ends exactly, the next one begins.
        inside = 0.0 if p in (1.0, 0.5) else 0.5
        uniforms = [(i + inside) / kept for i in range(kept)][:: max(1, kept // 8)]
        logits = torch.full((1, vocab), 1.5, device=device).expand(len(uniforms), -1)
        given = arguments([(0.5, 0, p, 0.0)] * len(uniforms), uniforms, device)
        tokens, logprobs = draw(logits, *given)
        assert tokens.tolist() == [vocab - kept + int(u * kept) for u in uniforms], (vocab, p)
        assert_close(logprobs, torch.full((len(uniforms),), -math.log(kept)))


def check_places(draw: Draw, device: str = "cpu", every: int = 14) -> None:
    """A row has the same bits alone and at every place among others, wherever in memory it is."""
    for name in ("many tokens", "few levels of few tokens"):
        given = make(name, device)
        rows = len(given[0])
        for row in range(0, rows, every):
            alone = draw(*(x[row : row + 1].clone() for x in given))
            for count, place in ((2, 1), (3, 0), (6, 4)):
                order = [(row + i - place) % rows for i in range(count)]
                among = draw(*(x[order] for x in given))
                assert bits(among)[:, place].tolist() == bits(alone)[:, 0].tolist(), (name, row)
        inside = draw(*given)
        around = draw(*(x.flip(0) for x in given))
        assert torch.equal(bits(around).flip(1), bits(inside)), name


def bits(result: tuple[Tensor, Tensor]) -> Tensor:
    """[2, S] int64 of tokens and log-probabilities: NaN is equal to itself."""
    tokens, logprobs = result
    return torch.stack([tokens, logprobs.view(torch.int32).long()])


def check_forms(draw: Draw, device: str = "cpu") -> None:
    """No rows, columns that are apart, one row for all."""
    tokens, logprobs = draw(torch.zeros(0, 7, device=device), *arguments([], [], device))
    assert tokens.tolist() == logprobs.tolist() == []
    settings = [OFF, (0.8, 5, 0.9, 0.0), (1.0, 0, 0.6, 0.0)]
    given = arguments(settings, [0.2, 0.5, 0.8], device)
    logits = normal(3, 2 * 5001).to(device)
    check(draw, logits[:, ::2], *given)
    check(draw, logits[:1].expand(3, -1), *given)


CHECKS: dict[str, Callable[..., None]] = {
    **{name: partial(check_case, name) for name in CASES},
    "exact": check_exact,
    "places": check_places,
    "forms": check_forms,
}


def check_compiles(dtype: torch.dtype) -> None:
    """The kernel is one that Hopper has room for."""
    from regraft.kernels.sampling import triton_draw

    given = arguments([OFF], [0.5])
    with (
        patch.dict(TYPES, {torch.float64: "*fp64"}),
        compiling({triton_draw: ("draw_kernel",)}),
    ):
        triton_draw.draw_triton(torch.zeros(1, 9).to(dtype), *given)


COMPILED = {f"compiled: {dtype}": dtype for dtype in (torch.float32, torch.bfloat16)}


def outcomes(interpreted: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Everything to run, by name."""
    if not interpreted:
        yield from ((name, partial(check_compiles, dtype)) for name, dtype in COMPILED.items())
        return
    from regraft.kernels.sampling.triton_draw import draw_triton

    yield from ((name, partial(one, draw_triton)) for name, one in CHECKS.items())


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Whoever makes the host wait for the GPU raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode does not see everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    run_cases(outcomes(is_interpreted()))
