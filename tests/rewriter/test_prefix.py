"""Which toys the analysis refuses, which the prefix test stops, and which are served exactly."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn

from regraft.rewriter.capture import capture
from regraft.rewriter.errors import RewriteError
from regraft.rewriter.pattern import Region
from regraft.rewriter.pipeline import Served, rewrite
from regraft.rewriter.prefix import SHORTEST, check_prefix
from regraft.rewriter.replay import Replay, RowLayout
from tests.tolerance import assert_close

from . import toys
from .serving import Server, rows_read, serves
from .toys import HIDDEN, Mix, Toy, rewritten, text

SERVED = [
    toys.rows_only, toys.merged_view, toys.experts, toys.temperature, toys.learned_places, toys.running_mean,
    toys.shift_right, toys.first_token, toys.short_convolution, toys.place_in_expert, toys.attention,
    toys.softmax_by_hand, toys.packed_mask, toys.indexed_attention, toys.best_earlier_token, toys.shared_index,
    toys.two_readers, toys.two_layers, toys.grown_rows, toys.blocks,
]  # fmt: skip
NOT_CAUSAL = {
    toys.length_switch: "aten.mul.Tensor",
    toys.by_length: "aten.div.Tensor",
    toys.mean_of_tokens: "aten.sub.Tensor",
    toys.shift_left: "aten.cat.default",
    toys.last_token: "aten.add.Tensor",
    toys.best_tokens: "aten.scatter.value",
    toys.expert_load: "aten.index.Tensor",
    toys.open_prefix: "aten.scaled_dot_product_attention.default",
    toys.open_blocks: "aten.scaled_dot_product_attention.default",
}
REFUSED = {
    toys.reverse_sum: "flip over tokens: aten.flip.default",
    toys.rolled: "roll over tokens: aten.roll.default",
    toys.sorted_tokens: "sort over tokens: aten.sort.default",
    toys.sorted_and_back: "argsort over tokens: aten.argsort.default",
    toys.swapped_view: "rows are reordered by a view: aten.reshape.default",
    toys.group_norm: "group_norm over tokens: aten.group_norm.default",
}


def name_of(mix: object) -> str:
    return getattr(mix, "__name__", "")


@pytest.mark.parametrize("mix", SERVED, ids=name_of)
def test_served_exactly(mix: Mix) -> None:
    state = rewritten(mix)
    assert state.proof is not None and state.proof.proven
    replayed = [served for served in state.served if served.replay is not None]
    for served, rows in zip(replayed, rows_read(state, text(37)), strict=True):
        check_prefix(served, rows)
    serves(state, mix)


@pytest.mark.parametrize("mix", NOT_CAUSAL, ids=name_of)
def test_stopped_by_the_prefix_test(mix: Mix) -> None:
    state = rewritten(mix)
    (served,), (rows,) = state.served, rows_read(state, text(37))
    with pytest.raises(
        RewriteError, match=r"is not causal: cutting the text to \d+ of 37 tokens changes"
    ) as raised:
        check_prefix(served, rows)
    error = raised.value
    assert error.operation == NOT_CAUSAL[mix]
    assert error.path == "mixer"
    assert error.source.startswith("toys.py:")
    assert error.fix == "a model whose tokens depend on later ones cannot generate token by token"


@pytest.mark.parametrize("mix", REFUSED, ids=name_of)
def test_refused_by_the_analysis(mix: Mix) -> None:
    with pytest.raises(RewriteError) as raised:
        rewritten(mix)
    message = str(raised.value)
    assert f"the rewritten graph is not proven: {REFUSED[mix]} in mixer at toys.py:" in message
    assert raised.value.operation == REFUSED[mix].rpartition(": ")[2]
    assert raised.value.path == "mixer" and raised.value.source.startswith("toys.py:")
    assert "tokens of different requests would mix" in raised.value.fix


class Reversed(nn.Module):
    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        return hidden.flip(1).cumsum(1)


def test_the_source_line_is_the_models_own() -> None:
    model = Toy(toys.rows_only)
    model.mixer = Reversed()  # type: ignore[assignment]
    with pytest.raises(
        RewriteError, match=r"test_prefix\.py:\d+: return hidden\.flip\(1\)\.cumsum\(1\)"
    ):
        rewrite(capture(model), ())


# ---- the test itself, on regions made by hand ----------------------------------------------------------------------


class Plain(nn.Module):
    """A region over rows [T, H], as a function of its own."""

    graph = fx.Graph()

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, num_tokens: int, rows: Tensor) -> Tensor:
        return self.function(rows)


def region(function: Any, dtype: torch.dtype = torch.float32) -> Served:
    layout = RowLayout(0, (HIDDEN,), dtype)
    replay = Replay(cast(fx.GraphModule, Plain(function)), [layout], layout, "mixer")
    closer = SimpleNamespace(target="sum", meta={"source": "model.py:7: sum(x)"})
    found = SimpleNamespace(closer=closer, kind="mixing", path="mixer")
    return Served(cast(Region, found), "mixing", "replayed", "replay", replay=replay)


def rows() -> list[Tensor | None]:
    return [torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(0))]


def test_what_masks_are_filled_with_hides_no_difference() -> None:
    def filled(x: Tensor) -> Tensor:
        lowest = torch.full_like(x[:, :1], torch.finfo(x.dtype).min)
        return torch.cat([lowest, x[:, 1:] - x[:, 1:].mean(0)], 1)

    with pytest.raises(RewriteError, match="is not causal"):
        check_prefix(region(filled), rows())


@pytest.mark.parametrize("fill", [float("-inf"), torch.finfo(torch.float32).min])
def test_what_masks_are_filled_with_is_no_difference(fill: float) -> None:
    check_prefix(region(lambda x: x.cumsum(0).masked_fill(x > 1, fill)), rows())


def test_a_result_that_is_no_number_is_refused() -> None:
    with pytest.raises(RewriteError, match="is not causal"):
        check_prefix(region(lambda x: x.masked_fill(x > 1, float("nan"))), rows())


def test_whole_numbers_must_be_equal() -> None:
    check_prefix(region(lambda x: (x > 0).cumsum(0)), rows())
    with pytest.raises(RewriteError, match="is not causal"):
        check_prefix(region(lambda x: (x > 0).sum(0) + 0 * x.long()), rows())


def test_imaginary_parts_are_compared() -> None:
    with pytest.raises(RewriteError, match="is not causal"):
        check_prefix(region(lambda x: torch.complex(x, x.mean(0).expand_as(x))), rows())


def test_the_shortest_text_is_found() -> None:
    def needs(count: int) -> Any:
        def run(x: Tensor) -> Tensor:
            if len(x) < count:
                raise RuntimeError("too short")
            return x.cumsum(0)

        return run

    for count in (1, 2, 7, SHORTEST):
        served = region(needs(count))
        check_prefix(served, rows())
        assert served.replay is not None and served.replay.min_tokens == count
    with pytest.raises(RewriteError, match=f"cannot be run over {SHORTEST} tokens"):
        check_prefix(region(needs(SHORTEST + 1)), rows())


def test_a_difference_at_few_tokens_is_no_shortest_text() -> None:
    """Padding a short text up is exact only for what is causal."""

    def open_start(x: Tensor) -> Tensor:
        return x.cumsum(0) + (x[:5].sum(0) if len(x) >= 5 else 0)

    with pytest.raises(RewriteError, match="cutting the text to 1 of 40"):
        check_prefix(region(open_start), rows())


@pytest.mark.parametrize("limit", [9, 100, 4096, 70_000])
def test_a_switch_far_beyond_the_text_is_found(limit: int) -> None:
    """Rotary embeddings that change once the text is longer than what the model was trained on."""

    def longer(m: Any, x: Tensor, p: Tensor) -> Tensor:
        frequency = torch.where(p.max() + 1 > limit, m.vector[0] * 0.5, m.vector[0])
        return x * (p[..., None] * frequency).cos()

    state = rewritten(longer)
    (served,), (read,) = state.served, rows_read(state, text(37))
    with pytest.raises(RewriteError, match="is not causal"):
        check_prefix(served, read)


def test_a_scale_that_grows_from_some_length_on_is_found() -> None:
    def scaled(m: Any, x: Tensor, p: Tensor) -> Tensor:
        return x * torch.sym_max(1.0, x.shape[1] / 500)

    state = rewritten(scaled)
    (served,), (read,) = state.served, rows_read(state, text(37))
    with pytest.raises(RewriteError, match="is not causal"):
        check_prefix(served, read)


class GrowingAngles(nn.Module):
    """Angles that are computed anew whenever a text is the longest so far, by a branch that no trace can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 300

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        base = 1.0
        if position_ids.max() + 1 > self.longest:
            base = float(position_ids.max() + 1) / self.longest
        return hidden * (position_ids[..., None] / base).cos()


