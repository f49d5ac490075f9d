from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from regraft.passes import decayed_linear, decayed_scan
from regraft.passes.decayed_linear import PASS
from regraft.rewriter.artifact import LiveWeights
from regraft.rewriter.capture import capture
from regraft.rewriter.declare import StateSpec
from regraft.rewriter.leaves import LeafUnsupported
from regraft.rewriter.pattern import Declined
from regraft.rewriter.token_axis import analyse, find_regions
from tests.passes.recurrent import (
    MixerLM,
    check_declined,
    check_grafted,
    enliven,
    graft,
    serve,
)
from tests.tolerance import assert_close

HEADS, K, V, BLOCK = 3, 4, 5, 8
STATE = StateSpec("mixer:state", (HEADS, K, V), torch.float32)
SLOPES = (0.9, 0.07, 1e-4)


class Blocks(nn.Module):
    """Linear attention with a decay per head, a block of tokens at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(8, HEADS * width) for width in (K, K, V))
        self.norm = nn.LayerNorm(HEADS * V)
        self.gate, self.out = nn.Linear(8, HEADS * V), nn.Linear(HEADS * V, 8)
        slopes = torch.tensor(SLOPES)[:, None, None]
        ages = torch.arange(BLOCK)[:, None] - torch.arange(BLOCK)
        within = torch.where(ages >= 0, -slopes * ages, -torch.inf).exp()
        self.within = nn.Buffer(within[None])
        self.before = nn.Buffer((-slopes * (torch.arange(BLOCK)[:, None] + 1)).exp())
        self.after = nn.Buffer((-slopes * (BLOCK - 1 - torch.arange(BLOCK)[:, None])).exp())
        self.slopes = nn.Buffer(slopes)

    def scan(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, done = v.new_zeros(1, HEADS, K, V), []
        for start in range(0, (q.shape[2] + BLOCK - 1) // BLOCK * BLOCK, BLOCK):
            one, two, three = (x[:, :, start : start + BLOCK] for x in (q, k, v))
            n = min(BLOCK, q.shape[2] - start)
            inner = (one @ two.transpose(-1, -2)) * self.within[:, :, :n, :n] @ three
            done.append(inner + (one * self.before[:, :n]) @ state)
            added = (two * self.after[:, -n:]).transpose(-1, -2) @ three
            state = self.carry(state, n) + added
        return torch.cat(done, dim=2)

    def carry(self, state: Tensor, tokens: int) -> Tensor:
        return state * (-self.slopes * tokens).exp()

    def rows(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            nn.functional.silu(p(self.rows(x))).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for p in self.projections
        )
        mixed = self.norm(self.scan(q, k, v).transpose(1, 2).flatten(2))
        return self.out(self.gate(x).sigmoid() * mixed)


class BlocksLM(MixerLM):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__(8)
        self.mixer = mixer

    def mix(self, x: Tensor) -> Tensor:
        return x + self.mixer(x)


def test_grafts_a_module_over_blocks_with_a_state_per_request() -> None:
    check_grafted(BlocksLM(Blocks()), PASS, [STATE])


def test_weights_stay_the_models_own() -> None:
    model = BlocksLM(Blocks())
    enliven(model)
    state = graft(model, PASS)
    live = LiveWeights.of(model, state.captured.weight_names)
    version = live.refresh(state.captured.module)
    with torch.no_grad():
        model.mixer.out.weight.mul_(2)
        for name in ("within", "before", "after"):  # as if every slope were twice as steep
            getattr(model.mixer, name).square_()
        model.mixer.slopes.mul_(2)
    model.mixer.gate.weight = nn.Parameter(torch.randn(HEADS * V, 8))
    assert live.refresh(state.captured.module) != version
    ids = torch.randint(16, (3 * BLOCK + 2,))
    with torch.no_grad():
        assert_close(serve(state, [ids], [[(0, 0, len(ids))]])[0], model(ids[None]).logits[0])


class Forgets(Blocks):
    """Right within a block, and nothing carried to the next."""

    def carry(self, state: Tensor, tokens: int) -> Tensor:
        return 0 * state


class DecaysTwice(Blocks):
    def carry(self, state: Tensor, tokens: int) -> Tensor:
        return super().carry(super().carry(state, tokens), tokens)


class Uneven(Blocks):
    """A decay that is no constant factor per step."""

    def __init__(self) -> None:
        super().__init__()
        self.within[:, :, 5, 2] *= 1.01


class LooksAhead(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.within[:, 1, 2, 3] = 0.5


class Softmaxed(Blocks):
    """Attention over a block, and no recurrence."""

    def scan(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        done = []
        for start in range(0, (q.shape[2] + BLOCK - 1) // BLOCK * BLOCK, BLOCK):
            one, two, three = (x[:, :, start : start + BLOCK] for x in (q, k, v))
            n = min(BLOCK, q.shape[2] - start)
            scores = (one @ two.transpose(-1, -2)) + self.within[:, :, :n, :n].log()
            done.append(scores.softmax(-1) @ three)
        return torch.cat(done, dim=2)


class Shifted(Blocks):
    """Another mixing in the same module."""

    def rows(self, x: Tensor) -> Tensor:
        return x + nn.functional.pad(x, (0, 0, 1, -1))


class Masked(Blocks):
    """Reads something that is not a row of floats."""

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        assert keep is not None
        return super().forward(x * keep[..., None])


class MaskedLM(BlocksLM):
    def forward(self, input_ids, position_ids=None, use_cache=False):
        self.ids = input_ids
        return super().forward(input_ids, position_ids, use_cache)

    def mix(self, x: Tensor) -> Tensor:
        return x + self.mixer(x, self.ids > 3)


class Ahead(BlocksLM):
    """The module reads tokens in reverse: its rows are not the sequence's."""

    def mix(self, x: Tensor) -> Tensor:
        return self.mixer(x.flip(1)).flip(1)


