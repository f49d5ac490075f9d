"""Kimi delta attention on the GPU."""

from __future__ import annotations

from regraft.kernels.recurrent.triton_delta import delta_rule_triton as kda_triton

__all__ = ["kda_triton"]
