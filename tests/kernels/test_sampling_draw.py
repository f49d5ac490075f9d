"""`draw`: the definition against transformers' warpers, the Triton kernel against the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as lp

from regraft.kernels.sampling import draw, naive
from regraft.kernels.sampling.naive import draw_naive, weights_naive
from tests.kernels import sampling_draw
from tests.kernels.sampling_draw import CASES, CHECKS, SETTINGS, Setting
from tests.kernels.triton_process import outcomes
from tests.tolerance import assert_close


def warped(row: Tensor, setting: Setting) -> Tensor:
    """Scores [vocab] after transformers' warpers, -inf where one was dropped."""
    temperature, top_k, top_p, min_p = setting
    warpers = lp.LogitsProcessorList([lp.TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(lp.TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(lp.TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(lp.MinPLogitsWarper(min_p))
    return warpers(torch.empty(1, 0, dtype=torch.int64), row[None])[0]


ROWS: dict[str, Callable[[], Tensor]] = {
    "five": lambda: 3 * torch.randn(5),
    "normal": lambda: 3 * torch.randn(301),
    "half precision": lambda: (3 * torch.randn(3001)).bfloat16().float(),
    "two levels": lambda: torch.randint(0, 2, (640,)).float(),
    "two levels and none": lambda: (
        torch.randint(0, 2, (640,)).float().masked_fill(torch.rand(640) < 0.5, -torch.inf)
    ),
    "equal": lambda: torch.zeros(64),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(
    "setting",
    [
        *SETTINGS,
        (1.0, 0, 0.5, 0.0),
        (1.0, 0, 0.75, 0.0),
        (1.0, 40, 0.625, 0.0),
        (1.0, 0, 0.984375, 0.0),
        (1.0, 0, 0.99, 0.3),
    ],
    ids=str,
)
def test_the_definition_is_that_of_transformers(name: str, setting: Setting) -> None:
    """Of equal scores as many are kept; which of them transformers keep is up to its sort."""
    torch.manual_seed(0)
    row = ROWS[name]()
    expected, weights = warped(row, setting), weights_naive(row, *setting)
    scores = row / setting[0]
    # Those of no probability may be called kept or not.
    kept = [i for i, weight in enumerate(weights) if weight > 0]
    possible = expected.softmax(-1).double() > 0
    ours, theirs = scores[kept].sort().values, scores[possible].sort().values
    if len(ours) > len(theirs):  # float32 has no place for what float64 has
        assert scores[kept].softmax(-1).sort().values[: len(ours) - len(theirs)].max() < 1e-30
        ours = ours[len(ours) - len(theirs) :]
    assert torch.equal(ours, theirs)
    probs = torch.tensor(weights, dtype=torch.float64).sort().values / sum(weights)
    assert_close(probs, expected.softmax(-1).double().sort().values, dtype=torch.float32)


def test_of_equal_scores_the_first_are_dropped() -> None:
    row = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    assert [i for i, w in enumerate(weights_naive(row, 1.0, 0, 0.5, 0.0)) if w] == [2, 3, 5]
    assert [i for i, w in enumerate(weights_naive(row, 1.0, 2, 0.5, 0.0)) if w] == [3, 5]
    assert [i for i, w in enumerate(weights_naive(row, 1.0, 0, 0.0, 0.0)) if w] == [5]
    assert [i for i, w in enumerate(weights_naive(row, 1.0, 2, 1.0, 0.0)) if w] == [0, 2, 3, 5]


@pytest.mark.parametrize("name", CHECKS)
def test_on_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    CHECKS[name](draw)


@pytest.mark.xdist_group("sampling_draw_interpreted")
@pytest.mark.parametrize("name", CHECKS)
def test_triton_interpreted(name: str) -> None:
    assert outcomes("sampling_draw", True)[name] == ""


@pytest.mark.slow
@pytest.mark.xdist_group("sampling_draw_compiled")
@pytest.mark.parametrize("name", sampling_draw.COMPILED)
def test_compiles_without_a_gpu(name: str) -> None:
    assert outcomes("sampling_draw", False)[name] == ""


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(name: str) -> None:
    torch.manual_seed(0)
    CHECKS[name](draw, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_every_row_alone_on_a_gpu(name: str) -> None:
    """The same bits as among all the others, which themselves are at every place."""
    torch.manual_seed(0)
    given = sampling_draw.make(name, "cuda")
    together = sampling_draw.bits(draw(*given))
    for row in range(len(given[0])):
        alone = sampling_draw.bits(draw(*(x[row : row + 1].clone() for x in given)))
        assert torch.equal(alone[:, 0], together[:, row]), row
    for turn in (1, 2, 11):
        turned = sampling_draw.bits(
            draw(*(x.roll(turn, 0).repeat(5, *[1] * (x.dim() - 1)) for x in given))
        )
        assert torch.equal(turned, together.roll(turn, 1).repeat(1, 5))


@pytest.mark.gpu
def test_the_host_does_not_wait() -> None:
    given = sampling_draw.make("half precision", "cuda")
    draw(*given)
    torch.cuda.synchronize()
    with sampling_draw.waiting_is_an_error():
        draw(*given)


def _all_of_equal(order: list[int], weights: list[float], top_p: float) -> list[int]:
    kept = _top_p(order, weights, top_p)
    return [i for i in order if weights[i] >= weights[kept[-1]]]


def _of_what_top_k_dropped(order: list[int], weights: list[float], top_p: float) -> list[int]:
    kept = set(_top_p(sorted(range(len(weights)), key=lambda i: -weights[i]), weights, top_p))
    return [i for i in order if i in kept] or order[:1]


def _first_of_equal(order: list[int], weights: list[float], top_p: float) -> list[int]:
    kept = len(_top_p(order, weights, top_p))
    return sorted(order, key=lambda i: (-weights[i], i))[:kept]


def _one_more(order: list[int], weights: list[float], top_p: float) -> list[int]:
    return order[: len(_top_p(order, weights, top_p)) + (top_p < 1)]


def _above_the_kth(order: list[int], scores: list[float], top_k: int) -> list[int]:
    if not 0 < top_k < len(order):
        return order
    return [i for i in order if scores[i] > scores[order[top_k - 1]]] or order[:1]


def _exactly_k(order: list[int], scores: list[float], top_k: int) -> list[int]:
    return order[:top_k] if top_k else order


def _dropped_ones_too(weights: list[float], uniform: float) -> int:
    """The sum goes on over tokens of probability 0 as if they had the least of those that are left."""
    least = min((w for w in weights if w > 0), default=0.0)
    return _invert([w or least for w in weights], uniform)


def _from_the_end(weights: list[float], uniform: float) -> int:
    return len(weights) - 1 - _invert(weights[::-1], uniform)


def _no_less(weights: list[float], uniform: float) -> int:
    target, below = uniform * sum(weights), 0.0
    for token, weight in enumerate(weights):
        below += weight
        if below >= target:
            return token
    return 0


_top_p, _invert = naive.top_p_naive, naive.invert_naive


@pytest.mark.parametrize(
    ("function", "mutant", "name"),
    [
        ("top_p_naive", _all_of_equal, "few levels"),
        ("top_p_naive", _of_what_top_k_dropped, "many tokens"),
        ("top_p_naive", _first_of_equal, "exact"),
        ("top_p_naive", _one_more, "exact"),
        ("top_k_naive", _above_the_kth, "many tokens"),
        ("top_k_naive", _exactly_k, "few levels"),
        ("invert_naive", _dropped_ones_too, "many tokens"),
        ("invert_naive", _from_the_end, "a block"),
        ("invert_naive", _no_less, "forbidden tokens"),
    ],
)
def test_a_mutant_is_noticed(function: str, mutant: Any, name: str) -> None:
    def changed(*given: Tensor) -> tuple[Tensor, Tensor]:
        with patch.object(naive, function, mutant):
            return draw_naive(*given)

    torch.manual_seed(0)
    with pytest.raises(AssertionError):
        CHECKS[name](changed)


@pytest.mark.parametrize("setting", ["temperature", "top_k", "top_p", "min_p", "uniforms"])
def test_a_setting_of_another_form_is_refused(setting: str) -> None:
    names = ["logits", "temperature", "top_k", "top_p", "min_p", "uniforms"]
    given = dict(zip(names, sampling_draw.make("vocabulary of five")))
    right = given[setting]
    for wrong in (right[1:], right.int(), right.to("meta")):
        with pytest.raises(ValueError, match=rf"{setting}: {right.dtype} \[{len(right)}\] on cpu"):
            draw(**given | {setting: wrong})


@pytest.mark.parametrize("logits", [torch.zeros(5), torch.zeros(2, 5, dtype=torch.int64)])
def test_logits_of_another_form_are_refused(logits: Tensor) -> None:
    with pytest.raises(ValueError, match=r"logits: floats \[S, vocab\]"):
        draw(logits, *sampling_draw.make("vocabulary of five")[1:])


def test_nothing_is_impossible_at_the_ends() -> None:
    """-inf at both ends of the row, drawn at both ends of [0, 1)."""
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).expand(2, -1)
    given = sampling_draw.arguments([sampling_draw.OFF] * 2, [0.0, 1 - 2**-53])
    tokens, logprobs = draw(logits, *given)
    assert tokens.tolist() == [1, 2]
    best = 1 / (1 + math.exp(-1))
    assert_close(logprobs.exp(), torch.tensor([1 - best, best]))
