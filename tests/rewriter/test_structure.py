"""What makes a model another one than was traced, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from regraft.rewriter.errors import RewriteError
from regraft.rewriter.structure import Structure


class Adapted(nn.Linear):
    """Has the switches of a layer with adapters."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self._disable_adapters = False
        self._active_adapter = ["default"]
        self.merged_adapters: list[str] = []
        self.scaling = {"default": 1.0}


def model() -> nn.Module:
    block = nn.ModuleDict({"proj": Adapted(), "act": nn.ReLU(), "none": nn.Identity()})
    block.register_module("hole", None)
    return nn.Sequential(nn.Embedding(8, 4), block)


def set_hole(block: nn.Module) -> None:
    block.hole = nn.Tanh()


def swap_order(block: Any) -> None:
    block["proj"] = block.pop("proj")


def compiled_other(block: Any) -> None:
    block["act"] = torch.compile(nn.ReLU())


Change = Callable[[Any], object]

CHANGES: dict[str, tuple[Change, str]] = {
    "module": (
        lambda block: block.update({"act": nn.GELU()}),
        "act of 1 is another module (GELU in place of ReLU)",
    ),
    "module of its kind": (
        lambda block: block.update({"act": nn.ReLU()}),
        "act of 1 is another module (ReLU in place of ReLU)",
    ),
    "another compiled": (compiled_other, "act of 1 is another module (ReLU in place of ReLU)"),
    "new": (set_hole, "hole of 1 is another module (Tanh in place of nothing)"),
    "gone": (
        lambda block: block.pop("none"),
        "none of 1 is another module (nothing in place of Identity)",
    ),
    "order": (swap_order, "the modules of 1 have another order"),
    "hook": (
        lambda block: block["act"].register_forward_hook(lambda *_: None),
        "1.act has 1 forward hooks, and had 0",
    ),
    "hook before": (
        lambda block: block["act"].register_forward_pre_hook(lambda *_: None),
        "1.act has 1 forward hooks, and had 0",
    ),
    "disabled": (
        lambda block: setattr(block["proj"], "_disable_adapters", True),
        "_disable_adapters of 1.proj was False and is True",
    ),
    "active": (
        lambda block: block["proj"]._active_adapter.append("two"),
        "_active_adapter of 1.proj was ['default'] and is ['default', 'two']",
    ),
    "merged": (
        lambda block: block["proj"].merged_adapters.append("default"),
        "merged_adapters of 1.proj was [] and is ['default']",
    ),
    "scaled": (
        lambda block: block["proj"].scaling.update(default=2.0),
        "scaling of 1.proj was {'default': 1.0} and is {'default': 2.0}",
    ),
    "switch that was not there": (
        lambda block: setattr(block["act"], "scaling", 3.0),
        "scaling of 1.act was None and is 3.0",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_model(name: str) -> None:
    change, message = CHANGES[name]
    whole = model()
    structure = Structure.of(whole)
    structure.check()
    change(whole[1])  # type: ignore[index]
    with pytest.raises(RewriteError) as raised:
        structure.check()
    problem = "the model is no longer made as when it was wrapped: "
    assert raised.value.problem == problem + message
    assert raised.value.fix == "wrap the model again, or undo that"


def test_undone_it_is_the_same_model() -> None:
    whole: Any = model()
    structure = Structure.of(whole)
    act, hook = whole[1]["act"], whole[1]["act"].register_forward_hook(lambda *_: None)
    whole[1]["act"] = nn.GELU()
    with pytest.raises(RewriteError):
        structure.check()
    whole[1]["act"] = act
    with pytest.raises(RewriteError):
        structure.check()
    hook.remove()
    structure.check()


def test_what_training_and_serving_change_is_not_looked_at() -> None:
    whole: Any = model()
    structure = Structure.of(whole)

    def make_inputs_require_grads(module: nn.Module, given: Any, output: Any) -> None:
        output.requires_grad_(True)

    whole.train()
    whole[0].register_forward_hook(make_inputs_require_grads)
    whole[0].weight = nn.Parameter(torch.ones(8, 4))
    whole[1]["proj"].register_buffer("cache", torch.zeros(3))
    whole[1]["proj"].gradient_checkpointing = True
    whole[1]["proj"].register_full_backward_hook(lambda *_: None)
    whole[1]["act"].compile()
    whole[1]["proj"] = torch.compile(whole[1]["proj"])
    structure.check()
