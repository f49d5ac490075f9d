"""Compressed entries of the published sizes, and what becomes of them when a request gives up its pages."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

import regraft
from tests.families.models import FAMILIES, build
from tests.families.served import LOGITS, SIZES, continue_greedily, forward, worst, wrap

RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""As published. A page of 16 tokens is longer than a window of one, and a part of a window of the other."""


@pytest.mark.slow
def test_entries_of_many_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts around one window of 128 tokens and two; none is padded to the length that was traced."""
    family = FAMILIES["deepseek_v4"]
    kwargs = {**copy.deepcopy(family.kwargs), "compress_rates": RATES, "sliding_window": 20}
    monkeypatch.setitem(FAMILIES, "published", replace(family, name="published", kwargs=kwargs))
    model = build("published")
    engine = wrap(model, page_size=16)
    assert {layer.served for layer in engine.report.layers} == {"grafted"}
    assert engine.model.min_tokens == 2
    texts = [family.prompt(n, seed=n).tolist() for n in (260, 127, 128, 129, 9)]
    expected = [forward(model, text) for text in texts]
    for schedule in ("prefill", 50, [[126], [126], [127], [128], [1]]):
        assert worst(engine.score(texts, schedule=schedule), expected) <= LOGITS
    prompt = texts[2][:126]
    (output,) = engine.generate([prompt], max_new_tokens=4)
    assert output.token_ids == continue_greedily(model, prompt, 4)


@pytest.mark.slow
def test_preempted_requests() -> None:
    """What is computed again is what was there before."""
    model, family = build("deepseek_v4"), FAMILIES["deepseek_v4"]
    prompts = [family.prompt(9 + i, seed=i).tolist() for i in range(8)]
    large = wrap(model)
    config = regraft.EngineConfig(**{**SIZES, "cache_tokens": 64})
    small = regraft.Engine(large.model, config)
    outputs = small.generate(prompts, max_new_tokens=12)
    assert small.stats.num_preemptions > 0
    assert large.stats.num_preemptions == 0
    assert [o.token_ids for o in outputs] == [
        o.token_ids for o in large.generate(prompts, max_new_tokens=12)
    ]
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = forward(model, [*prompt, *output.token_ids])
        assert output.token_ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
