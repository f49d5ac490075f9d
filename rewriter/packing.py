"""A batch `[B, T]` as one packed row of sequences, and rows back into the batch.

padded   attention_mask   the row has the real tokens only, a sequence per row of the batch
packed   position_ids     a sequence begins wherever the position is not the one before plus one
plain    neither          a sequence per row of the batch
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class NotPackable(ValueError):
    """A batch whose real tokens are not one stretch per row."""


@dataclass(frozen=True)
class Packing:
    """One packed row of N tokens in R sequences.

    batch        (B, T)
    index        [N] int64, each token's place in the flattened batch; None if the row is the whole batch
    positions    [N] int64
    cu_seqlens   [R+1] int32
    """

    batch: tuple[int, int]
    index: Tensor | None
    positions: Tensor
    cu_seqlens: Tensor

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    def pack(self, values: Tensor) -> Tensor:
        """[B, T] -> [N]."""
        flat = values.reshape(-1)
        return flat if self.index is None else flat.index_select(0, self.index)

    def unpack(self, rows: Tensor) -> Tensor:
        """[N, ...] -> [B, T, ...], zero where there is no token."""
        batch, tokens = self.batch
        if self.index is not None:
            whole = rows.new_zeros(batch * tokens, *rows.shape[1:])
            rows = whole.index_copy(0, self.index, rows)
        return rows.unflatten(0, (batch, tokens))


def pack(ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Packing:
    """See above. ids, attention_mask [B, T]; position_ids [B, T] or [1, T]. Raises NotPackable."""
    batch, tokens = ids.shape
    if position_ids is None:
        positions = torch.arange(tokens, device=ids.device).repeat(batch)
    else:
        positions = position_ids.expand(batch, tokens).reshape(-1).long()
    if attention_mask is not None:
        return _padded(attention_mask != 0, positions)
    starts = torch.zeros(batch, tokens, dtype=torch.bool, device=ids.device)
    if position_ids is not None:
        starts = positions.unflatten(0, (batch, tokens)).diff(prepend=starts[:, :1].long()) != 1
    starts[:, 0] = True
    return Packing((batch, tokens), None, positions, _ends(starts.flatten()))


def refuse_shifted(attention_mask: Tensor) -> None:
    """Raise NotPackable if a text of the batch does not begin at the first place of its row: [B, T]."""
    real = attention_mask != 0
    if bool((real.any(1) & ~real[:, 0]).any()):
        raise NotPackable(
            "padding on the left, which windows of tokens, or a region without an operator, may count as places"
        )


def _ends(starts: Tensor) -> Tensor:
    end = torch.tensor([starts.shape[0]], device=starts.device)
    return torch.cat([starts.nonzero().squeeze(1), end]).to(torch.int32)


def _padded(real: Tensor, positions: Tensor) -> Packing:
    begins = real.clone()
    begins[:, 1:] &= ~real[:, :-1]
    if bool((begins.sum(1) > 1).any()):
        raise NotPackable("the attention mask has padding between the tokens of a row")
    index = real.flatten().nonzero().squeeze(1)
    starts = begins.flatten().index_select(0, index)
    batch, tokens = real.shape
    return Packing((batch, tokens), index, positions.index_select(0, index), _ends(starts))
