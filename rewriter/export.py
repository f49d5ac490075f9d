"""How everything here is exported by torch: not strictly, and over attention in plain products."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.nn.attention import SDPBackend, sdpa_kernel

from .untouched import no_hooks_left


def export(module: nn.Module, args: tuple[Any, ...], dynamic_shapes: Any) -> ExportedProgram:
    """`torch.export.export`, which leaves nothing behind, also where it fails."""
    with sdpa_kernel(SDPBackend.MATH), no_hooks_left():
        return torch.export.export(module, args, dynamic_shapes=dynamic_shapes, strict=False)
