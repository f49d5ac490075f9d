"""`report.explain`: the nearest pattern, how far it got, where it failed, and what would make it match."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, LlamaConfig, LlamaForCausalLM

import regraft

PATH = "model.layers.1.self_attn"


class Attention(nn.Module):
    """One head, spelled out; `allowed` is what a near miss changes."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def allowed(self, index: Tensor) -> Tensor:
        return index[None, :] <= index[:, None]

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        q, k, v = (part(hidden_states) for part in (self.q, self.k, self.v))
        scores = q @ k.transpose(1, 2)
        mask = self.allowed(torch.arange(hidden_states.shape[1], device=hidden_states.device))
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1) @ v, None


class Strided(Attention):
    def allowed(self, index: Tensor) -> Tensor:
        return super().allowed(index) & (index[None, :] % 3 != 1)


class Summed(Attention):
    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        return hidden_states.cumsum(1), None


def report(attention: type[Attention]) -> regraft.RewriteReport:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.model.layers[1].self_attn = attention(config)
    return regraft.inspect(model)


def test_what_is_grafted_needs_no_reason() -> None:
    text = report(Attention).explain(PATH)
    assert text.startswith(f"{PATH}: attention | grafted: regraft::paged_attention")
    assert "mixes at test_explain.py:" in text
    assert "of the way" not in text


def test_a_near_miss() -> None:
    """The pass, the part of the way it got, the reason with its formula, the source line, and what it would take."""
    lines = report(Strided).explain(PATH).splitlines()
    assert lines[0].startswith(f"{PATH}: attention | replayed | row ")
    (at,) = [i for i, line in enumerate(lines) if line.startswith("  pass attention got 50%")]
    assert "of the way: the mask is no relation of positions: Ne(" in lines[at]
    assert "test_explain.py:" in lines[at + 1]
    assert lines[at + 2] == (
        "    it would match if whether a key is seen followed from its position and the query's alone"
    )


def test_nothing_came_near() -> None:
    text = report(Summed).explain(PATH)
    assert "no pass came near: experts, length_switch, " in text
    assert "found nothing of theirs here" in text
    assert "mixes at test_explain.py:" in text


def test_a_module_that_is_kept_whole() -> None:
    """Why it is, and not what a pass says that tried to look inside: frequencies that change with the longest text."""
    llama = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=64,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0},
    )  # fmt: skip
    (line, *_) = regraft.inspect(llama).explain("model.rotary_emb").splitlines()
    assert "because no pass knows this module, which is kept whole: it branches on numbers " in line
    assert re.search(r"\(modeling_rope_utils\.py:\d+: if seq_len > max_seq_len_cached:", line)


def test_a_whole_part_of_the_model() -> None:
    """Every layer below a path."""
    text = report(Strided).explain("model.layers")
    assert text.count("\n\n") == 1
    assert "model.layers.0.self_attn" in text


def test_layers_that_the_table_shows_as_one() -> None:
    """Each path as it is printed: a run of equal layers, and layers that alternate with others."""
    llama = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, vocab_size=64,
    )  # fmt: skip
    found = regraft.inspect(llama)
    path = "model.layers.0..3.self_attn"
    assert f"  {path}  attention | grafted" in str(found)
    text = found.explain(path)
    assert text.startswith("model.layers.0,1,2,3.self_attn: attention | grafted")
    assert text == found.explain("model.layers"), "what is the same of all is said once"
    gemma = Gemma2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=64, sliding_window=16,
    )  # fmt: skip
    found = regraft.inspect(gemma)
    lines = [line.strip().partition("  ")[0] for line in str(found).splitlines()]
    printed = [line for line in lines if line.startswith("model.layers.")]
    assert printed == [
        "model.layers.0,2,4,6,...,16 (9x).self_attn",
        "model.layers.1,3,5,7,...,17 (9x).self_attn",
    ]
    for path, mask in zip(printed, ("k <= q & q - k < 16", "k <= q")):
        assert found.explain(f" {path} ").startswith(f"{path}: attention | grafted")
        assert f"| {mask}; softcap" in found.explain(path)


def test_a_path_with_any_number_and_the_whole_model() -> None:
    """As a line of what was declined has it."""
    found = report(Strided)
    line = next(line for line in str(found).splitlines() if " declined " in line)
    path = line.split(" at ")[1].split(" (")[0]
    assert "#" in path
    assert found.explain(path) == found.explain("") == found.explain("model")
    with pytest.raises(TypeError, match=r"path=0: give the path of a module"):
        found.explain(0)  # type: ignore[arg-type]


def test_a_place_where_nothing_mixes() -> None:
    """The nearest places where something does."""
    with pytest.raises(
        KeyError,
        match=r"nothing mixes tokens at 'model\.layers\.1\.mlp': it does at .*model\.layers\.1\.self_attn",
    ):
        report(Strided).explain("model.layers.1.mlp")
    with pytest.raises(
        KeyError, match=r"at model\.layers\.0\.self_attn, model\.layers\.1\.self_attn \("
    ):
        report(Attention).explain("x")
