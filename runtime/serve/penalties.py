"""OpenAI's presence and frequency penalties, which transformers has no processor for."""

from __future__ import annotations

import torch
from transformers.generation.logits_process import LogitsProcessor


class CountPenalty(LogitsProcessor):
    """Lowers the scores of tokens made already: by `presence`, and by `frequency` for each time.

    The prompt, the first `num_prompt` tokens of the history, does not count.
    """

    def __init__(self, num_prompt: int, presence: float, frequency: float) -> None:
        self._num_prompt = num_prompt
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores [1, vocab] less the penalties."""
        tokens, counts = input_ids[0, self._num_prompt :].unique(return_counts=True)
        scores = scores.clone()  # type: ignore[assignment]
        scores[0, tokens] -= self._presence + self._frequency * counts
        return scores
