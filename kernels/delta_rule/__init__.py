"""Gated delta rule: a K x V state per value head, decayed per token, corrected towards each new
value.
"""

from .schema import gated_delta_rule

__all__ = ["gated_delta_rule"]
