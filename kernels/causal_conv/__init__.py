"""Causal depthwise convolution over the last inputs of each sequence, and the bare windows it
reads.
"""

from .schema import causal_conv, causal_window

__all__ = ["causal_conv", "causal_window"]
