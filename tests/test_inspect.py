"""Reports of published shapes from a configuration alone: no weights, the meta device, minutes at most."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    FalconH1Config,
    KimiLinearConfig,
    LlamaConfig,
    Mamba2Config,
    MiniMaxConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

import regraft
from regraft.__main__ import main
from tests.families.models import FAMILIES

QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
BF16 = torch.bfloat16


def inspected(config: PreTrainedConfig) -> regraft.RewriteReport:
    config.dtype = BF16
    report = regraft.inspect(config)
    assert report.expected == report.found
    assert all(layer.served == "grafted" for layer in report.layers)
    return report


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_qwen3_8b() -> None:
    report = inspected(Qwen3Config(**QWEN3_8B))
    assert len(report.layers) == 36
    assert report.bytes_per_token == 36 * 2 * 8 * 128 * 2
    assert report.bytes_per_request == 0


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_deepseek_v3_keeps_one_latent_row_a_layer() -> None:
    """The configuration's defaults are the published model: 61 layers, latents of 512, a rotary key of 64."""
    report = inspected(DeepseekV3Config())
    assert [layer.kind for layer in report.layers] == ["latent attention"] * 61
    assert report.bytes_per_token == 61 * (512 + 64) * 2 == 70_272


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mamba_codestral_7b() -> None:
    """The configuration's defaults are the published model: 64 layers, 128 heads of 64, states of 128."""
    report = inspected(Mamba2Config())
    assert Counter(layer.kind for layer in report.layers) == {"conv": 64, "ssd": 64}
    assert report.bytes_per_token == 0
    state, conv = 128 * 64 * 128 * 4, (2 * 4096 + 2 * 8 * 128) * 3 * 2
    assert report.bytes_per_request == 64 * (state + conv)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_qwen3_next_80b() -> None:
    """The configuration's defaults are the published model: 48 layers, every fourth with full attention."""
    report = inspected(Qwen3NextConfig())
    assert Counter(layer.kind for layer in report.layers) == {
        "conv": 36,
        "delta_rule": 36,
        "attention": 12,
    }
    assert report.bytes_per_token == 12 * 2 * 2 * 256 * 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kimi_linear_48b() -> None:
    """27 layers, seven of them latent attention without rotary keys; states of 32 heads of 128 x 128."""
    full = (3, 7, 11, 15, 19, 23, 26)
    config = KimiLinearConfig(
        layer_types=["full_attention" if i in full else "linear_attention" for i in range(27)]
    )
    report = inspected(config)
    assert Counter(layer.kind for layer in report.layers) == {
        "conv": 20,
        "kda": 20,
        "latent attention": 7,
    }
    assert report.bytes_per_token == 7 * (512 + 64) * 2
    state, conv = 32 * 128 * 128 * 4, 3 * 32 * 128 * 3 * 2
    assert report.bytes_per_request == 20 * (state + conv)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nemotron_h_8b() -> None:
    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    kinds = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
    report = inspected(NemotronHConfig(layers_block_type=[kinds[letter] for letter in pattern]))
    assert Counter(layer.kind for layer in report.layers) == {"conv": 24, "ssd": 24, "attention": 4}
    assert report.bytes_per_token == 4 * 2 * 8 * 128 * 2
    state, conv = 128 * 64 * 128 * 4, (128 * 64 + 2 * 8 * 128) * 3 * 2
    assert report.bytes_per_request == 24 * (state + conv)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_falcon_h1_34b() -> None:
    """72 layers, in each of them attention beside a scan."""
    config = FalconH1Config(
        vocab_size=261120, hidden_size=5120, intermediate_size=21504, num_hidden_layers=72, num_attention_heads=20,
        num_key_value_heads=4, head_dim=128, mamba_d_ssm=4096, mamba_n_heads=32, mamba_d_head=128, mamba_n_groups=2,
        mamba_d_state=256, mamba_chunk_size=128, max_position_embeddings=262144,
    )  # fmt: skip
    report = inspected(config)
    assert Counter(layer.kind for layer in report.layers) == {
        "conv": 72,
        "ssd": 72,
        "attention": 72,
    }
    assert report.bytes_per_token == 72 * 2 * 4 * 128 * 2
    state, conv = 32 * 128 * 256 * 4, (4096 + 2 * 2 * 256) * 3 * 2
    assert report.bytes_per_request == 72 * (state + conv)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_minimax_text_01() -> None:
    """80 layers, every eighth with full attention; the decays of the others are buffers, computed without weights."""
    config = MiniMaxConfig(
        vocab_size=200064, hidden_size=6144, intermediate_size=9216, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128, num_local_experts=32, num_experts_per_tok=2,
        layer_types=["full_attention" if i % 8 == 7 else "linear_attention" for i in range(80)], dtype=BF16,
    )  # fmt: skip
    report = regraft.inspect(config)
    assert report.expected == report.found
    attention = [layer for layer in report.layers if layer.kind == "attention"]
    assert [layer.path for layer in attention] == [
        f"model.layers.{i}.self_attn" for i in range(7, 80, 8)
    ]
    assert sum(row.num_bytes for layer in attention for row in layer.rows) == 10 * 2 * 8 * 128 * 2
    others = [layer for layer in report.layers if layer not in attention]
    assert [layer.path for layer in others] == [
        f"model.layers.{i}.self_attn" for i in range(80) if i % 8 != 7
    ]
    assert {(layer.kind, layer.served) for layer in others} == {("decayed_linear", "grafted")}
    assert report.bytes_per_token == 10 * 2 * 8 * 128 * 2
    assert report.bytes_per_request == 70 * 64 * 128 * 128 * 4
    assert all("without weights" in layer.notes[0] for layer in others)


