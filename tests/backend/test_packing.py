"""Batches as packed rows, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regraft.rewriter.grafted import _groups
from regraft.rewriter.packing import NotPackable, pack

IDS = torch.arange(12).unflatten(0, (2, 6)) + 100


def test_plain() -> None:
    packing = pack(IDS, None, None)
    assert packing.pack(IDS).tolist() == [*range(100, 112)]
    assert packing.positions.tolist() == [*range(6), *range(6)]
    assert packing.cu_seqlens.tolist() == [0, 6, 12]
    assert packing.cu_seqlens.dtype == torch.int32


def test_padded_on_either_side() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    packing = pack(IDS, mask, None)
    assert packing.pack(IDS).tolist() == [102, 103, 104, 105, 106, 107, 108]
    assert packing.positions.tolist() == [2, 3, 4, 5, 0, 1, 2]  # as the model counts them
    assert packing.cu_seqlens.tolist() == [0, 4, 7]


def test_a_row_of_padding_has_no_sequence() -> None:
    mask = torch.tensor([[0] * 6, [1] * 6])
    assert pack(IDS, mask, None).cu_seqlens.tolist() == [0, 6]
    nothing = pack(IDS, torch.zeros_like(mask), None)
    assert (nothing.num_tokens, nothing.cu_seqlens.tolist()) == (0, [0])
    assert not nothing.unpack(torch.ones(0, 3)).any()


def test_packed_row() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 5, 6]])
    packing = pack(IDS.reshape(1, 12), None, positions)
    assert packing.cu_seqlens.tolist() == [0, 3, 4, 8, 10, 12]
    assert packing.positions.tolist() == positions[0].tolist()


def test_positions_of_a_batch_begin_anew_in_each_row() -> None:
    packing = pack(IDS, None, torch.arange(6)[None])
    assert packing.cu_seqlens.tolist() == [0, 6, 12]
    continued = pack(IDS, None, torch.arange(12).unflatten(0, (2, 6)))
    assert continued.cu_seqlens.tolist() == [0, 6, 12]


def test_a_mask_decides_over_positions() -> None:
    """Positions of padding may be anything; with a mask they do not say where a sequence begins."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    positions = torch.tensor([[1, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 1]])
    packing = pack(IDS, mask, positions)
    assert packing.cu_seqlens.tolist() == [0, 4, 9]
    assert packing.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]


def test_padding_between_tokens_is_refused() -> None:
    mask = torch.tensor([[1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    with pytest.raises(NotPackable, match="between the tokens of a row"):
        pack(IDS, mask, None)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=4))
def test_unpack_undoes_pack(spans: list[tuple[int, int]]) -> None:
    mask = torch.zeros(len(spans), 9, dtype=torch.int64)
    for row, (start, length) in enumerate(spans):
        mask[row, start : start + length] = 1
    values = torch.randn(len(spans), 9)
    packing = pack(torch.zeros_like(mask), mask, None)
    assert torch.equal(packing.unpack(packing.pack(values)), values * mask)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=9), st.integers(7, 20))
def test_groups_are_whole_sequences(lengths: list[int], most: int) -> None:
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packing = pack(torch.zeros_like(positions), None, positions)
    groups = list(_groups(packing, most))
    assert torch.equal(torch.cat([group.positions for _, group in groups]), packing.positions)
    assert [int(n) for _, group in groups for n in group.cu_seqlens.diff()] == lengths
    assert all(group.num_tokens <= most for _, group in groups)


def test_a_sequence_beyond_the_graph_is_refused() -> None:
    with pytest.raises(NotPackable, match="6 tokens, and the graph holds for 5"):
        list(_groups(pack(IDS, None, None), 5))
