"""Slots of a state pool: what a sequence starts from, and what it leaves behind."""

from __future__ import annotations

import torch


def initial_states(
    pool: torch.Tensor, state_slots: torch.Tensor, context_lens: torch.Tensor
) -> torch.Tensor:
    """The state each sequence starts from, [R, ...]: its slot's, or zero if nothing of it is cached
    yet.

    A fresh sequence never sees what the slot's former owner left there, NaN included (selected, not
    multiplied away).
    """
    states = pool.index_select(0, state_slots)
    fresh = (context_lens == 0).view(-1, *[1] * (pool.dim() - 1))
    return states.masked_fill_(fresh, 0.0)


def store_states(
    pool: torch.Tensor, state_slots: torch.Tensor, states: torch.Tensor, cu_seqlens: torch.Tensor
) -> None:
    """Write each sequence's final state [R, ...] to its slot, in place.

    The slot of a sequence without new tokens is left as it was.
    """
    idle = (cu_seqlens.diff() == 0).view(-1, *[1] * (pool.dim() - 1))
    if bool(idle.any()):
        states = torch.where(idle, pool.index_select(0, state_slots), states.to(pool.dtype))
    pool.index_copy_(0, state_slots, states.to(pool.dtype))
