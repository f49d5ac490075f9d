"""Two reports beside each other: every difference in how a model is served is a line, and nothing else is."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3NextConfig

import regraft
from regraft.__main__ import main
from regraft.rewriter.report_diff import diff

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**SIZES, "num_hidden_layers": 2, **changes})


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return regraft.inspect(llama()).to_dict()


def test_alike(report: dict[str, Any], tmp_path: Path) -> None:
    """Also after a way through a file, and whatever the run took."""
    again = json.loads(json.dumps(report))
    again["seconds"], again["notes"] = 99.0, ["another day"]
    assert diff(report, again) == []


def test_another_cache(report: dict[str, Any]) -> None:
    lines = diff(report, regraft.inspect(llama(num_key_value_heads=4)).to_dict())
    assert "bytes_per_token: 128 -> 256" in lines
    assert (
        "model.layers.1.self_attn: rows: k 2x8 bfloat16, v 2x8 bfloat16 -> k 4x8 bfloat16, v 4x8 bfloat16"
        in lines
    )


def test_a_layer_more(report: dict[str, Any]) -> None:
    lines = diff(report, regraft.inspect(llama(num_hidden_layers=3)).to_dict())
    assert "model.layers.2.self_attn: attention (grafted) appeared" in lines
    assert "found: {'attention': 2} -> {'attention': 3}" in lines
    assert "pass attention: matches: 2 -> 3" in lines


def test_a_layer_that_is_replayed_now(report: dict[str, Any]) -> None:
    worse = copy.deepcopy(report)
    worse["layers"][1].update(served="replayed", operator="replay", reason="no pass knows this")
    assert diff(report, worse) == [
        "model.layers.1.self_attn: served: grafted -> replayed",
        "model.layers.1.self_attn: operator: regraft::paged_attention -> replay",
        "model.layers.1.self_attn: reason: none -> no pass knows this",
    ]


def test_another_kind_of_model(report: dict[str, Any]) -> None:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    hybrid = Qwen3NextConfig(**SIZES, **heads, num_hidden_layers=4, num_experts=0)
    lines = diff(report, regraft.inspect(hybrid).to_dict())
    assert "model.layers.0.self_attn: attention (grafted) gone" in lines
    assert "model.layers.0.linear_attn: delta_rule (grafted) appeared" in lines


def test_another_schema_is_an_error(report: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="schema version 0, expected 1"):
        diff(report, {**report, "schema_version": 0})


def test_command_line(
    report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report in a file beside a configuration: 0 if they are served alike, 1 if not."""
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    llama().save_pretrained(tmp_path / "same")
    llama(num_hidden_layers=1).save_pretrained(tmp_path / "less")
    assert main(["diff", str(file), str(tmp_path / "same")]) == 0
    assert "served alike" in capsys.readouterr().out
    assert main(["diff", str(file), str(tmp_path / "less" / "config.json")]) == 1
    assert "model.layers.1.self_attn: attention (grafted) gone" in capsys.readouterr().out
