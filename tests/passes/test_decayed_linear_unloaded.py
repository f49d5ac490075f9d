"""Without weights: grafted where the model's own code fills in the decays, and on no other ground."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from regraft.passes import decayed_linear
from regraft.passes.decayed_linear import PASS
from regraft.rewriter.initialised import initialised
from tests.passes.recurrent import check_declined, graft
from tests.passes.test_decayed_linear import (
    STATE,
    Blocks,
    BlocksLM,
    DecaysTwice,
    Forgets,
    Uneven,
)


class Unloaded(BlocksLM):
    """On the meta device, of a class that can fill in what a file of weights lacks."""

    def __init__(self, kind: type[Blocks], fills: tuple[str, ...] = ("buffers", "weights")) -> None:
        super().__init__(kind())
        self.fills = fills
        self.asked: list[str] = []
        self.to("meta")

    def _init_weights(self, module: nn.Module) -> None:
        self.asked.append(type(module).__name__)
        if isinstance(module, Blocks) and "buffers" in self.fills:
            for name, buffer in type(module)().named_buffers():
                getattr(module, name).copy_(buffer)
        elif "weights" in self.fills:
            for parameter in module.parameters(recurse=False):
                parameter.normal_()


def test_grafts_with_buffers_that_the_model_fills() -> None:
    """The same declarations as with weights, and the model is left on the meta device."""
    model = Unloaded(Blocks)
    state = graft(model, PASS)
    (served,) = state.served
    assert (served.served, served.states) == ("grafted", [STATE])
    assert "without weights" in served.notes[0]
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    named = state.captured.weight_names.values()
    assert {"mixer.within", "mixer.out.weight"} <= set(named)
    assert all(tensor.is_meta for tensor in state.captured.weights.values())


def test_layers_of_one_kind_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Blocks):
        pass

    calls: list[object] = []
    measure = decayed_linear.difference
    monkeypatch.setattr(decayed_linear, "difference", lambda p: [calls.append(p), measure(p)][1])
    for _ in range(2):
        graft(Unloaded(Own), PASS)
    assert len(calls) == 1


@pytest.mark.parametrize("fills", [(), ("weights",), ("buffers",)])
def test_declines_what_is_not_filled(fills: tuple[str, ...]) -> None:
    """Decays, or what the measurement over several blocks needs."""

    class Own(Blocks):
        pass

    reason = "not this linear attention: nan off" if fills == ("buffers",) else "weights needed"
    check_declined(Unloaded(Own, fills), PASS, reason)


def test_declines_a_model_that_fills_nothing() -> None:
    check_declined(BlocksLM(Blocks()).to("meta"), PASS, "weights needed")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Forgets, "over several blocks the module is not this linear attention"),
        (DecaysTwice, "over several blocks the module is not this linear attention"),
        (Uneven, "decays are not a constant factor per step"),
    ],
)
def test_declines(kind: type[Blocks], reason: str) -> None:
    check_declined(Unloaded(kind), PASS, reason)


def test_what_is_filled() -> None:
    model = Unloaded(Blocks)
    module = copy.deepcopy(model.mixer)
    cheap = initialised(module, model._init_weights, only_buffers=True)
    assert cheap is not None and model.asked == ["Blocks"]
    assert torch.equal(cheap.within, Blocks().within)
    assert not any(parameter.any() for parameter in cheap.parameters())
    one, two = (initialised(module, model._init_weights) for _ in range(2))
    assert one is not None and two is not None
    for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters()):
        assert torch.equal(a, b) and a.any(), name
    module.register_buffer("count", torch.zeros(3, dtype=torch.int64, device="meta"))
    assert initialised(module, model._init_weights) is None
