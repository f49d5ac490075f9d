"""install and uninstall on a model: as trainers call it, between its training steps."""

from __future__ import annotations

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

import regraft
from tests.families.models import build

SIZES = {"page_size": 4, "cache_tokens": 512, "max_requests": 8, "validate": "off"}
PROMPTS = [[5, 6, 7, 8], [9, 3], [4] * 11]


def alone(model, prompt, count):
    """Greedy tokens of the model itself, without any cache."""
    model.eval()
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(count):
            logits = model(input_ids=tokens, use_cache=False).logits
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return tokens[0, len(prompt) :].tolist()


def train(model):
    """One step, as of a trainer."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    tokens = torch.tensor([PROMPTS[2]])
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_a_trainer_generates_between_its_steps():
    model = build("qwen3_next")
    attention = model.config._attn_implementation
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1)
    with regraft.install(model, **SIZES):
        losses = []
        for _ in range(2):
            outputs = model.generate_batch(PROMPTS, generation_config=config, progress_bar=False)
            assert model.training == bool(losses)  # as the trainer left it
            results = list(outputs.values())
            assert all(isinstance(result, GenerationOutput) for result in results)
            assert [r.generated_tokens for r in results] == [alone(model, p, 6) for p in PROMPTS]
            losses.append(train(model))
        assert losses == sorted(losses, reverse=True)
        with model.continuous_batching_context_manager(generation_config=config) as manager:
            manager.add_requests(PROMPTS, streaming=True)
            ended = [next(r for r in manager if r.is_finished()) for _ in PROMPTS]
        expected = {tuple(alone(model, prompt, 6)) for prompt in PROMPTS}
        assert {tuple(result.generated_tokens) for result in ended} == expected
    assert model.config._attn_implementation == attention
    assert train(model) < losses[-1]
