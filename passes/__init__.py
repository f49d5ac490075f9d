"""The pipeline: one kind of mixing, or one optimisation, per file. This list is its order."""

from __future__ import annotations

from regraft.passes import (
    attention,
    causal_conv,
    causal_window,
    compressed_attention,
    decayed_linear,
    delta_rule,
    expert_loop,
    experts,
    indexed_attention,
    kda,
    latent_attention,
    length_switch,
    positions,
    selective_scan,
    ssd,
    token_window,
)
from regraft.rewriter.pattern import Pass
from regraft.rewriter.pipeline import GraphPass

PIPELINE: tuple[Pass | GraphPass, ...] = (
    experts.PASS,  # weights gathered per token -> rows sorted by expert
    length_switch.PASS,  # rope chosen by the row's length -> chosen by each request's
    positions.PASS,  # arange(T) -> position in the request
    compressed_attention.PASS,  # softmax over a window of rows and one entry for each window before -> over both
    indexed_attention.PASS,  # softmax over keys that an indexer's top-k selects -> attention over the selected rows
    latent_attention.PASS,  # keys and values linear in one low-rank row -> attention over the row itself
    attention.PASS,  # softmax over keys -> paged_attention
    causal_conv.PASS,  # causal convolution kept whole by a leaf -> causal_conv over a state
    causal_window.PASS,  # convolution spelled out by padding, cutting or shifting -> causal_conv
    delta_rule.PASS,  # gated delta rule
    kda.PASS,  # delta rule with a gate per channel
    ssd.PASS,  # Mamba-2's scan
    selective_scan.PASS,  # Mamba-1's scan
    token_window.PASS,  # a function of the last few token ids -> of windows of them
    expert_loop.PASS,  # a module's loop over chosen experts -> rows sorted by expert
    decayed_linear.PASS,  # a module's loop over blocks of linear attention with a constant decay
)

__all__ = ["PIPELINE"]
