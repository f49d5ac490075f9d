"""wrap and inspect: what they take, what they refuse, and that nothing wrong gets past validation."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    RobertaConfig,
)

import regraft
from regraft.rewriter import artifact
from tests.families.models import FAMILIES, build

SIZES: dict[str, Any] = {"page_size": 4, "cache_tokens": 256, "max_requests": 4}
pytestmark = pytest.mark.xdist_group("face")


@functools.cache
def served() -> tuple[PreTrainedModel, regraft.Engine]:
    """A tiny model, validated as by default."""
    model = build("mistral")
    return model, regraft.wrap(model, **SIZES)


def test_one_line_gives_a_validated_engine() -> None:
    model, engine = served()
    validation = engine.report.validation
    assert validation.passed
    assert set(validation.by_schedule) == {"prefill", "decode", "chunk 7"}
    assert validation.max_abs < 1e-4
    assert validation.num_sequences == 4
    assert "passed" in str(validation)
    assert engine.report.seconds > 0
    assert repr(engine) == (
        "<Engine MistralForCausalLM: 3 grafted, 0 replayed; cache of 256 tokens, max_requests=4>"
    )
    assert not model.training


def test_validation_again_on_other_texts() -> None:
    _, engine = served()
    assert engine.validate(seed=7).passed
    full = engine.validate("full")
    assert full.passed
    assert full.num_sequences > 4
    with pytest.raises(ValueError, match="size='huge': choose from"):
        engine.validate("huge")


def test_validation_sees_weights_that_change_under_it() -> None:
    """Both sides follow the weights: it compares with the model as it is now."""
    model, engine = served()
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    assert engine.validate().passed


def test_a_request_may_take_every_position_of_a_table() -> None:
    """The last new token is never looked up: one more than fit is still what the model's own `generate` makes."""
    config = GPT2Config(
        n_positions=32, n_embd=32, n_layer=2, n_head=2, vocab_size=64, eos_token_id=63
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    engine = regraft.wrap(model, **SIZES)
    prompt = torch.randint(1, 60, (30,)).tolist()
    (output,) = engine.generate([prompt], max_new_tokens=3)
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=3, do_sample=False, pad_token_id=0
    )
    assert output.token_ids == expected[0, 30:].tolist()
    assert output.finish_reason == "length"
    with pytest.raises(
        regraft.RequestError,
        match=r"30 tokens and 4 new ones are more than the 32 positions of the model \(the last",
    ):
        engine.generate([prompt], max_new_tokens=4)


def test_a_setting_of_another_name() -> None:
    model, _ = served()
    with pytest.raises(ValueError, match=r"unknown setting 'max_seqs'.*max_requests"):
        regraft.wrap(model, max_seqs=3)


def test_a_config_and_keywords() -> None:
    model, _ = served()
    with pytest.raises(ValueError, match=r"either config or its fields, not both \(page_size\)"):
        regraft.wrap(model, config=regraft.EngineConfig(), page_size=4)


def test_a_config_of_another_kind() -> None:
    model, _ = served()
    with pytest.raises(ValueError, match="config is a dict: give an EngineConfig, or its fields"):
        regraft.wrap(model, config={"page_size": 4})


@pytest.mark.parametrize(
    "given",
    [None, "org/model", FAMILIES["llama"].config()],
    ids=["None", "an id", "a configuration"],
)
def test_what_is_no_model(given: Any) -> None:
    with pytest.raises(regraft.RewriteError, match="is no model") as caught:
        regraft.wrap(given)
    assert "from_pretrained" in caught.value.fix


def test_a_wrong_value() -> None:
    model, _ = served()
    with pytest.raises(ValueError, match=r"page_size=0"):
        regraft.wrap(model, page_size=0)


def plant(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """From now on every attention operator of a rewritten graph has other arguments: `changes` of their old values."""
    made = artifact.Artifact.__init__

    def mutant(self: artifact.Artifact, module: Any, *args: Any, **kwargs: Any) -> None:
        nodes = [node for node in module.graph.nodes if "paged_attention" in str(node.target)]
        assert nodes
        for node in nodes:
            names = [argument.name for argument in node.target._schema.arguments]
            for name, change in changes.items():
                at = names.index(name)
                if at < len(node.args):
                    node.update_arg(at, change(node.args[at]))
                else:
                    node.update_kwarg(name, change(node.kwargs[name]))
        module.recompile()
        made(self, module, *args, **kwargs)

    monkeypatch.setattr(artifact.Artifact, "__init__", mutant)


@pytest.mark.parametrize(
    "changes",
    [
        {"window": lambda window: window + 1},
        {"window": lambda window: window - 1},
        {"scale": lambda scale: scale * 1.02},
    ],
    ids=["window one longer", "window one shorter", "scale 2 % off"],
)
def test_a_planted_fault_does_not_get_past_wrap(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, **changes)
    with pytest.raises(regraft.ValidationError, match="disagrees with the model: FAILED") as caught:
        regraft.wrap(build("mistral"), **SIZES)
    validation = caught.value.validation
    assert not validation.passed
    assert validation.max_abs > 1e-3
    assert validation.mean_kl > 1e-5


def test_a_model_that_has_no_numbers_itself_is_named() -> None:
    model = build("mistral")
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    with pytest.raises(regraft.ValidationError, match="own logits are NaN in 4 texts") as caught:
        regraft.wrap(model, **SIZES)
    assert caught.value.validation.num_nan == 4


@pytest.mark.parametrize("named", [-1, 0])
def test_a_model_without_a_limit_of_positions(named: int) -> None:
    model = build("mistral")
    model.config.max_position_embeddings = named
    engine = regraft.wrap(model, **SIZES)
    assert engine.report.max_positions is None


def test_validation_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And then a fault is the caller's; asked for later, it is found."""
    plant(monkeypatch, scale=lambda scale: 2 * scale)
    engine = regraft.wrap(build("mistral"), validate="off", **SIZES)
    assert engine.report.validation is None
    assert not engine.validate().passed


def test_inspect_needs_no_weights() -> None:
    config = FAMILIES["mistral"].config()
    config.dtype = (
        torch.float32
    )  # without a dtype of its own, a configuration is inspected in bfloat16
    report = regraft.inspect(config)
    assert report.expected == report.found
    assert {layer.served for layer in report.layers} == {"grafted"}
    assert report.validation is None
    assert report.bytes_per_token == served()[1].report.bytes_per_token


def test_a_model_that_counts_its_positions_itself_is_refused() -> None:
    """RoBERTa's begin behind its padding id, and leave padding out: given positions would be other ones."""
    config = RobertaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=64,
        max_position_embeddings=64, is_decoder=True, pad_token_id=1,
    )  # fmt: skip
    with pytest.raises(regraft.RewriteError, match="own positions are not 0, 1, 2"):
        regraft.wrap(AutoModelForCausalLM.from_config(config).eval())


def test_what_is_no_language_model_is_refused() -> None:
    with pytest.raises(regraft.RewriteError, match="Linear is no language model of transformers"):
        regraft.wrap(nn.Linear(2, 2))
