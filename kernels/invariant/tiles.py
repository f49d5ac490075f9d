"""How paged attention is divided, the same for every request: query tiles, and key tiles from position 0 on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regraft.kernels.paged_attention.last_row import Metadata, OfLastRow
from regraft.kernels.paged_attention.spans import first_key

QUERIES = 4
"""Queries a tile: a decode step has one a request, and pays for all."""

KEYS = 64
"""Keys a tile: positions 0 to 63, 64 to 127 and so on of a request."""


def scores_of(keys: Tensor, query: Tensor) -> Tensor:
    """keys [B, KEYS, D] @ query [B, D, C] -> [B, KEYS, C]: queries are columns.

    Contiguous, or BLAS would be asked for another product where a batch of one makes a view of what else is copied.
    """
    return torch.bmm(keys.contiguous(), query.contiguous())


def values_of(values: Tensor, weights: Tensor) -> Tensor:
    """values [B, Dv, KEYS] @ weights [B, KEYS, C] -> [B, Dv, C]."""
    return torch.bmm(values.contiguous(), weights.contiguous())


@dataclass(frozen=True)
class QueryTiles:
    """B tiles of queries with the most key tiles first, and where the keys of each lie.

    rows, positions [B, QUERIES] int64: row of the packed row, position in the request, -1 where a tile has no query;
    first, count [B]: the key tiles; lowest, length [B]: the keys that its queries may attend to are at positions from
    `lowest` on and before `length`; table [B, pages]: the request's pages.
    """

    rows: Tensor
    positions: Tensor
    first: Tensor
    count: Tensor
    lowest: Tensor
    length: Tensor
    table: Tensor

    def split(self, size: int) -> list[QueryTiles]:
        """Parts of at most `size` tiles, which nothing but memory asks for."""
        return [QueryTiles(*parts) for parts in zip(*(x.split(size) for x in vars(self).values()))]

    def keys(self, step: int, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of the tiles that have a key tile number `step`: key positions, rows in the pool, and whether they may be
        attended to, [n, KEYS] each.
        """
        active = int((self.count > step).sum())
        position = ((self.first[:active] + step) * KEYS)[:, None] + torch.arange(KEYS)
        is_own = position < self.length[:active, None]
        is_own &= position >= self.lowest[:active, None]  # a page before it may be another's by now
        held = torch.where(is_own, position, 0)
        page = self.table[:active].gather(1, held // page_size)
        return position, page * page_size + held % page_size, is_own


def query_tiles(
    cu_seqlens: Tensor, context_lens: Tensor, block_table: Tensor, window: int, chunk: int
) -> QueryTiles:
    """The tiles of a packed row."""
    return _tiles(Metadata(cu_seqlens, context_lens, block_table), window, chunk)


def _make_tiles(metadata: Metadata, window: int, chunk: int) -> QueryTiles:
    bounds, contexts = metadata.cu_seqlens.tolist(), metadata.context_lens.tolist()
    found = []
    for seq, context in enumerate(contexts):
        start, end = bounds[seq], bounds[seq + 1]
        for row in range(start, end, QUERIES):
            position = context + row - start
            last = min(position + QUERIES, context + end - start) - 1
            lowest = first_key(position, window, chunk)
            first = lowest // KEYS
            found.append((last // KEYS + 1 - first, first, row, position, last, seq, lowest))
    found.sort(reverse=True)
    numbers = torch.tensor(found, dtype=torch.int64).view(-1, 7)
    counts, firsts, rows, begins, ends, seqs, lowests = numbers.unbind(1)
    place = torch.arange(QUERIES)
    positions = begins[:, None] + place
    has_query = positions <= ends[:, None]
    length = metadata.context_lens.long() + metadata.cu_seqlens.long().diff()
    return QueryTiles(
        rows=torch.where(has_query, rows[:, None] + place, 0),
        positions=torch.where(has_query, positions, -1),
        first=firsts,
        count=counts,
        lowest=lowests,
        length=length[seqs],
        table=metadata.block_table.long()[seqs],
    )


_tiles = OfLastRow(_make_tiles)
