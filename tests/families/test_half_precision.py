"""In bfloat16 a served model is as near to the float32 model as the plain bfloat16 model is."""

from __future__ import annotations

import pytest
import torch

import regraft
from tests.families.models import FAMILIES, build
from tests.families.served import forward, wrap

LENGTHS = (64, 48, 37, 29, 17, 5)
WORSE = 1.1
"""How much further off it may be (ratio of mean KL)."""


# SSD beside attention in every layer, gated delta rule, gated short convolution: no experts, whose choice
# between two that are near at hand is a coin toss in half precision
@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_5", "lfm2"])
def test_no_further_from_float32_than_the_plain_model(name: str) -> None:
    model = build(name, torch.bfloat16)
    exact = build(name)
    exact.load_state_dict(model.state_dict())  # the same weights: only the arithmetic differs
    texts = [FAMILIES[name].prompt(n, seed=n).tolist() for n in LENGTHS]
    expected = [forward(exact, tokens) for tokens in texts]
    plain = regraft.compare(expected, [forward(model, tokens) for tokens in texts], texts)
    engine = wrap(model)
    for schedule in ("prefill", 7):
        served = regraft.compare(expected, engine.score(texts, schedule=schedule), texts)
        assert 0 < served.mean_kl <= WORSE * plain.mean_kl, (served, plain)
