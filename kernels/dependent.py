"""Kernels that are launched while the one before them still runs: programmatic dependent launch, from Hopper on.

A decode step is hundreds of short kernels, and starting one takes a good part of its time. Launched with `dependent`,
a kernel is set up while the one before it ends. It then has to call `wait_for_last` (`triton_wait`) before anything
else: from there on it may read what was written before, and overwrite what was read. Every kernel that is launched so
waits, and lets the next one be set up behind that only: whatever lies further back than the last kernel is done.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def is_dependent(device: torch.device) -> bool:
    """Whether a card launches kernels so."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def dependent(device: torch.device) -> dict[str, Any]:
    """What a kernel that calls `wait_for_last` is launched with on this device: its DEPENDENT, and options."""
    return {"DEPENDENT": True, "launch_pdl": True} if is_dependent(device) else {"DEPENDENT": False}
