"""Chooses the next token of each request from its row of logits.

Rows are independent: what a request gets depends on its own logits, history, settings and random
numbers only, however the others in the step are chosen. Greedy rows go through one argmax, sampled
rows with equal settings through one call of each warper.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import numpy as np
import torch

from regraft.kernels.sampling import greedy

from .errors import described
from .processors import build_processors, build_warpers, divisor_of
from .request import Request, likeliest
from .sampling_params import WarpParams

logger = logging.getLogger(__name__)

_MOST_CANDIDATES = 1024
_FEW_CANDIDATES = 256
_SPARE_CANDIDATES = 16
_MASS_MARGIN = 1e-5
_BLOCK = 2048


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

    The log-probability is NaN where the logits are not fit to choose from, and 0 where the request
    does not want it.
    """
    tokens, logprobs = choose(logits, requests)
    return tokens.tolist(), logprobs.tolist()


def choose(logits: torch.Tensor, requests: Sequence[Request]) -> tuple[torch.Tensor, torch.Tensor]:
    """As `sample`, left on the device: tokens int64 and log-probabilities float32, [len(requests)].

    Of greedy requests that want neither log-probabilities nor processors the host reads nothing.
    """
    if logits.is_cuda and all(_is_plain(request) for request in requests):
        tokens, best = greedy(logits)
        return tokens, best * 0  # NaN where the logits are not finite
    scores = _process(logits.float(), requests)
    _note_likeliest(scores, requests)
    groups: dict[tuple[WarpParams | None, bool], list[int]] = {}
    for i, request in enumerate(requests):
        params = request.params
        key = (params.warp, True) if params.do_sample else (None, params.logprobs)
        groups.setdefault(key, []).append(i)
    if len(groups) == 1:
        return _choose(scores, *next(iter(groups)), requests)
    tokens = torch.empty(len(requests), dtype=torch.int64, device=scores.device)
    logprobs = torch.empty(len(requests), dtype=torch.float32, device=scores.device)
    for (warp, wanted), rows in groups.items():
        group = [requests[i] for i in rows]
        tokens[rows], logprobs[rows] = _choose(scores[rows], warp, wanted, group)
    return tokens, logprobs


def choose_each(
    logits: torch.Tensor, requests: Sequence[Request]
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `choose`, row by row: torch divides a sum by the number of rows beside it, and by where in memory a row lies.

    On a GPU the rows that want the best token are chosen together: nothing is summed but log-probabilities, where that
    was found to be the same for any number of rows.
    """
    together = [i for i, request in enumerate(requests) if _is_steady(request, logits)]
    if len(together) == len(requests):
        return choose(logits, requests)
    tokens = torch.empty(len(requests), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(requests), dtype=torch.float32, device=logits.device)
    if together:
        group = [requests[i] for i in together]
        tokens[together], logprobs[together] = choose(logits[together], group)
    for i in sorted(set(range(len(requests))) - set(together)):
        row = logits[i : i + 1].clone()  # at the start of an allocation, wherever it was
        tokens[i : i + 1], logprobs[i : i + 1] = choose(row, [requests[i]])
    return tokens, logprobs


def _is_plain(request: Request) -> bool:
    return not request.params.logprobs and _is_greedy(request)


def _is_greedy(request: Request) -> bool:
    return not request.params.do_sample and request.processors is None


def _is_steady(request: Request, logits: torch.Tensor) -> bool:
    """Whether it gets the same bits however many rows are chosen with its own."""
    if not logits.is_cuda or not _is_greedy(request):
        return False
    return not request.params.logprobs or _sums_each_row_alike(logits.shape[-1], logits.device)


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


def _choose(
    scores: torch.Tensor, warp: WarpParams | None, logprobs: bool, requests: Sequence[Request]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probabilities of requests that are chosen alike; greedy if `warp` is None."""
    if warp is None:
        return _argmax(scores, logprobs=logprobs)
    return _draw(scores, warp, _uniforms(requests, scores.device))


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
                row = build_warpers(params.warp, row.device)(_no_history(row), row)
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
    """Draws from softmax(warped scores) at `uniforms` [n]."""
    if 0 < warp.top_k <= _MOST_CANDIDATES and warp == _common_part(warp):
        warped, ids, complete = _cut_by_count(scores, warp)
    elif warp.top_p < 1.0 and warp == WarpParams(temperature=warp.temperature, top_p=warp.top_p):
        warped, ids, complete = _cut_by_mass(scores, warp)
    else:
        return _draw_from_all(scores, warp, uniforms)
    picks, logprobs = _invert(warped.flip(-1), uniforms)
    tokens = ids.flip(-1).gather(-1, picks[:, None])[:, 0]
    rest = (~complete).nonzero()[:, 0]
    if rest.numel():
        tokens[rest], logprobs[rest] = _draw_from_all(scores[rest], warp, uniforms[rest])
    return tokens, logprobs


def _draw_from_all(
    scores: torch.Tensor, warp: WarpParams, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _invert(build_warpers(warp, scores.device)(_no_history(scores), scores), uniforms)


def _common_part(warp: WarpParams) -> WarpParams:
    return WarpParams(
        temperature=warp.temperature, top_k=warp.top_k, top_p=warp.top_p, min_p=warp.min_p
    )


# The two below find the few tokens that top-k and top-p leave without sorting the vocabulary:
# warped scores and ids, [n, few] each, best first, and whether a row's tokens are all among them,
# bool [n]. The distribution is that of transformers' warpers.


def _cut_by_count(
    scores: torch.Tensor, warp: WarpParams
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By top-k, then the rest. Not complete: more scores than fit equal the k-th, and all stay."""
    vocab_size = scores.shape[-1]
    k = min(warp.top_k, vocab_size)
    values, ids = scores.topk(min(k + _SPARE_CANDIDATES, vocab_size), dim=-1)
    values = values / divisor_of(warp)
    dropped = values < values[:, k - 1 : k]
    complete = dropped[:, -1] | (values.shape[-1] == vocab_size)
    values = values.masked_fill(dropped, -torch.inf)
    rest = WarpParams(top_p=warp.top_p, min_p=warp.min_p)
    return build_warpers(rest, scores.device)(ids, values), ids, complete


def _cut_by_mass(
    scores: torch.Tensor, warp: WarpParams
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By top-p alone. Not complete: tokens outside have probability that top-p does not cut."""
    scores = scores / divisor_of(warp)
    values, ids = scores.topk(min(_FEW_CANDIDATES, scores.shape[-1]), dim=-1)
    probs = (values - scores.logsumexp(dim=-1, keepdim=True)).exp().double()
    above = probs.cumsum(dim=-1)
    # Top-p drops a token if it and all below it come to no more than 1 - top_p; never the best.
    dropped = 1 - (above - probs) <= 1 - warp.top_p
    dropped[:, 0] = False
    complete = (1 - above[:, -1] < 1 - warp.top_p - _MASS_MARGIN) | (
        values.shape[-1] == scores.shape[-1]
    )
    return values.masked_fill(dropped, -torch.inf), ids, complete


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
    return picks, probs.gather(-1, picks[:, None]).log()[:, 0]


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


def _uniforms(requests: Sequence[Request], device: torch.device) -> torch.Tensor:
    """One number of [0, 1) from each request's own generator, float64 [n]."""
    draws = [torch.rand((), dtype=torch.float64, generator=r.generator) for r in requests]
    return torch.stack(draws).to(device)