def test_a_switch_inside_an_opaque_module_is_found() -> None:
    model = Toy(toys.rows_only)
    model.mixer = GrowingAngles()  # type: ignore[assignment]
    state = rewrite(capture(model), ())
    (served,), (read,) = state.served, rows_read(state, text(37))
    assert served.kind == "module"
    assert re.fullmatch(
        r"no pass knows this module, which is kept whole: it branches on numbers that depend on the tokens "
        r"\(test_prefix\.py:\d+: if position_ids\.max\(\) \+ 1 > self\.longest:\)",
        served.reason,
    )
    with pytest.raises(RewriteError, match="this module is not causal"):
        check_prefix(served, read)
    check_prefix(
        served, read, max_positions=300
    )  # a model that serves no longer text never meets the branch
    with pytest.raises(RewriteError, match="this module is not causal"):
        check_prefix(served, read, max_positions=301)


def test_a_table_may_end_before_a_threshold() -> None:
    def places(m: Any, x: Tensor, p: Tensor) -> Tensor:
        return x + m.places[: x.shape[1]].clamp(-500, 500)

    state = rewritten(places)
    (served,), (read,) = state.served, rows_read(state, text(37))
    check_prefix(served, read)


# ---- what the present weights hide ---------------------------------------------------------------------------------


