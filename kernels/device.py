"""What the choice of a kernel's form asks of a card."""

from __future__ import annotations

import functools

import torch


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 in Triton's interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def fetches_tiles(device: torch.device) -> bool:
    """Whether the card has a copy engine for tiles, and shared memory for as many as `product_forms` keeps under way:
    Hopper's and Blackwell's for data centres. Triton's interpreter plays one.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)
