"""Attention over keys and values that are linear in one low-rank row per token (multi-head latent attention).

`schema` declares the operator, `naive` rebuilds every key and value, `absorbed` computes in the latent space.
"""

from .schema import latent_attention

__all__ = ["latent_attention"]