def test_declines_what_is_given_other_than_rows() -> None:
    masked = MaskedLM(Masked())
    enliven(masked)
    check_declined(masked, PASS, "the module reads what is not [1, T, C]")


def test_declines_rows_in_another_order() -> None:
    regions = find_regions(analyse(capture(Ahead(Blocks())).graph))
    (found,) = (found for region in regions if (found := PASS.pattern(region)))
    outcome = PASS.check(found)
    assert isinstance(outcome, Declined)
    assert "what is not one row per token" in str(outcome)


@pytest.mark.parametrize(
    ("mixer", "reason"),
    [
        (Forgets, "over several blocks the module is not this linear attention"),
        (DecaysTwice, "over several blocks the module is not this linear attention"),
        (Uneven, "decays are not a constant factor per step"),
        (LooksAhead, "decays are not a constant factor per step"),
        (Softmaxed, "not scores times decays"),
        (Shifted, "no pass takes this"),
    ],
)
def test_declines(mixer: type[Blocks], reason: str) -> None:
    model = BlocksLM(mixer())
    enliven(model)
    check_declined(model, PASS, reason)


def test_reads_off_where_the_factor_is_known_best() -> None:
    mixer = Blocks()
    assert decayed_scan.read_off(mixer.within[0]).tolist() == [1, BLOCK - 1, BLOCK - 1]
    rounded = decayed_scan.read_off(mixer.within[0].bfloat16())
    assert rounded is not None
    assert decayed_scan.read_off(mixer.within[0].bfloat16().float()) is None
    growing = torch.tensor([[[1.0, 0.0], [1.5, 1.0]]])
    assert decayed_scan.read_off(growing) is None
    assert decayed_scan.read_off(growing * torch.nan) is None


def test_mutant_decay_read_off_at_another_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison over several blocks refuses what the graft would otherwise get wrong."""
    monkeypatch.setattr(decayed_scan, "read_off", lambda stored: torch.tensor([2, 1, 1]))
    original = decayed_scan.log_decay

    def doubled(plan, grafting):
        decay = original(plan, grafting)
        shape, dtype = decay.meta["shape"], decay.meta["dtype"]
        return grafting.call(torch.ops.aten.mul.Tensor, decay, 2, shape=shape, dtype=dtype)

    monkeypatch.setattr(decayed_scan, "log_decay", doubled)
    model = BlocksLM(Blocks())
    enliven(model)
    check_declined(model, PASS, "over several blocks")
    monkeypatch.setattr(decayed_linear, "difference", lambda plan: 0.0)
    with pytest.raises(AssertionError):
        check_grafted(BlocksLM(Blocks()), PASS, [STATE])


class Twice(BlocksLM):
    """Two modules alike."""

    def __init__(self, mixer: nn.Module, other: nn.Module) -> None:
        super().__init__(mixer)
        self.other = other

    def mix(self, x: Tensor) -> Tensor:
        return self.other(super().mix(x))


def test_of_modules_alike_only_one_is_traced_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Twice(Blocks(), Blocks())
    enliven(model)
    traced = []

    def unsupported(call, *args):
        traced.append(call.path)
        raise LeafUnsupported("no trace of it")

    monkeypatch.setattr(decayed_linear, "trace_leaf", unsupported)
    check_declined(model, PASS, "no trace of it")
    assert traced == ["mixer"]
