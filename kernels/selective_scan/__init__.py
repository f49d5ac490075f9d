"""Selective scan (Mamba-1): S states per channel, each with a decay of its own per token."""

from .schema import selective_scan

__all__ = ["selective_scan"]
