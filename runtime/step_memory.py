"""What the largest step takes of a GPU's memory beside weights and caches: measured before there are caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from regraft.rewriter.declare import reaches_of

from .config import EngineConfig
from .pools import pool_shapes
from .scratch import scratch_step

if TYPE_CHECKING:
    from .runner import RewrittenModel

_PAGES = 2
"""Pages and slots of the measured step's caches: scratch, and one more."""


def step_bytes(model: RewrittenModel, config: EngineConfig) -> int:
    """Bytes that a step of `max_batch_tokens` tokens of `max_requests` requests takes at its peak, run operator by
    operator. 0 on the CPU, which does not tell.

    ValueError if there is no room for one.
    """
    device = model.device
    if device.type != "cuda":
        return 0
    free = torch.cuda.mem_get_info(device)[0]
    sequences = min(config.max_requests, config.max_batch_tokens)
    size = config.page_size if model.rows else 0
    try:
        pages = dict.fromkeys(reaches_of(model.rows), _PAGES)
        pools = {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in pool_shapes(model, pages, size, _PAGES).items()
        }
        sizes = (config.max_batch_tokens, sequences, sequences, 1)
        inputs = {**scratch_step(sizes, size, model), **pools}
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        with torch.no_grad():
            model.forward(inputs)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"a step of max_batch_tokens={config.max_batch_tokens} tokens and max_requests={config.max_requests} "
            f"requests does not fit into the {free} bytes that are free beside the weights: lower one of them"
        ) from error
    peak = torch.cuda.max_memory_allocated(device) - before
    del pools, inputs
    torch.cuda.empty_cache()  # what was used is free for the caches
    return peak
