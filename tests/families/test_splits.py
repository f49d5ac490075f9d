"""However a text is cut and whoever runs beside it, a recurrent model says the same.

One small model of each kind of recurrent state; what is right is the plain model's forward without a cache.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import regraft
from tests.families.models import FAMILIES, build
from tests.families.served import LOGITS, continue_greedily, forward, run_to_end, worst, wrap

KERNEL = 4
"""Width of the convolutions of all these families but lfm2's 3."""
LENGTHS = (1, 2, 3, KERNEL, KERNEL + 1, 15, 16, 17, 63, 64, 65)
"""Around the width of a convolution, a chunk of the model's own kernels (16) and one of the engine's (64)."""

# gated delta rule, KDA, lightning attention, SSD, selective scan, gated short convolution
KINDS = ("qwen3_next", "kimi_linear", "minimax", "mamba2", "mamba", "lfm2")
every_kind = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(f"splits_{name}")) for name in KINDS]
)


@functools.cache
def served(name: str) -> tuple[PreTrainedModel, regraft.Engine]:
    """Embedding and head are two tensors: what is put into one token's embedding is not in its logit."""
    model = build(name)
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    return model, wrap(model)


def text(name: str, length: int, seed: int = 0) -> list[int]:
    return FAMILIES[name].prompt(length, seed).tolist()


@every_kind
def test_prompts_of_critical_lengths(name: str) -> None:
    """All in one row, each alone, and all token by token."""
    model, engine = served(name)
    texts = [text(name, length, seed=length) for length in LENGTHS]
    expected = [forward(model, tokens) for tokens in texts]
    assert worst(engine.score(texts), expected) <= LOGITS
    assert worst([engine.score([tokens])[0] for tokens in texts], expected) <= LOGITS
    assert worst(engine.score(texts, schedule="decode"), expected) <= LOGITS


@every_kind
def test_every_cut_of_a_text(name: str) -> None:
    """Every one of a 12-token text, and pieces shorter than the convolution's memory in a row."""
    model, engine = served(name)
    tokens = text(name, 12)
    expected = forward(model, tokens)
    cuts = [[at] for at in range(1, 12)] + [[1, 2], [1, 3], [2, 3, 4], [1, 2, 3, 11], [10, 11]]
    scored = engine.score([tokens] * len(cuts), schedule=cuts)
    assert worst(scored, [expected] * len(cuts)) <= LOGITS


@every_kind
def test_a_prompt_of_one_token_is_a_prompt(name: str) -> None:
    """It comes when others decode, into a slot that another request has left, and looks like one of them."""
    model, engine = served(name)
    engine.generate([text(name, 9, seed=9)] * 8, max_new_tokens=2)
    prompts = {engine.add_request(text(name, n, seed=n), max_new_tokens=5): n for n in (6, 7)}
    engine.step()
    engine.step()
    prompts |= {engine.add_request(text(name, n, seed=n), max_new_tokens=5): n for n in (1, 2)}
    for request, output in run_to_end(engine).items():
        length = prompts[request]
        assert output.token_ids == continue_greedily(model, text(name, length, seed=length), 5)


def crowd(engine: regraft.Engine, prompts: list[list[int]]) -> tuple[list[str], list[Tensor]]:
    """How each request ended, and its tokens with their log-probabilities. The second one is short."""
    outputs = engine.generate(prompts, max_new_tokens=[4, 1, 4, 4], logprobs=True)
    return [output.finish_reason for output in outputs], [
        torch.tensor([output.token_ids, output.logprobs], dtype=torch.float64) for output in outputs
    ]


@every_kind
def test_a_state_that_overflows_is_nobody_elses_business(name: str) -> None:
    """One token's embedding is infinite: who says it ends with an error, and nobody else notices, to the bit."""
    model, engine = served(name)
    bad, harmless = 50, 51
    prompts = [text(name, length, seed=length) for length in (11, 9, 5, 1)]
    prompts = [[harmless if token == bad else token for token in prompt] for prompt in prompts]
    reasons, expected = crowd(engine, prompts)
    assert reasons == ["length"] * 4
    embedding = model.get_input_embeddings().weight
    kept = embedding[bad].detach().clone()
    try:
        with torch.no_grad():
            embedding[bad] = float("inf")
        prompts[1][4] = bad
        for _ in range(2):  # the second time in slots and pages that the first has left full of NaN
            reasons, got = crowd(engine, prompts)
            assert reasons == ["length", "error", "length", "length"]
            for i in (0, 2, 3):
                assert torch.equal(got[i], expected[i])
        del prompts[1][4:]
        texts = [*prompts, *prompts]
        assert worst(engine.score(texts), [forward(model, tokens) for tokens in texts]) <= LOGITS
    finally:
        with torch.no_grad():
            embedding[bad] = kept
