"""How far two sets of logits are apart, in terms that tell noise from harm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

MAX_MEAN_KL, MIN_TOP5_OVERLAP, MAX_DNLL = 0.02, 0.97, 0.05


@dataclass(frozen=True)
class Comparison:
    """Teacher-forced differences of logits b against logits a.

    mean_kl       mean over tokens of KL(a || b), in nats, the larger of the two directions
    top5_overlap  mean share of a's five likeliest tokens that are among b's
    dnll          |mean negative log-likelihood of the text under a - under b|, in nats
    max_abs       largest absolute difference of two logits

    Equal infinities are no difference.
    """

    mean_kl: float
    top5_overlap: float
    dnll: float
    max_abs: float

    @property
    def acceptable(self) -> bool:
        """Noise, not harm: mean_kl <= 0.02, top5_overlap >= 0.97, dnll <= 0.05 (NaN is never acceptable)."""
        return (
            self.mean_kl <= MAX_MEAN_KL
            and self.top5_overlap >= MIN_TOP5_OVERLAP
            and self.dnll <= MAX_DNLL
        )


def compare(
    logits_a: Sequence[torch.Tensor] | torch.Tensor,
    logits_b: Sequence[torch.Tensor] | torch.Tensor,
    token_ids: Sequence[Sequence[int]] | Sequence[int] | torch.Tensor,
) -> Comparison:
    """Compare two teacher-forced scorings of the same texts.

    logits_a, logits_b  a tensor [len, vocab] per sequence, or one tensor for one sequence
    token_ids           the tokens of each sequence; logits[i] predicts token_ids[i + 1]

    Raises ValueError if numbers of sequences or shapes differ, or for anything but tensors.
    """
    if isinstance(token_ids, torch.Tensor):
        token_ids = token_ids.tolist()
    firsts, seconds = _per_text(logits_a), _per_text(logits_b)
    texts = [token_ids] if token_ids and isinstance(token_ids[0], int) else list(token_ids)
    if not len(firsts) == len(seconds) == len(texts):
        raise ValueError(
            f"{len(firsts)} and {len(seconds)} sets of logits for {len(texts)} sequences"
        )
    if not firsts:
        raise ValueError("nothing to compare")
    kl, overlap, worst, count = torch.zeros(2).double(), 0.0, 0.0, 0
    dnll, predicted = 0.0, 0
    for a, b, text in zip(firsts, seconds, texts, strict=True):
        if a.dim() != 2 or a.shape != b.shape or a.shape[0] != len(text):
            raise ValueError(f"logits {tuple(a.shape)} and {tuple(b.shape)} for {len(text)} tokens")
        tokens: list[int] = [*text]
        if not all(0 <= token < a.shape[1] for token in tokens):
            raise ValueError(
                f"a token of {tokens[:8]}... is outside the vocabulary of {a.shape[1]}"
            )
        p, q = (x.double().log_softmax(-1) for x in (a, b.to(a.device)))
        kl += torch.stack([_kl(p, q), _kl(q, p)]).cpu()
        overlap += _top5(p, q)
        dnll += float(_apart(_of_text(p, text), _of_text(q, text)).sum())
        difference = _apart(a, b.to(a.device)).abs()
        worst = (
            max(worst, float(difference.max())) if not difference.isnan().any() else float("nan")
        )
        count, predicted = count + a.shape[0], predicted + a.shape[0] - 1
    return Comparison(
        float(kl.max()) / count, overlap / count, abs(dnll) / max(predicted, 1), worst
    )


def _per_text(logits: Any) -> list[torch.Tensor]:
    if isinstance(logits, torch.Tensor):
        return [logits]
    for each in logits:
        if not isinstance(each, torch.Tensor):
            raise ValueError(f"logits are torch tensors [len, vocab], not {type(each).__name__}")
    return [*logits]


def _apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a - b; 0 where they are equal, infinite or not."""
    return torch.where(a == b, 0.0, a - b)


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Sum over rows of KL(p || q) from log-probabilities; a token that p rules out adds nothing."""
    terms = p.exp() * (p - q)
    return torch.where(p == -torch.inf, torch.zeros_like(terms), terms).sum().clamp_min(0)


def _top5(p: torch.Tensor, q: torch.Tensor) -> float:
    k = min(5, p.shape[-1])
    first, second = p.topk(k).indices, q.topk(k).indices
    return float((first[..., :, None] == second[..., None, :]).any(-1).double().mean(-1).sum())


def _of_text(p: torch.Tensor, text: object) -> torch.Tensor:
    """The log-probabilities of the text's tokens but the first."""
    targets = torch.tensor(list(text)[1:], device=p.device, dtype=torch.long)  # type: ignore[call-overload]
    return p[:-1].gather(1, targets[:, None])
