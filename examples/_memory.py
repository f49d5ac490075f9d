"""What a run holds in memory: the caches it keeps, and the largest tensor that it makes on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import regraft

MIB = 1 << 20


class Largest(TorchDispatchMode):
    """Remembers the largest storage that any operation made while this was on."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes, self.shape, self.operation = 0, (), ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                if storage.nbytes() > self.num_bytes and storage.data_ptr() not in given:
                    self.num_bytes, self.shape = storage.nbytes(), tuple(leaf.shape)
                    self.operation = str(func)
        return out


def largest_tensor(run: Callable[[], object]) -> Largest:
    """Of everything that `run` makes on the calling thread."""
    with Largest() as largest:
        run()
    return largest


def print_memory(engine: regraft.Engine, run: Callable[[], object]) -> None:
    """The caches' declared sizes, and the largest tensor of `run` beside what a plain implementation would make."""
    report, settings = engine.report, engine.config
    tokens = settings.max_batch_tokens
    largest = largest_tensor(run)
    logits = tokens * engine.model.vocab_size * 4
    print(
        f"\nMemory: caches of {report.bytes_per_token:,} bytes per token and {report.bytes_per_request:,} per request. "
        f"Largest tensor of a run: {'x'.join(map(str, largest.shape))} by {largest.operation}, "
        f"{largest.num_bytes / MIB:.1f} MiB; logits of all {tokens} tokens of a step would be {logits / MIB:.1f} MiB."
    )
