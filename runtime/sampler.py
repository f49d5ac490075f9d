"""Chooses the next token of each request from its row of logits.

Rows are independent: what a request gets depends on its own logits, history, settings and random
numbers only, however the others in the step are chosen. Greedy rows go through one argmax. On a GPU
rows sampled by temperature, top-k, top-p and min-p go through one `draw`, whatever their settings;
elsewhere, and with other warpers, those with equal settings through one call of each warper. A token
is where the sum of probabilities, in the order of ids, passes the request's random number, so that a
seed means the same everywhere, as far as logits are the same.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from regraft.kernels.sampling import draw, greedy

from .errors import described
from .processors import build_processors, build_warpers, divisor_of
from .request import Request, likeliest
from .sampling_params import SamplingParams, WarpParams
from .staging import upload

logger = logging.getLogger(__name__)

_MOST_CANDIDATES = 1024
_FEW_CANDIDATES = 256
_SPARE_CANDIDATES = 16
_BLOCK = 2048


class _Way(Enum):
    """How a token is chosen, if by no warpers: rows of one way are chosen together."""

    BEST = auto()
    BEST_WITH_LOGPROB = auto()
    DRAWN = auto()


def prepare(request: Request, vocab_size: int, device: torch.device, seed: Sequence[int]) -> None:
    """Gives a request its processors and random numbers; a bad setting is a RequestError.

    `seed` is used if the request brings none.
    """
    params, prompt = request.params, request.tokens
    request.processors = build_processors(params, prompt, vocab_size, device)
    if params.do_sample:
        build_warpers(params.warp, device)
        own = params.seed
        if own is None:
            own = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1)
        # On the CPU whatever the device: a seed then means the same everywhere.
        request.generator = torch.Generator().manual_seed(own)


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> tuple[list[int], list[float]]:
    """One token and its log-probability per request, from float logits [len(requests), vocab].

    The log-probability is NaN where the logits are not fit to choose from, and may be 0 where the request
    does not want it.
    """
    tokens, logprobs = choose(logits, requests)
    return tokens.tolist(), logprobs.tolist()


def choose(
    logits: torch.Tensor, requests: Sequence[Request], *, for_training: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `sample`, left on the device: tokens int64 and log-probabilities float32, [len(requests)].

    On a GPU the host reads nothing, and waits for nothing, but where a request has processors, other
    warpers than the common ones, or wants `top_logprobs`. With `for_training` the log-probabilities of
    what no warper cuts have the bits of torch's log_softmax there too.
    """
    is_plain = all(_is_plain(request) for request in requests)
    if is_plain and _has_operators(logits) and not for_training:
        return greedy(logits)
    # In float32 whoever is beside it: an operator may add up rows of another dtype otherwise.
    scores = _process(logits.float(), requests)
    _note_likeliest(scores, requests)
    groups: dict[_Way | WarpParams, list[int]] = {}
    for i, request in enumerate(requests):
        groups.setdefault(_way_of(request.params, scores), []).append(i)
    if len(groups) == 1:
        return _choose(scores, next(iter(groups)), requests, for_training)
    tokens = torch.empty(len(requests), dtype=torch.int64, device=scores.device)
    logprobs = torch.empty(len(requests), dtype=torch.float32, device=scores.device)
    for way, rows in groups.items():
        group, at = [requests[i] for i in rows], _on_device(rows, scores.device)
        tokens[at], logprobs[at] = _choose(scores[at], way, group, for_training)
    return tokens, logprobs


