"""What a device could do at best: time floors from its measured ceilings.

A decode step reads every weight once, and the keys and values, or states, of every sequence. A prompt token costs two
FLOPs a weight. Nothing can be faster than these bytes at the copy bandwidth and these FLOPs at the matmul rate.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

COPIED = {"cuda": 1 << 30, "cpu": 1 << 26}
"""Elements of the copy that measures the bandwidth, by device."""

WIDTH = {"cuda": 8192, "cpu": 1024}
"""Of the matrices whose product measures the FLOPs."""


def median_seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Median time of a call, on the GPU by events, after two calls to warm up."""
    for _ in range(2):
        run()
    times = []
    if not torch.cuda.is_available():
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


@dataclass(frozen=True)
class Ceilings:
    """Measured on this device."""

    bytes_per_second: float
    flops_per_second: float

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Ceilings:
        """A copy (2 GB on a GPU), counting bytes read and written, and a matrix product, on random data."""
        return cls(_copy_rate(device), _product_rate(device, dtype))


def _copy_rate(device: torch.device) -> float:
    source = torch.randn(COPIED[device.type], dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source))


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    width = WIDTH[device.type]
    left, right = (torch.randn(width, width, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * width**3 / median_seconds(lambda: torch.mm(left, right, out=out))


@dataclass(frozen=True)
class Work:
    """Bytes and FLOPs that serving a model cannot do without."""

    weight_bytes: int
    """Read in each step: all weights but the embedding table, of which a step reads single rows."""
    row_bytes: int
    """Kept per token and sequence, and read for each new one."""
    state_bytes: int
    """Kept per sequence, read and written for each new token."""
    weights: int
    """That a token is multiplied with: of stacked experts as many as it is sent to."""
    attention_flops: float
    """Per pair of a token and an earlier one."""

    @classmethod
    def of(cls, model: Any, row_bytes: int, state_bytes: int) -> Work:
        """`row_bytes` and `state_bytes` as the report of a rewrite has them."""
        table = model.get_input_embeddings().weight
        tied = model.get_output_embeddings().weight is table
        tensors = {id(p): p for p in model.parameters() if tied or p is not table}
        config = model.config.get_text_config()
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        chosen = getattr(config, "num_experts_per_tok", None)
        return cls(
            sum(p.nbytes for p in tensors.values()),
            row_bytes,
            state_bytes,
            sum(_used_by_a_token(p, chosen) for p in tensors.values()),
            4.0 * layers * heads * width,
        )

    def decode_seconds(self, contexts: Sequence[int], ceilings: Ceilings) -> float:
        """One step of sequences that have these many tokens cached."""
        read = (
            self.weight_bytes
            + self.row_bytes * sum(contexts)
            + 2 * self.state_bytes * len(contexts)
        )
        return read / ceilings.bytes_per_second

    def prefill_seconds(self, lengths: Sequence[int], ceilings: Ceilings) -> float:
        """All prompts."""
        flops = sum(2.0 * self.weights * n + self.attention_flops * n * n / 2 for n in lengths)
        return flops / ceilings.flops_per_second

    def load_seconds(self, lengths: Sequence[int], new: int, ceilings: Ceilings) -> float:
        """All prompts, and then `new` tokens for each, all sequences side by side."""
        steps = (
            self.decode_seconds([n + done for n in lengths], ceilings) for done in range(1, new)
        )
        return self.prefill_seconds(lengths, ceilings) + math.fsum(steps)


def _used_by_a_token(weight: torch.Tensor, chosen: int | None) -> int:
    """Numbers of a weight [experts, ...] that a token sent to `chosen` experts meets; of any other, all."""
    experts = weight.shape[0] if weight.dim() == 3 else 0
    is_stack = chosen is not None and experts > chosen
    return weight.numel() * chosen // experts if is_stack else weight.numel()  # type: ignore[operator]
