"""Which operator without caches does the work of which one with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import attention, compressed, indexed, recurrent  # noqa: F401 (they register the operators)


@dataclass(frozen=True)
class Twin:
    """An operator without caches. Its arguments have the names that they have in its stateful twin."""

    operator: torch._ops.OpOverload

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.operator._schema.arguments)


STATELESS: dict[str, Twin] = {
    f"regraft::{name}": Twin(
        getattr(torch.ops.regraft, f"varlen_{name.removeprefix('paged_')}").default
    )
    for name in (
        "paged_attention",
        "causal_conv",
        "causal_window",
        "gated_delta_rule",
        "kda",
        "ssd",
        "selective_scan",
        "decayed_linear",
        "index_topk",
        "index_pool_topk",
        "index_block_topk",
        "indexed_attention",
        "indexed_latent_attention",
        "pool_windows",
        "index_entries",
        "compressed_attention",
    )
}
"""Qualified name of an operator that keeps rows or states -> its twin."""

WINDOWED = frozenset(
    getattr(torch.ops.regraft, f"varlen_{name}").default
    for name in ("pool_windows", "index_pool_topk", "index_block_topk")
)
"""Twins that make windows of tokens, counted from a text's first one: padding before it moves those of the model."""
