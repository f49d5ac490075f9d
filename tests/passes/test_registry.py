"""A pass of one's own: offered first, in every rewrite, until it is taken back."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import regraft
from regraft.passes import PIPELINE
from regraft.passes.registry import pipeline
from regraft.rewriter.pipeline import GraphPass
from tests.families.served import LOGITS, forward, worst

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_pass.py"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture
def registered(example: dict[str, Any]) -> Iterator[None]:
    regraft.register_pass(example["PASS"])
    yield
    regraft.unregister_pass("running sum")


def model_of(example: dict[str, Any]) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model: nn.Module = AutoModelForCausalLM.from_config(config).eval()
    model.model.layers[1].self_attn = example["MeanSoFar"](config)
    return model


def test_grafted_and_right(example: dict[str, Any], registered: None) -> None:
    model = model_of(example)
    engine = regraft.wrap(model, fallback="refuse")
    assert [layer.served for layer in engine.report.layers] == ["grafted"] * 3
    assert "running sum" in {layer.kind for layer in engine.report.layers}
    texts = [[5, 17, 3, 99, 4, 4, 31], [2], [7, 8, 9]]
    for schedule in ("prefill", "decode", 3):
        scored = engine.score(texts, schedule=schedule)
        assert worst(scored, [forward(model, ids) for ids in texts]) <= LOGITS


def test_without_it_the_layer_is_replayed(example: dict[str, Any]) -> None:
    report = regraft.inspect(model_of(example))
    (mixing,) = [layer for layer in report.layers if layer.kind == "mixing"]
    assert (mixing.served, mixing.reason) == ("replayed", "no pass knows this mixing")


def test_its_reason_is_in_the_report(example: dict[str, Any], registered: None) -> None:
    """A sum over channels and one over tokens that was turned round are not what the pass knows."""

    class Turned(example["MeanSoFar"]):  # type: ignore[misc, name-defined]
        def forward(self, hidden_states: Any, **_: object) -> tuple[Any, None]:
            return self.value(hidden_states).transpose(1, 2).cumsum(2).transpose(1, 2), None

    model = model_of(example)
    model.model.layers[1].self_attn = Turned(model.config)
    report = regraft.inspect(model)
    (layer,) = [layer for layer in report.layers if layer.served == "replayed"]
    assert layer.reason.startswith("running sum: a sum over dimension 2")
    assert "running sum got 50% of the way" in report.explain(layer.path)


def test_order_and_names(example: dict[str, Any], registered: None) -> None:
    assert pipeline() == (example["PASS"], *PIPELINE)
    with pytest.raises(ValueError, match="a pass named 'running sum' already"):
        regraft.register_pass(example["PASS"])
    with pytest.raises(ValueError, match="a pass named 'attention' already"):
        regraft.register_pass(GraphPass("attention", lambda captured: 0))
    with pytest.raises(TypeError, match="expected a Pass or a GraphPass, got function"):
        regraft.register_pass(lambda region: None)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="no pass named 'nothing'"):
        regraft.unregister_pass("nothing")
