"""Logits through the backend: plain, padded and packed, for every kind of mixing."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from tests.backend.batches import (
    LOGITS,
    alone,
    batch,
    compiled,
    fresh_dynamo,
    slow_but,
    texts,
    worst,
)
from tests.families.models import build

KINDS = {
    "qwen3": "attention",
    "gemma2": "attention with windows and softcaps",
    "bloom": "attention with ALiBi, no positions",
    "gpt_oss": "attention with sinks, experts",
    "deepseek_v3": "latent attention, experts",
    "deepseek_v32": "latent attention to keys that an indexer selects",
    "glm5_next": "latent attention to pools that an indexer selects, KDA",
    "qwen3_next": "gated delta rule, attention, experts",
    "kimi_linear": "KDA, latent attention",
    "mamba2": "SSD, no positions",
    "jamba": "selective scan, attention, experts",
    "lfm2": "short convolutions, attention",
}
"""One family of each kind."""

# Absolute positions count the padding of a left-padded batch, and llama4 scales by them: there the model's own padded
# call is the reference, not the text alone.
COUNTS_PADDING = ("gpt2", "llama4", "gptj", "codegen")

# Its mask is read on the host in every layer of a padded batch. Of a packed row all is one graph.
ONLY_PACKED = ("glm5_next",)


APART = ("qwen3", "gemma2", "deepseek_v3", "deepseek_v32")
"""Families whose own forward keeps the texts of a packed row apart; that of all others mixes them."""

QUICK = ("qwen3", "gpt_oss", "qwen3_next")
"""In every form; of the other kinds, where minutes count, packed alone."""


def check(name: str, *forms: str) -> PreTrainedModel:
    """All forms through one compilation. Returns the model."""
    model = build(name)
    calls = [batch(form, texts(name)) for form in forms]
    with fresh_dynamo() as reports, torch.no_grad():
        step = compiled(model)
        results = [step(**call.inputs, use_cache=False).logits for call in calls]
    for form, call, logits in zip(forms, calls, results):
        expected = alone(model, call.texts)
        if form == "padded left" and name in COUNTS_PADDING:
            with torch.no_grad():
                expected = call.split(model(**call.inputs, use_cache=False).logits)
        assert worst(call.split(logits), expected) <= LOGITS, form
    (report,) = [report for report in reports if report.served]
    assert {report.reason for report in reports if not report.served} == set()
    assert (report.calls, report.fallbacks) == (len(forms), 0)
    assert {layer.served for layer in report.layers} == {"grafted"}
    return model


@pytest.mark.parametrize("name", slow_but(KINDS, KINDS.keys() - {"glm5_next"}))
def test_packed(name: str) -> None:
    """Each text as by itself, nothing left to the model's own mixing."""
    model, call = check(name, "packed"), batch("packed", texts(name))
    with torch.no_grad():
        own = call.split(model(**call.inputs, use_cache=False).logits)
    assert (worst(own, alone(model, call.texts)) > 100 * LOGITS) is (name not in APART)


@pytest.mark.parametrize("name", slow_but([n for n in KINDS if n not in ONLY_PACKED], QUICK))
def test_padded(name: str) -> None:
    check(name, "padded right", "padded left")


@pytest.mark.parametrize("name", QUICK)
def test_plain(name: str) -> None:
    check(name, "plain")
