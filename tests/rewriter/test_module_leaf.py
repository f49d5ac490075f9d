"""What cannot be traced for every T runs whole: found from its guards, with its results, without its side effects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regraft.rewriter.capture import capture
from regraft.rewriter.graph import TOKENS, CapturedGraph
from regraft.rewriter.module_leaf import is_module_leaf
from tests.families.models import FAMILIES, build
from tests.rewriter.remote_code import (
    HIDDEN,
    VOCABULARY,
    Blocks,
    DataDependent,
    Model,
    TimeLoop,
    row,
)
from tests.tolerance import assert_close


def opaque_paths(captured: CapturedGraph) -> list[str]:
    return [node.meta["leaf"].path for node in captured.graph.nodes if is_module_leaf(node)]


def assert_runs_like(model: nn.Module, captured: CapturedGraph, *lengths: int) -> None:
    for length in lengths or (2, 5, 37, 64, 130):
        with torch.no_grad():
            assert_close(
                captured.module(*row(length))[0], model(*row(length)).logits, name=f"T={length}"
            )


@pytest.mark.parametrize("mixer", [TimeLoop, DataDependent])
def test_the_smallest_module_is_found(mixer: type[nn.Module]) -> None:
    model = Model(mixer)
    captured = capture(model)
    assert opaque_paths(captured) == ["layers.0.mixer", "layers.1.mixer"]
    assert_runs_like(model, captured)


@pytest.mark.parametrize("mixer", [TimeLoop, DataDependent, Blocks])
def test_the_meta_device_is_enough(mixer: type[nn.Module]) -> None:
    model = Model(mixer).to("meta")
    captured = capture(model)
    assert opaque_paths(captured) == ["layers.0.mixer", "layers.1.mixer"]
    assert captured.logits.meta["shape"] == (1, TOKENS, VOCABULARY)
    assert all(tensor.device.type == "meta" for tensor in (*model.parameters(), *model.buffers()))


def test_a_size_in_blocks_makes_the_module_around_it_opaque() -> None:
    model = Model(Blocks)
    captured = capture(model)
    assert opaque_paths(captured) == [
        "layers.0.mixer",
        "layers.1.mixer",
    ]  # not layers.0.mixer.inner
    assert_runs_like(model, captured)


def test_results_have_their_shapes_in_tokens() -> None:
    captured = capture(Model(TimeLoop, layers=1))
    (leaf,) = (node for node in captured.graph.nodes if is_module_leaf(node))
    assert leaf.meta["shape"] is None and leaf.meta["path"] == "layers.0.mixer"
    assert [user.meta["shape"] for user in leaf.users] == [(1, TOKENS, HIDDEN)]
    call = leaf.meta["leaf"]
    assert [result.shape for result in call.shapes([torch.empty(1, 9, HIDDEN)] * 2, [])] == [
        (1, 9, HIDDEN),
        (1, HIDDEN),
    ]
    rebuilt = call.rebuild(["rows", "state"])
    assert rebuilt == ("rows", {"state": "state", "kind": "leaky"}, None)


def test_running_a_leaf_leaves_no_trace() -> None:
    model = Model(TimeLoop)
    captured = capture(model)
    mixer = model.layers[0].mixer
    assert (mixer.last, mixer.seen, int(mixer.steps)) == (None, [], 0)
    version = mixer.steps._version
    first = captured.module(*row(9))[0]
    captured.module(*row(20))
    assert torch.equal(captured.module(*row(9))[0], first)
    assert (mixer.last, mixer.seen, int(mixer.steps)) == (None, [], 0)
    assert mixer.steps._version == version, "nothing that is cached from the weights goes stale"
    assert "forward" not in vars(mixer)


class Decaying(nn.Module):
    """Scales by what its own last call left behind: what it says depends on a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        self.factor.mul_(0.5)
        return hidden * self.factor * sum(1 for _ in range(hidden.shape[1]))


