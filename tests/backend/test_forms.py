"""Logits through the backend: plain, padded and packed, for every kind of mixing."""

from __future__ import annotations

import pytest
import torch

from tests.backend.batches import FORMS, LOGITS, alone, batch, compiled, fresh_dynamo, texts, worst
from tests.families.models import build

KINDS = {
    "qwen3": "attention",
    "gemma2": "attention with windows and softcaps",
    "bloom": "attention with ALiBi, no positions",
    "gpt_oss": "attention with sinks, experts",
    "deepseek_v3": "latent attention, experts",
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


def check(name: str, form: str) -> None:
    model = build(name)
    call = batch(form, texts(name))
    with fresh_dynamo() as reports, torch.no_grad():
        logits = compiled(model)(**call.inputs, use_cache=False).logits
    expected = alone(model, call.texts)
    if form == "padded left" and name in COUNTS_PADDING:
        with torch.no_grad():
            expected = call.split(model(**call.inputs, use_cache=False).logits)
    assert worst(call.split(logits), expected) <= LOGITS
    (report,) = reports
    assert report.served
    assert (report.calls, report.fallbacks) == (1, 0)
    assert {layer.served for layer in report.layers} == {"grafted"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", KINDS)
def test_kind(name: str, form: str) -> None:
    """Each text as by itself, nothing left to the model's own mixing."""
    check(name, form)


@pytest.mark.parametrize("name", ["bloom", "mpt", "opt", "falcon", "gpt_oss", "afmoe", "llama4"])
@pytest.mark.slow
def test_where_the_model_leaks(name: str) -> None:
    """The model's own forward mixes the texts of a packed row; the backend's does not."""
    model, call = build(name), batch("packed", texts(name))
    own = dict(call.inputs)
    with torch.no_grad():
        expected = alone(model, call.texts)
        leaking = call.split(model(**own, use_cache=False).logits)
    assert worst(leaking, expected) > 100 * LOGITS
    with fresh_dynamo() as reports, torch.no_grad():
        logits = compiled(model)(**call.inputs, use_cache=False).logits
    assert worst(call.split(logits), expected) <= LOGITS
    assert [report.served for report in reports] == [True]
