"""Steps that nobody asked for: to find out what a model does at given sizes."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Any

import torch

from regraft.rewriter.declare import PAGED_FIELDS, field_of, reaches_of


def scratch_step(
    sizes: tuple[int, int, int, int],
    page_size: int,
    model: Any,
    taken: Collection[int] = (),
) -> dict[str, torch.Tensor]:
    """Metadata on the device of a step that touches nothing but the scratch page and slot; no size is one of `taken`.

    `sizes` are tokens, sequences, rows of logits and spare pages; of `model` the rows, device and min_tokens are read.
    """
    tokens, seqs, rows, pages = sizes
    tokens, device = max(tokens, model.min_tokens), model.device
    pages += -(-tokens // (seqs * max(page_size, 1)))  # host code reads the pages of all tokens
    while not {tokens, seqs, rows, pages}.isdisjoint(taken):
        tokens, seqs, rows, pages = tokens + 1, seqs + 1, rows + 1, pages + 1
    ends = [tokens * i // seqs for i in range(seqs + 1)]
    positions = [at for one, two in pairwise(ends) for at in range(two - one)]
    long, short = torch.int64, torch.int32
    paged = (
        torch.zeros(seqs, pages, dtype=short, device=device),
        torch.arange(tokens, device=device) % max(page_size, 1),
    )
    return {
        "input_ids": torch.zeros(1, tokens, dtype=long, device=device),
        "position_ids": torch.tensor([positions], dtype=long, device=device),
        "cu_seqlens": torch.tensor(ends, dtype=short, device=device),
        "context_lens": torch.zeros(seqs, dtype=short, device=device),
        **{
            field_of(name, reach): tensor.clone()
            for reach in reaches_of(model.rows)
            for name, tensor in zip(PAGED_FIELDS, paged)
        },
        "state_slots": torch.zeros(seqs, dtype=long, device=device),
        "extents": torch.full((seqs,), tokens, dtype=long, device=device),
        "logits_rows": torch.arange(rows, device=device),
    }