def mean(x: Tensor) -> Tensor:
    return x.mean(1, keepdim=True).expand_as(x)


def earlier(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


class Gated(nn.Module):
    """x + gate * mix(x), with the gate closed in one of many ways. With `loops`, no trace can look inside."""

    def __init__(self, mix: Any, way: str, *, loops: bool = False) -> None:
        super().__init__()
        self.mix, self.way, self.loops = mix, way, loops
        self.gate = nn.Parameter(torch.full((HIDDEN,), CLOSED[way]))
        self.into = nn.Linear(HIDDEN, HIDDEN)
        nn.init.constant_(self.into.weight, 0.0 if way == "rows" else 0.3)
        nn.init.zeros_(self.into.bias)

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        if self.loops and float(hidden.abs().max()) < 0:
            return hidden
        mixed = self.mix(self.into(hidden))
        if self.way == "sigmoid":
            return hidden + self.gate.sigmoid() * mixed
        if self.way == "root":
            return hidden + self.gate.log().sqrt() * mixed
        if self.way == "before":
            return hidden + self.mix(self.gate * hidden)
        return hidden + self.gate * mixed


CLOSED = {"zero": 0.0, "small": 1e-7, "sigmoid": -30.0, "root": 1.0, "before": 0.0, "rows": 1.0}
"""By way, the gate. Of "root" no negative number is a gate; of "rows" the gate is open, and the rows are zero."""


def region_of(mixer: nn.Module) -> tuple[Served, list[Tensor | None]]:
    model = Toy(toys.rows_only)
    model.mixer = mixer  # type: ignore[assignment]
    state = rewrite(capture(model.eval()), ())
    (served,), (read,) = state.served, rows_read(state, text(37))
    return served, read


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("way", CLOSED)
def test_a_leak_behind_a_closed_gate_is_found(way: str, loops: bool) -> None:
    mixer = Gated(mean, way, loops=loops)
    served, read = region_of(mixer)
    assert (served.kind == "module") == loops
    before = {name: tensor.clone() for name, tensor in mixer.state_dict().items()}
    with pytest.raises(
        RewriteError,
        match=r"is causal with its present weights only: with others, drawn at random, cutting the text to \d+ of 37",
    ) as raised:
        check_prefix(served, read)
    assert raised.value.path == "mixer"
    assert raised.value.fix.startswith("a gate that is zero, say, hides that until it is trained")
    assert all(torch.equal(mixer.state_dict()[name], before[name]) for name in before)


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("way", CLOSED)
def test_what_is_causal_behind_a_closed_gate_is_none(way: str, loops: bool) -> None:
    served, read = region_of(Gated(earlier, way, loops=loops))
    check_prefix(served, read)


class Masked(nn.Module):
    """A causal mask that is a table of numbers, as many models hold it."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(128, 128).tril())

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        count = hidden.shape[1]
        return self.mask[:count, :count] @ hidden


def test_tables_are_no_weights() -> None:
    served, read = region_of(Masked())
    check_prefix(served, read)


def test_numbers_that_a_region_does_not_take_are_no_leak() -> None:
    """A NaN of one token that a sum takes to others by 0 * NaN; an index that is out of range."""

    def rooted(x: Tensor) -> Tensor:
        lower = torch.ones(len(x), len(x)).tril()
        return lower @ (1 - x.tanh().abs() * x.abs().clamp(max=1)).sqrt()

    def looked_up(x: Tensor) -> Tensor:
        return torch.arange(50.0)[(x.cumsum(0) * 0).long() + x.abs().max().long()]

    check_prefix(region(rooted), [torch.rand(40, HIDDEN) * 0.9])
    check_prefix(region(looked_up), [torch.full((40, HIDDEN), 49.0)])


def test_fewer_rows_than_tokens_are_an_error() -> None:
    replay = region(lambda x: x[:20]).replay
    assert replay is not None
    with pytest.raises(RuntimeError, match="mixer gives 20 rows for 40 tokens"):
        replay.run(rows(), 40)


def test_texts_too_short_to_run_are_padded() -> None:
    """The convolution needs three tokens. A shorter text is what a longer one begins with."""
    state = rewritten(toys.late_convolution)
    (served,), (read,) = state.served, rows_read(state, text(37))
    check_prefix(served, read)
    assert served.replay is not None and served.replay.min_tokens == 3
    ids = text(37)
    expected = toys.alone(toys.late_convolution, ids)
    got = Server(state, [ids[:1], ids[:2], ids], padding=2).run((1, 1, 2), (0, 1, 1), (0, 0, 34))
    for logits in got:
        assert_close(logits, expected[: len(logits)])
