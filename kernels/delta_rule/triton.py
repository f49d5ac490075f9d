"""The gated delta rule on the GPU."""

from __future__ import annotations

from regraft.kernels.recurrent.triton_delta import delta_rule_triton as gated_delta_rule_triton

__all__ = ["gated_delta_rule_triton"]
