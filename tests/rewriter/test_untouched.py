"""What is done to a model inside `untouched`, `writes_undone` and `borrowed` is undone on leaving."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from regraft.rewriter.untouched import borrowed, configs_of, no_hooks_left, untouched, writes_undone


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("table", torch.arange(6.0))
        self.plain = torch.zeros(2)
        self.view = self.table[2:4]
        self.log: list[int] = [1, 2]
        self.facts = {"a": 1}
        self.config = LlamaConfig(num_hidden_layers=1)


def meddle(model: Owner) -> None:
    with untouched(model):
        model.linear.weight = nn.Parameter(torch.zeros(3, 3))
        model.register_buffer("table", torch.ones(1))
        model.register_buffer("other", torch.ones(1))
        model.extra = 3
        model.log.append(3)
        model.facts["a"] = 2
        model.facts["b"] = 2
        del model.plain
        model.linear = nn.Identity()
        model.register_forward_hook(lambda *_: None)
        model.train(False)
        model.config._attn_implementation = "eager"
        model.config.made_up = 1
        torch.rand(3)
        raise KeyError


def test_attributes_come_back() -> None:
    model = Owner()
    weight, buffer, config = model.linear.weight, model.table, model.config
    state = torch.get_rng_state()
    with pytest.raises(KeyError):
        meddle(model)
    assert model.linear.weight is weight and model.table is buffer and model.config is config
    assert (model.log, model.facts) == ([1, 2], {"a": 1})
    assert not hasattr(model, "extra") and not hasattr(model, "other") and model.plain.shape == (2,)
    assert not model._forward_hooks and model.training and model.linear.training
    assert config._attn_implementation is None and not hasattr(config, "made_up")
    assert torch.equal(state, torch.get_rng_state())


def write(model: Owner, outside: torch.Tensor) -> None:
    with writes_undone(model) as writes:
        model.linear.weight.mul_(2)
        model.linear.weight.data.add_(1)
        model.view.fill_(9.0)  # a view into the buffer
        torch.add(model.plain, 1, out=model.plain)
        outside.add_(1)
        assert len(writes.storages) == 3
        raise KeyError


def test_hooks_on_every_module_are_removed() -> None:
    seen: list[str] = []

    def note(module: nn.Module, name: str, buffer: object) -> None:
        seen.append(name)

    register = torch.nn.modules.module.register_module_buffer_registration_hook
    own = register(note)
    with no_hooks_left():
        register(note)
    nn.Module().register_buffer("one", torch.ones(1))
    own.remove()
    assert seen == ["one"]


@torch.no_grad()
def test_writes_come_back() -> None:
    model = Owner()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    outside = torch.zeros(2)
    with pytest.raises(KeyError):
        write(model, outside)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model.view, torch.tensor([2.0, 3.0])) and torch.equal(
        model.plain, torch.zeros(2)
    )
    assert torch.equal(outside, torch.ones(2))


def test_borrowing_does_both() -> None:
    model = Owner()
    weight = model.linear.weight.detach().clone()
    with torch.no_grad(), borrowed(model):
        model.linear.weight.zero_()
        model.seen = True
    assert torch.equal(model.linear.weight, weight) and not hasattr(model, "seen")


def test_nested_configurations_are_found() -> None:
    model = Owner()
    model.linear.config = LlamaConfig()
    model.config.text_config = LlamaConfig()
    found = configs_of(model)
    assert len(found) == 3 and {id(model.config), id(model.linear.config)} <= {id(c) for c in found}
