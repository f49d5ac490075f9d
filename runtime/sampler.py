"""Chooses the next token of each request from its row of logits.

Rows are independent: what a request gets depends on its own logits, history, settings and random
numbers only, however the others in the step are chosen. Greedy rows go through one argmax, sampled
rows with equal settings through one call of each warper.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .processors import build_processors, build_warpers
from .request import Request
from .sampling_params import WarpParams

_MOST_CANDIDATES = 1024
_SPARE_CANDIDATES = 16


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

    The log-probability is NaN where the logits are not fit to choose from.
    """
    scores = _process(logits.float(), requests)
    greedy = [i for i, request in enumerate(requests) if request.generator is None]
    if len(greedy) == len(requests):
        return _lists(*_argmax(scores))
    tokens = torch.empty(len(requests), dtype=torch.int64, device=scores.device)
    logprobs = torch.empty(len(requests), dtype=torch.float32, device=scores.device)
    groups: dict[WarpParams | None, list[int]] = {None: greedy} if greedy else {}
    for i, request in enumerate(requests):
        if request.generator is not None:
            groups.setdefault(request.params.warp, []).append(i)
    for warp, rows in groups.items():
        if warp is None:
            tokens[rows], logprobs[rows] = _argmax(scores[rows])
        else:
            uniforms = _uniforms([requests[i] for i in rows], scores.device)
            tokens[rows], logprobs[rows] = _draw(scores[rows], warp, uniforms)
    return _lists(tokens, logprobs)


def _process(scores: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Scores after what depends on each request's history."""
    if all(request.processors is None for request in requests):
        return scores
    scores = scores.clone()
    for i, request in enumerate(requests):
        if request.processors is not None:
            history = torch.tensor([request.tokens], device=scores.device)
            scores[i] = request.processors(history, scores[i : i + 1])[0]
    return scores


def _argmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    best, tokens = scores.max(dim=-1)
    return tokens, best - scores.logsumexp(dim=-1)


def _draw(
    scores: torch.Tensor, warp: WarpParams, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws from softmax(warped scores) at `uniforms` [n]."""
    simple = warp == WarpParams(temperature=warp.temperature, top_k=warp.top_k, top_p=warp.top_p)
    if not simple or not 0 < warp.top_k <= _MOST_CANDIDATES:
        return _draw_from_all(scores, warp, uniforms)
    warped, ids, complete = _top_candidates(scores, warp)
    picks, logprobs = _invert(warped, uniforms)
    tokens = ids.gather(-1, picks[:, None])[:, 0]
    rest = (~complete).nonzero()[:, 0]
    if rest.numel():
        tokens[rest], logprobs[rest] = _draw_from_all(scores[rest], warp, uniforms[rest])
    return tokens, logprobs


def _draw_from_all(
    scores: torch.Tensor, warp: WarpParams, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    history = torch.empty(len(scores), 0, dtype=torch.int64, device=scores.device)
    return _invert(build_warpers(warp, scores.device)(history, scores), uniforms)


def _top_candidates(
    scores: torch.Tensor, warp: WarpParams
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Warped scores and ids of the few tokens that top-k leaves, [n, few] each, worst first.

    The same distribution as by the warpers, without sorting the vocabulary. The third result, bool
    [n], is False for a row with so many equal scores that top-k leaves more than these.
    """
    vocab_size = scores.shape[-1]
    k = min(warp.top_k, vocab_size)
    count = min(k + _SPARE_CANDIDATES, vocab_size)
    values, ids = (scores / warp.temperature).topk(count, dim=-1)
    # Top-k keeps every score that equals the k-th.
    dropped = values < values[:, k - 1 : k]
    complete = dropped[:, -1] if count < vocab_size else torch.ones_like(dropped[:, -1])
    values, ids = values.masked_fill(dropped, -torch.inf).flip(-1), ids.flip(-1)
    if warp.top_p < 1.0:
        values = build_warpers(WarpParams(top_p=warp.top_p), scores.device)(ids, values)
    return values, ids, complete


def _invert(scores: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws from softmax(scores), by inversion of its cumulative sum: index and logprob, [n] each."""
    probs = scores.softmax(dim=-1)
    cumulative = probs.double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Strictly below the total, so that a token of probability 0 at the end is never drawn.
    target = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros_like(total)))
    picks = torch.searchsorted(cumulative, target, right=True).clamp_(max=scores.shape[-1] - 1)
    return picks[:, 0], probs.gather(-1, picks).log()[:, 0]


def _uniforms(requests: Sequence[Request], device: torch.device) -> torch.Tensor:
    """One number of [0, 1) from each request's own generator, float64 [n]."""
    draws = [torch.rand((), dtype=torch.float64, generator=r.generator) for r in requests]
    return torch.stack(draws).to(device)


def _lists(tokens: torch.Tensor, logprobs: torch.Tensor) -> tuple[list[int], list[float]]:
    return tokens.tolist(), logprobs.tolist()
