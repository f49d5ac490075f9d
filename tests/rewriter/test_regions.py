"""Where the analysis sees tokens mix: one region per mixing place, with all it reads and nothing more."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from regraft.rewriter.graph import is_aten
from regraft.rewriter.pattern import Region
from regraft.rewriter.token_axis import analyse, find_regions

from . import toys
from .toys import Mix, captured


def regions_of(mix: Mix) -> list[Region]:
    return find_regions(analyse(captured(mix).graph))


def names(region: Region, operation: str) -> list[fx.Node]:
    return [node for node in region.nodes if is_aten(node, operation)]


def test_rows_only_has_no_region() -> None:
    assert regions_of(toys.rows_only) == []
    assert regions_of(toys.merged_view) == []
    assert regions_of(toys.experts) == []


def test_one_region_per_attention_each_with_its_own_mask() -> None:
    """The mask is shared by both layers, and is in the region of each."""

    def mix(m: Any, x: Tensor, p: Tensor) -> Tensor:
        mask = toys.causal(x)
        for _ in range(2):
            query, key, value = toys.queries_keys_values(m, x)
            x = F.silu(
                toys.joined(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))
            )
        return x

    first, second = regions_of(mix)
    for region in (first, second):
        assert region.kind == "attention" and region.path == "mixer"
        assert is_aten(region.closer, "scaled_dot_product_attention")
        assert names(region, "arange") and names(region, "le")
        assert not names(region, "linear") and not names(region, "silu")
        assert len(region.inputs) == 3
        assert region.causes == ("the row's own index (arange)", "attention over tokens")
    assert set(names(first, "le")) == set(names(second, "le"))


def test_regions_come_in_the_order_of_the_graph() -> None:
    first, second = regions_of(toys.two_layers)
    assert first.closer < second.closer


def test_a_softmax_by_hand_is_one_region() -> None:
    """Its maximum and its sum have the shape of rows: they must not become regions of their own."""
    (region,) = regions_of(toys.softmax_by_hand)
    assert names(region, "amax") and names(region, "exp") and len(names(region, "matmul")) == 2
    assert len(region.inputs) == 3


def test_a_mask_from_positions_is_part_of_the_region() -> None:
    """What follows from positions alone is computed inside, and position_ids is an input."""
    (region,) = regions_of(toys.packed_mask)
    assert names(region, "diff") and names(region, "cumsum")
    assert "position_ids" in {node.name for node in region.inputs}


def test_an_indexer_is_part_of_its_attention() -> None:
    (region,) = regions_of(toys.indexed_attention)
    assert names(region, "topk") and names(region, "scatter")
    assert all(node.meta["dtype"].is_floating_point for node in region.inputs)


def test_a_shared_index_does_not_pull_the_earlier_attention_in() -> None:
    first, second = regions_of(toys.shared_index)
    assert len(names(first, "scaled_dot_product_attention")) == 1
    assert len(names(second, "scaled_dot_product_attention")) == 1
    assert names(second, "topk"), "the choice is made again, from the first layer's rows"
    assert first.closer not in second.nodes


def test_only_what_the_logits_need_counts() -> None:
    """The indices of a maximum over tokens are computed with it; nobody reads them."""

    def mix(m: Any, x: Tensor, p: Tensor) -> Tensor:
        scores = torch.where(toys.causal(x), (x @ x.transpose(1, 2)), -1e9)
        unused = x.roll(1, 1)
        del unused
        return x * scores.max(-1, keepdim=True).values

    (region,) = regions_of(mix)
    assert not names(region, "roll")
    assert is_aten(region.closer.args[0], "max") or is_aten(region.closer, "max")
    assert region.closer.meta["dtype"] == torch.float32


def test_a_row_index_alone_is_a_region_without_inputs() -> None:
    (region,) = regions_of(toys.temperature)
    assert region.inputs == () and region.kind == "position"
    assert is_aten(region.closer, "arange")


def test_rows_made_of_the_row_index_stay_outside() -> None:
    """Only the index is the region; what is computed from it, row by row, is not."""
    (region,) = regions_of(toys.temperature)
    assert not names(region, "log")


def test_a_region_closes_behind_its_own_padding() -> None:
    (region,) = regions_of(toys.blocks)
    assert is_aten(region.closer, "slice") and region.path == "mixer"
    assert region.causes == ("pads tokens",)


def test_a_shape_lender_is_no_input() -> None:
    """zeros_like(x) reads no element of x."""

    def mix(m: Any, x: Tensor, p: Tensor) -> Tensor:
        other = F.linear(x, m.square)
        return F.linear(x, m.other).cumsum(1) + torch.zeros_like(other).cumsum(1)

    inputs = {node.name for region in regions_of(mix) for node in region.inputs}
    assert inputs == {"linear_1"}
