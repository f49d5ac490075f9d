"""With `batch_invariant` a forward pass under the backend has the bits of an engine's rollout, in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regraft
from tests.backend.batches import batch, compiled, fresh_dynamo, slow_but, texts
from tests.backend.toys import ToyLM
from tests.families.models import build
from tests.families.served import wrap

OPTIONS = {"batch_invariant": True, "backend": "eager"}


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of each token after the first."""
    return logits[:-1].float().log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


KINDS = ("llama", "mixtral", "qwen3_next", "mamba2", "mamba", "lfm2")


@pytest.mark.parametrize("name", slow_but(KINDS, ("llama", "qwen3_next")))
def test_a_forward_pass_has_the_bits_of_the_rollout(name: str) -> None:
    """Tokens with their log-probabilities from the engine; the same from a packed and a padded batch.

    Of a text that is padded on its left, a model without position_ids has other positions, which round otherwise.
    """
    model = build(name)
    engine = wrap(model, batch_invariant=True)
    prompts = [prompt.tolist() for prompt in texts(name, (5, 11, 2))]
    outputs = engine.generate(prompts, max_new_tokens=9, logprobs=True)
    whole = [torch.tensor(p + output.token_ids) for p, output in zip(prompts, outputs)]
    for form in ("packed", "padded right"):
        called = batch(form, whole)
        with fresh_dynamo() as reports:
            logits = compiled(model, **OPTIONS)(**called.inputs, use_cache=False).logits
            scored = called.split(logits.detach())
        assert [report.served for report in reports] == [True]
        for rows, tokens, prompt, output in zip(scored, whole, prompts, outputs):
            got = logprobs(rows, tokens)[len(prompt) - 1 :]
            assert got.tolist() == output.logprobs
        loss = -sum(
            logprobs(rows, tokens).sum() for rows, tokens in zip(called.split(logits), whole)
        )
        loss.backward()
        check_gradients(model, whole)


def check_gradients(model: torch.nn.Module, whole: list[Tensor]) -> None:
    """They are the model's own, up to rounding."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for tokens in whole:
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        (-logprobs(logits, tokens).sum()).backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            largest = float(p.grad.abs().max())
            assert float((found[name] - p.grad).abs().max()) <= 1e-4 * max(largest, 1.0), name
    model.zero_grad()


IDS = torch.arange(6)[None]


def test_compilers_that_fuse_are_refused() -> None:
    options = {"batch_invariant": True, "backend": "inductor"}
    with fresh_dynamo(), pytest.raises(ValueError, match="fuses operations"):
        torch.compile(ToyLM(), backend="regraft", options=options)(input_ids=IDS)


class Odd(ToyLM):
    """An operation that is not known to be invariant."""

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        return x + mixed.atan()


@torch.no_grad()
def test_what_is_not_known_is_refused() -> None:
    with fresh_dynamo(), pytest.raises(regraft.RewriteError, match=r"aten\.atan\.default"):
        torch.compile(Odd(), backend="regraft", options={"batch_invariant": True})(input_ids=IDS)


@torch.no_grad()
def test_a_batch_that_cannot_be_packed_is_refused() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 1, 1]])
    model = torch.compile(ToyLM(), backend="regraft", options={"batch_invariant": True})
    with fresh_dynamo(), pytest.raises(regraft.RewriteError, match="cannot be packed"):
        model(input_ids=IDS, attention_mask=mask)
