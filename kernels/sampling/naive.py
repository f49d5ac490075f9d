"""The oracle: row by row, as the words say it."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def greedy_naive(logits: Tensor) -> tuple[Tensor, Tensor]:
    tokens, logprobs = [], []
    for row in logits.tolist():
        best = max(row)
        is_fit = math.isfinite(best) and all(x == x for x in row)
        tokens.append(row.index(best))
        logprobs.append(-math.log(sum(math.exp(x - best) for x in row)) if is_fit else math.nan)
    device = logits.device
    return (
        torch.tensor(tokens, dtype=torch.int64, device=device),
        torch.tensor(logprobs, dtype=torch.float32, device=device),
    )


def draw_naive(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    tokens, logprobs = [], []
    settings = zip(*(x.tolist() for x in (temperature, top_k, top_p, min_p)))
    for row, setting, uniform in zip(logits, settings, uniforms.tolist()):
        weights = weights_naive(row, *setting)
        token = invert_naive(weights, uniform)
        is_fit = weights[token] > 0  # all are NaN where it is not
        tokens.append(token)
        logprobs.append(math.log(weights[token] / sum(weights)) if is_fit else math.nan)
    device = logits.device
    return (
        torch.tensor(tokens, dtype=torch.int64, device=device),
        torch.tensor(logprobs, dtype=torch.float32, device=device),
    )


def weights_naive(
    row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> list[float]:
    """Of each token of a row [vocab] the probability over that of the best; 0 where it was dropped, NaN in all where
    the row is not fit to choose from.
    """
    scores = (row.float() / temperature).tolist()
    if not math.isfinite(max(scores)) or any(x != x for x in scores):
        return [math.nan] * len(scores)
    best = max(scores)
    weights = [math.exp(x - best) for x in scores]
    # Best first; of equal scores those of the highest indices.
    order = sorted(range(len(scores)), key=lambda i: (scores[i], i), reverse=True)
    order = top_k_naive(order, scores, top_k)
    order = top_p_naive(order, weights, top_p)
    kept = {i for i in order if weights[i] >= min_p * weights[order[0]]}
    return [weight if i in kept else 0.0 for i, weight in enumerate(weights)]


def top_k_naive(order: list[int], scores: list[float], top_k: int) -> list[int]:
    """Those of `order`, best first, that are no less than the k-th."""
    if not 0 < top_k < len(order):
        return order
    return [i for i in order if scores[i] >= scores[order[top_k - 1]]]


def top_p_naive(order: list[int], weights: list[float], top_p: float) -> list[int]:
    """Those of `order`, best first, above which there is less than `top_p` of the sum of all."""
    if top_p >= 1.0:
        return order
    target = top_p * sum(weights[i] for i in order)
    kept, above = order[:1], weights[order[0]]
    for i in order[1:]:
        if above >= target:
            break
        kept.append(i)
        above += weights[i]
    return kept


def invert_naive(weights: list[float], uniform: float) -> int:
    """The token within whose part of the sum, in the order of indices, the share `uniform` of it falls."""
    target, below = uniform * sum(weights), 0.0
    for token, weight in enumerate(weights):
        below += weight
        if below > target:
            return token
    return 0  # not fit to choose from
