"""The pipeline: one kind of mixing, or one optimisation, per file. This list is its order."""

from __future__ import annotations

from regraft.passes import attention, experts, latent_attention, length_switch, positions
from regraft.rewriter.pattern import Pass
from regraft.rewriter.pipeline import GraphPass

PIPELINE: tuple[Pass | GraphPass, ...] = (
    experts.PASS,  # weights gathered per token -> rows sorted by expert
    length_switch.PASS,  # rope chosen by the row's length -> chosen by each request's
    positions.PASS,  # arange(T) -> position in the request
    latent_attention.PASS,  # keys and values linear in one low-rank row -> attention over the row itself
    attention.PASS,  # softmax over keys -> paged_attention
)

__all__ = ["PIPELINE"]