def test_rows_that_a_window_bounds() -> None:
    """What a token costs while it is kept, and what a request of any length keeps at most of such rows."""
    report = regraft.inspect(FAMILIES["gemma2"].config())
    sliding = [layer for layer in report.layers if "q - k < 8" in layer.mask]
    assert 0 < len(sliding) < len(report.layers)
    rows = [row for layer in sliding for row in layer.rows]
    assert {str(row.reach) for row in rows} == {"window 8"}
    assert report.bytes_in_reach == {"window 8": 8 * sum(row.num_bytes for row in rows)}
    assert f"within window 8, a request keeps {report.bytes_in_reach['window 8']:,} bytes" in str(
        report
    )
    assert report.to_dict()["layers"][0]["rows"][0]["reach"] == {"window": 8, "chunk": 0}


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`regraft inspect FOLDER` prints a table, `--json` data, `--html` writes a page that loads nothing."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=64,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    page = tmp_path / "report.html"
    assert main(["inspect", str(tmp_path), "--json", "--strict", "--html", str(page)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema_version"] == 1
    assert [layer["path"] for layer in data["layers"]] == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    ]
    text = page.read_text()
    assert "model.layers.1.self_attn" in text
    assert (
        "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "https://" not in text
    )
    report = regraft.inspect(tmp_path / "config.json")
    assert "2 grafted" in str(report)
    assert "regraft::paged_attention" in report.explain("model.layers.1")
    with pytest.raises(KeyError, match="nothing mixes tokens at 'lm_head'"):
        report.explain("lm_head")


def test_what_cannot_be_read_is_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2 and one line: 1 is "would be replayed", or "differs"."""
    broken, other = tmp_path / "broken.json", tmp_path / "other.json"
    broken.write_text("{")
    other.write_text("{}")
    for command, says in (
        (["inspect", str(broken)], "broken.json is no JSON"),
        (["diff", str(broken), str(other)], "Expecting property name"),
        (["diff", str(other), str(other)], "other.json is no configuration of a model"),
    ):
        assert main(command) == 2
        printed = capsys.readouterr()
        assert says in printed.err
        assert printed.err.startswith("regraft: ")
        assert printed.err.count("\n") == 1
        assert printed.out == ""


def test_a_configuration_of_any_file_name(tmp_path: Path) -> None:
    """The file that is named is read, whatever lies beside it; one that is none says so in a line."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 64}
    LlamaConfig(**sizes, num_hidden_layers=1).save_pretrained(tmp_path)
    named = tmp_path / "two_layers.json"
    named.write_text(json.dumps(LlamaConfig(**sizes, num_hidden_layers=2).to_dict()))
    assert len(regraft.inspect(named).layers) == 2
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json is no JSON"):
        regraft.inspect(tmp_path / "broken.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json is no configuration of a model"):
        regraft.inspect(tmp_path / "other.json")
    (tmp_path / "t5.json").write_text(json.dumps({"model_type": "t5", "d_model": 32}))
    with pytest.raises(regraft.RewriteError, match="T5Config is of an encoder-decoder model"):
        regraft.inspect(tmp_path / "t5.json")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--sizes", "0"], "'0' is not a whole number of 1 or more"),
        (["--sizes", "-3"], "'-3' is not a whole number of 1 or more"),
        (["--dtype", "float8"], "--dtype float8 is none of torch's"),
    ],
)
def test_what_check_cannot_be_asked_is_status_2(options, reason, capsys):
    try:
        status = main(["check", "/nowhere", *options])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert reason in capsys.readouterr().err
