"""The ways of use in one process, over one model: none changes what another does."""

from __future__ import annotations

import torch

import regraft
from tests.backend.batches import alone, batch, compiled, fresh_dynamo, texts, worst
from tests.families.models import build

SIZES = {"page_size": 4, "cache_tokens": 512, "max_batch_tokens": 64, "validate": "off"}


def test_two_compiled_models_and_an_engine() -> None:
    first, second = build("qwen3"), build("mamba2")
    prompts = [text.tolist() for text in texts("qwen3", (9, 4))]
    calls = [batch("packed", texts(name)) for name in ("qwen3", "mamba2")]
    expected = [alone(model, call.texts) for model, call in zip((first, second), calls)]
    with fresh_dynamo() as reports, torch.no_grad():
        steps = [compiled(model) for model in (first, second)]
        engine = regraft.wrap(first, **SIZES)
        generated = [out.token_ids for out in engine.generate(prompts, max_new_tokens=5)]
        for _ in range(2):
            for step, call, logits in zip(steps, calls, expected):
                found = call.split(step(**call.inputs, use_cache=False).logits)
                assert worst(found, logits) < 1e-4
            again = [out.token_ids for out in engine.generate(prompts, max_new_tokens=5)]
            assert again == generated
    assert [(report.served, report.calls) for report in reports] == [(True, 2), (True, 2)]
    for prompt, ids in zip(prompts, generated):
        own = first.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False)
        assert own[0, len(prompt) :].tolist() == ids
