"""Without a single pass a model is served by replay alone, and says the same."""

from __future__ import annotations

import pytest
import torch

from regraft import face
from tests.families.models import FAMILIES, build
from tests.families.served import LOGITS, forward, worst, wrap

LENGTHS = (13, 5, 1, 22)


# masks and softcap, a recurrent hybrid with experts, SSD beside attention, latent attention
@pytest.mark.parametrize("name", ["gemma2", "qwen3_next", "bamba", "deepseek_v3"])
def test_replay_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    texts = [FAMILIES[name].prompt(n, seed=n).tolist() for n in LENGTHS]
    expected = [forward(model, tokens) for tokens in texts]
    grafted = wrap(model)
    monkeypatch.setattr(face, "pipeline", tuple)
    replayed = wrap(model)
    assert {layer.served for layer in replayed.report.layers} == {"replayed"}
    assert {layer.served for layer in grafted.report.layers} == {"grafted"}
    assert not replayed.model.states
    for schedule in ("prefill", 7, "decode"):
        logits = replayed.score(texts, schedule=schedule)
        assert worst(logits, expected) <= LOGITS
        assert worst(logits, grafted.score(texts, schedule=schedule)) <= LOGITS
    prompts = texts[1:]
    assert [output.token_ids for output in replayed.generate(prompts, max_new_tokens=4)] == [
        output.token_ids for output in grafted.generate(prompts, max_new_tokens=4)
    ]
    assert all(torch.isfinite(one).all() for one in logits)