def choose_each(
    logits: torch.Tensor, requests: Sequence[Request]
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `choose`, row by row: torch divides a sum by the number of rows beside it, and by where in memory a row lies.

    On a GPU rows go together that an operator chooses, to which a row is all there is, unless they have processors, or
    want `top_logprobs`, which are torch's. Their log-probabilities are those that training computes, by torch, where it
    was found to sum a row up in one way beside any others.
    """
    together = [i for i, request in enumerate(requests) if _is_steady(request, logits)]
    if len(together) == len(requests):
        return choose(logits, requests, for_training=True)
    tokens = torch.empty(len(requests), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(requests), dtype=torch.float32, device=logits.device)
    if together:
        group, at = [requests[i] for i in together], _on_device(together, logits.device)
        tokens[at], logprobs[at] = choose(logits[at], group, for_training=True)
    for i in sorted(set(range(len(requests))) - set(together)):
        row = logits[i : i + 1].clone()  # at the start of an allocation, wherever it was
        tokens[i : i + 1], logprobs[i : i + 1] = choose(row, [requests[i]], for_training=True)
    return tokens, logprobs


def _has_operators(logits: torch.Tensor) -> bool:
    """Whether the operators that choose tokens are faster there than torch."""
    return logits.is_cuda


def _on_device(rows: Sequence[int], device: torch.device) -> torch.Tensor:
    """Rows to index with; a list would be copied to the device by a host that waits for it."""
    return upload({"rows": np.array(rows)}, device)["rows"]


def _is_plain(request: Request) -> bool:
    params = request.params
    return not (params.do_sample or params.top_logprobs or request.processors)


def _is_steady(request: Request, logits: torch.Tensor) -> bool:
    """Whether it gets the same bits however many rows are chosen with its own."""
    params = request.params
    if request.processors is not None or params.top_logprobs or not _has_operators(logits):
        return False
    if _way_of(params, logits) not in (_Way.BEST_WITH_LOGPROB, _Way.DRAWN):
        return False
    return not params.logprobs or _sums_each_row_alike(logits.shape[-1], logits.device)


@functools.cache
def _sums_each_row_alike(vocab_size: int, device: torch.device) -> bool:
    """Whether a row's log_softmax has the same bits alone and at every place among others. Torch promises nothing: it
    is measured, once for a vocabulary.
    """
    generator = torch.Generator(device).manual_seed(0)
    row = 4 * torch.randn(1, vocab_size, generator=generator, device=device)
    expected = row.log_softmax(dim=-1)
    return all(
        bool((row.repeat(count, 1).log_softmax(dim=-1) == expected).all())
        for count in (2, 3, 7, 33, 130)
    )


def _way_of(params: SamplingParams, scores: torch.Tensor) -> _Way | WarpParams:
    if not params.do_sample:
        wants = params.logprobs or _has_operators(scores)  # which give it anyway
        return _Way.BEST_WITH_LOGPROB if wants else _Way.BEST
    if _has_operators(scores) and params.warp == _common_part(params.warp):
        return _Way.DRAWN
    return params.warp


def _choose(
    scores: torch.Tensor,
    way: _Way | WarpParams,
    requests: Sequence[Request],
    for_training: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probabilities of requests that are chosen alike."""
    if way is _Way.DRAWN:
        return _draw_together(scores, requests, for_training)
    if isinstance(way, WarpParams):
        uniforms = upload({"uniforms": _uniforms(requests)}, scores.device)["uniforms"]
        return _draw(scores, way, uniforms)
    if _has_operators(scores) and not for_training:
        return greedy(scores)
    return _argmax(scores, logprobs=way is _Way.BEST_WITH_LOGPROB)


def _draw_together(
    scores: torch.Tensor, requests: Sequence[Request], for_training: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows shaped by common warpers, each by its own."""
    settings = _settings([r.params.warp for r in requests], scores.shape[-1])
    uncut = [r.params.warp == WarpParams(temperature=r.params.warp.temperature) for r in requests]
    arrays = {**settings, "uniforms": _uniforms(requests), "uncut": np.array(uncut)}
    given = upload(arrays, scores.device)
    is_uncut = given.pop("uncut")
    tokens, logprobs = draw(scores, **given)
    if for_training and any(uncut):
        whole = (scores / given["temperature"][:, None].float()).log_softmax(dim=-1)
        picked = whole.gather(-1, tokens[:, None])[:, 0]
        logprobs = torch.where(is_uncut, picked, logprobs)
    return tokens, logprobs


def _settings(warps: Sequence[WarpParams], vocab_size: int) -> dict[str, npt.NDArray[Any]]:
    """What `draw` takes of them."""
    return {
        "temperature": np.array([divisor_of(warp) for warp in warps]),
        "top_k": np.array([min(warp.top_k, vocab_size) for warp in warps]),
        "top_p": np.array([float(warp.top_p) for warp in warps]),
        "min_p": np.array([float(warp.min_p or 0) for warp in warps]),
    }


def _process(scores: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Scores after what depends on each request's history."""
    if all(request.processors is None for request in requests):
        return scores
    scores = scores.clone()
    for i, request in enumerate(requests):
        if request.processors is not None:
            scores[i] = _process_one(request, scores[i : i + 1])
    return scores


def _process_one(request: Request, scores: torch.Tensor) -> torch.Tensor:
    """One request's scores [1, vocab] after its processors: [vocab], NaN if one of them raises."""
    assert request.processors is not None
    history = torch.tensor([request.tokens], device=scores.device)
    try:
        processed = request.processors(history, scores)
        if processed.shape != scores.shape:
            raise ValueError(f"scores {list(scores.shape)} came back as {list(processed.shape)}")
    except Exception as error:
        # A caller's code may raise anything, and whatever it is ends that caller's request alone.
        logger.exception("a processor of %s raised", request.request_id)
        request.error = f"a logits processor raised {described(error)}"
        return torch.full_like(scores[0], torch.nan)
    return processed[0]


def _note_likeliest(scores: torch.Tensor, requests: Sequence[Request]) -> None:
    """Gives the requests that want them the likeliest tokens, of the distribution drawn from."""
    for i, request in enumerate(requests):
        params = request.params
        if params.top_logprobs:
            row = scores[i : i + 1]
            if params.do_sample:
                row = _shape(row, params.warp)
            request.top_logprobs.append(likeliest(row.log_softmax(dim=-1)[0], params.top_logprobs))


def _no_history(scores: torch.Tensor) -> torch.Tensor:
    return torch.empty(len(scores), 0, dtype=torch.int64, device=scores.device)


def _argmax(scores: torch.Tensor, *, logprobs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The best token of each row and its log-probability, or 0 instead where nobody wants it."""
    # numpy's argmax on the CPU is many times faster than torch's; both take a NaN for the largest.
    on_cpu = scores.device.type == "cpu"
    tokens = torch.from_numpy(scores.numpy().argmax(-1)) if on_cpu else scores.argmax(dim=-1)
    if logprobs:
        return tokens, scores.log_softmax(dim=-1).gather(-1, tokens[:, None])[:, 0]
    best = scores.gather(-1, tokens[:, None])[:, 0]
    return tokens, best * 0  # NaN where the logits are not finite


def _draw(
    scores: torch.Tensor, warp: WarpParams, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws from softmax(warped scores) at `uniforms` [n], as `regraft.kernels.sampling.draw` does."""
    if 0 < warp.top_k <= _MOST_CANDIDATES and warp == _common_part(warp):
        warped, ids, complete = _cut_by_count(scores, warp)
    elif warp.top_p < 1.0 and warp == WarpParams(temperature=warp.temperature, top_p=warp.top_p):
        warped, ids, complete = _cut_by_mass(scores, warp)
    else:
        return _invert(_shape(scores, warp), uniforms)
    picks, logprobs = _invert(warped, uniforms)
    tokens = ids.gather(-1, picks[:, None])[:, 0]
    rest = (~complete).nonzero()[:, 0]
    if rest.numel():
        tokens[rest], logprobs[rest] = _invert(_shape(scores[rest], warp), uniforms[rest])
    return tokens, logprobs


def _common_part(warp: WarpParams) -> WarpParams:
    return WarpParams(
        temperature=warp.temperature, top_k=warp.top_k, top_p=warp.top_p, min_p=warp.min_p
    )


def _shape(scores: torch.Tensor, warp: WarpParams) -> torch.Tensor:
    """Scores [n, k], in the order of ids, after the warpers: -inf for what they drop."""
    if warp.top_p == 1.0 or warp != _common_part(warp):
        return _apply(warp, scores)
    scores = _apply(WarpParams(temperature=warp.temperature, top_k=warp.top_k), scores)
    return _apply(WarpParams(min_p=warp.min_p), _top_p(scores, warp.top_p))


def _apply(warp: WarpParams, scores: torch.Tensor) -> torch.Tensor:
    return build_warpers(warp, scores.device)(_no_history(scores), scores)


def _top_p(scores: torch.Tensor, top_p: float, total: torch.Tensor | None = None) -> torch.Tensor:
    """As transformers' warper, but of equal scores those of the lowest ids are dropped first: there it is up to a sort.

    `total` [n, 1]: the sum of exp(score - the best) of all, if these are not all.
    """
    ranked, places = scores.sort(dim=-1, descending=False, stable=True)
    weights = (ranked - ranked[:, -1:]).exp().double()
    through = weights.flip(-1).cumsum(dim=-1).flip(-1)  # of each and those above it
    dropped = through - weights >= top_p * (through[:, :1] if total is None else total)
    dropped[:, -1] = False
    dropped = torch.zeros_like(dropped).scatter(-1, places, dropped)
    return scores.masked_fill(dropped, -torch.inf)


# The two below find the few tokens that top-k and top-p leave without sorting the vocabulary:
# warped scores and ids, [n, few] each, in the order of ids, and whether a row's tokens are all among
# them, bool [n]. The distribution is that of transformers' warpers. They are for the CPU: what a row
# needs that is not complete, the host decides.


def _cut_by_count(
    scores: torch.Tensor, warp: WarpParams
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By top-k, then the rest. Not complete: more scores than fit equal the k-th, and all stay."""
    vocab_size = scores.shape[-1]
    k = min(warp.top_k, vocab_size)
    values, ids = scores.topk(min(k + _SPARE_CANDIDATES, vocab_size), dim=-1)
    values = values / divisor_of(warp)
    least = values[:, k - 1 : k]
    complete = (values[:, -1] < least[:, 0]) | (values.shape[-1] == vocab_size)
    values, ids = _by_id(values.masked_fill(values < least, -torch.inf), ids)
    return _shape(values, WarpParams(top_p=warp.top_p, min_p=warp.min_p)), ids, complete


def _cut_by_mass(
    scores: torch.Tensor, warp: WarpParams
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By top-p alone. Not complete: it keeps the least of the few, so that others may stay as well."""
    scores = scores / divisor_of(warp)
    values, ids = scores.topk(min(_FEW_CANDIDATES, scores.shape[-1]), dim=-1)
    total = (scores - values[:, :1]).exp_().sum(dim=-1, keepdim=True).double()
    least = values[:, -1:]
    values, ids = _by_id(values, ids)
    warped = _top_p(values, warp.top_p, total)
    complete = ~(warped == least).any(dim=-1) | (values.shape[-1] == scores.shape[-1])
    return warped, ids, complete


def _by_id(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids, order = ids.sort(dim=-1)
    return values.gather(-1, order), ids


def _invert(scores: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws from softmax(scores) by inverting its cumulative sum: index and logprob, [n] each."""
    count, width = scores.shape
    probs = scores.softmax(dim=-1)
    if width <= _BLOCK:
        picks = _search(probs, uniforms)[0]
    else:
        # First a block, then a token in it: one cumulative sum over the vocabulary costs more.
        blocks = torch.nn.functional.pad(probs, (0, -width % _BLOCK)).view(count, -1, _BLOCK)
        block, rest = _search(blocks.sum(dim=-1, dtype=torch.float64), uniforms)
        rows = torch.arange(count, device=scores.device)
        picks = block * _BLOCK + _search(blocks[rows, block], rest)[0]
        picks = picks.clamp(max=width - 1)  # where probabilities are NaN, so is the search
    return picks, scores.log_softmax(dim=-1).gather(-1, picks[:, None])[:, 0]


def _search(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which weight of each row [n, k] the share `uniforms` of their sum falls into, and where in
    it (0 to 1).
    """
    sums = weights.double().cumsum(dim=-1)
    total = sums[:, -1:]
    # Strictly below the total, so that a weight of 0 at the end is never met.
    target = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros_like(total)))
    picks = torch.searchsorted(sums, target, right=True).clamp_(max=weights.shape[-1] - 1)
    weight = weights.gather(-1, picks).double()
    inside = (target - (sums.gather(-1, picks) - weight)) / weight
    return picks[:, 0], inside[:, 0].clamp(0, 1)


def _uniforms(requests: Sequence[Request]) -> npt.NDArray[np.float64]:
    """One number of [0, 1) from each request's own generator, [n]."""
    draws = [torch.rand((), dtype=torch.float64, generator=r.generator) for r in requests]
    return torch.stack(draws).numpy()