def test_a_buffer_that_a_leaf_writes_starts_from_the_same_value_in_every_run() -> None:
    model = Model(Decaying, layers=1)
    captured = capture(model)
    first = captured.module(*row(6))[0]
    assert torch.equal(captured.module(*row(6))[0], first)
    assert float(model.layers[0].mixer.factor) == 1.0
    assert_runs_like(model, captured, 6)
    assert captured.module.meta["writes"] == ()


class RescaledOnce(Model):
    """Halves a weight of its mixer in place before its first pass, as one family does."""

    scaled = False

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False) -> Any:
        if not self.scaled:
            with torch.no_grad():
                self.layers[0].mixer.out.weight.mul_(0.5)
            self.scaled = True
        return super().forward(input_ids, position_ids)


def test_a_leaf_sees_a_weight_as_the_forward_pass_left_it() -> None:
    model = RescaledOnce(TimeLoop)
    captured = capture(model)
    assert not model.scaled
    assert captured.module.meta["writes"] == ("layers.0.mixer.out.weight",)
    mine = captured.module(*row(8))[0]
    with torch.no_grad():
        assert_close(mine, model(*row(8)).logits)


class InPlace(TimeLoop):
    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        hidden.mul_(2)
        return super().forward(hidden, **kwargs)


def test_a_module_that_writes_into_its_arguments_is_no_operator() -> None:
    model = Model(InPlace)
    captured = capture(model)
    assert opaque_paths(captured) == ["layers.0", "layers.1"]
    assert_runs_like(model, captured, 5, 20)


class Once(nn.Module):
    """Only one of the two layers loops: its twin by class, but not by structure, is traced."""

    def __init__(self) -> None:
        super().__init__()
        Once.made = getattr(Once, "made", 0) + 1
        if Once.made % 2:
            self.loop = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        if hasattr(self, "loop"):
            return torch.stack([self.loop(hidden[:, t]) for t in range(hidden.shape[1])], dim=1)
        return hidden.cumsum(1)


def test_twins_are_made_opaque_together_and_others_are_not() -> None:
    model = Model(Once, layers=4)
    captured = capture(model)
    assert opaque_paths(captured) == ["layers.0.mixer", "layers.2.mixer"]
    assert_runs_like(model, captured, 5, 20)


class Wide(TimeLoop):
    """Returns a part whose width grows at a length beyond those that are tried."""

    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        output, *rest = super().forward(hidden, **kwargs)
        extra = output[..., : 1 + hidden.shape[1] // 400]
        return (output, extra, *rest)


def test_a_result_of_another_shape_than_learned_is_an_error() -> None:
    captured = capture(Model(Wide, layers=1))
    captured.module(*row(399))
    with pytest.raises(RuntimeError, match=r"layers.0.mixer returned shapes .*, expected"):
        captured.module(*row(400))


def test_the_source_of_the_guard_is_known() -> None:
    families = {
        "minimax": ["model.layers.0.self_attn", "model.layers.2.self_attn"],
        "recurrent_gemma": [f"model.layers.{i}.temporal_block.rg_lru" for i in (0, 1, 3, 4)],
        "longcat_flash": ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"],
    }
    for name, expected in families.items():
        assert opaque_paths(capture(build(name))) == expected


@pytest.mark.slow
def test_an_indexer_with_a_data_dependent_loop_is_opaque_alone() -> None:
    model = build("qwen4_exp")
    captured = capture(model)
    assert opaque_paths(captured) == ["model.layers.3.self_attn.indexer"]
    ids = FAMILIES["qwen4_exp"].prompt(21)[None]
    with torch.no_grad():
        mine = captured.module(ids, torch.arange(21)[None])[0]
        assert_close(mine, model(input_ids=ids).logits, scale=5)


def test_a_router_over_tokens_stays_visible() -> None:
    """It must be refused by name later, so it may not hide in an opaque module."""
    captured = capture(build("doge_moe"))
    assert opaque_paths(captured) == []
    assert any("topk" in str(node.target) for node in captured.graph.nodes)
