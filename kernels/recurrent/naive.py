"""The loop of every oracle: one sequence after the other, one token after the other."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

Step = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def scan_tokens(
    step: Step,
    out: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    state_slots: torch.Tensor,
) -> torch.Tensor:
    """Run `step(token, state) -> (output row, next state)` over each sequence; write `out` and
    `state`, return `out`.
    """
    offsets, contexts, slots = cu_seqlens.tolist(), context_lens.tolist(), state_slots.tolist()
    for (start, stop), context, slot in zip(pairwise(offsets), contexts, slots):
        if start == stop:
            continue
        current = state[slot].clone() if context > 0 else torch.zeros_like(state[slot])
        for token in range(start, stop):
            row, current = step(token, current)
            out[token] = row
        state[slot] = current
    return out
