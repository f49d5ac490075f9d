"""A loss through the backend has the gradients of the model itself, one text at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.backend.batches import batch, compiled, fresh_dynamo, slow_but, texts
from tests.backend.toys import (
    ToyLM,
    WithCheckpoint,
    WithDetach,
    WithOwnGradient,
    WithPair,
    WithRest,
    WithSpare,
    WithSum,
    WithUnreadPair,
)
from tests.families.models import build

RELATIVE = 1e-3
"""Of the largest gradient of a weight."""

KINDS = {
    "qwen3": "attention",
    "gemma2": "attention with windows and softcaps",
    "bloom": "attention with ALiBi, a function with a backward of its own",
    "gpt_oss": "attention with sinks, experts",
    "deepseek_v3": "latent attention, a router's choice without a gradient",
    "deepseek_v32": "latent attention to keys that an indexer selects",
    "qwen3_next": "gated delta rule, convolution, experts",
    "kimi_linear": "KDA",
    "mamba2": "SSD",
    "mamba": "selective scan",
    "lfm2": "short convolutions",
}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def expected_gradients(model: PreTrainedModel, sequences: list[Tensor]) -> dict[str, Tensor]:
    """Of the mean loss over all predicted tokens."""
    predicted = sum(len(s) - 1 for s in sequences)
    for sequence in sequences:
        if len(sequence) > 1:
            logits = model(input_ids=sequence[None], use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, sequence[1:], reduction="sum")
            (loss / predicted).backward()
    return gradients(model)


def labels(inputs: dict[str, Tensor], rows: list[tuple[int, slice]]) -> Tensor:
    """Every token but the first of each text."""
    wanted = torch.full_like(inputs["input_ids"], -100)
    for row, tokens in rows:
        rest = slice((tokens.start or 0) + 1, tokens.stop)
        wanted[row, rest] = inputs["input_ids"][row, rest]
    return wanted


def assert_equal_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    zero = {name for name, gradient in expected.items() if not gradient.any()}
    assert actual.keys() | zero == expected.keys() | zero
    off = {}
    for name in actual.keys() & expected.keys():
        error = (actual[name] - expected[name]).abs().max() / expected[name].abs().max().clamp_min(
            1e-12
        )
        if not error <= RELATIVE:
            off[name] = float(error)
    assert off == {}


@pytest.mark.parametrize("name", slow_but(KINDS, ("bloom", "qwen3_next")))
def test_packed_step(name: str) -> None:
    """The gradients of a packed row are those of its texts."""
    model, call = build(name), batch("packed", texts(name))
    expected = expected_gradients(model, call.texts)
    with fresh_dynamo() as reports:
        step = compiled(model)
        step(**call.inputs, labels=labels(call.inputs, call.rows), use_cache=False).loss.backward()
    assert [report.served for report in reports] == [True]
    assert_equal_gradients(gradients(model), expected)


@pytest.mark.parametrize(
    "kind", [ToyLM, WithCheckpoint, WithDetach, WithOwnGradient, WithRest, WithSpare, WithSum]
)
def test_where_a_model_says_what_has_a_gradient(kind: type[ToyLM]) -> None:
    """Stopped and made-up gradients are the model's own; what runs without an operator has one too."""
    model, lengths = kind(), (7, 1, 4)
    call = batch("packed", [torch.randint(32, (n,)) for n in lengths])
    for text in call.texts:
        model(input_ids=text[None]).logits.square().sum().backward()
    expected = gradients(model)
    with fresh_dynamo() as reports:
        compiled(model)(**call.inputs).logits.square().sum().backward()
    assert [report.served for report in reports] == [True]
    assert_equal_gradients(gradients(model), expected)


@pytest.mark.parametrize("kind", [WithPair, WithUnreadPair])
def test_a_function_that_cannot_be_had_apart_is_left_alone(kind: type[ToyLM]) -> None:
    model, ids = kind(), torch.randint(32, (2, 5))
    model(input_ids=ids).logits.square().sum().backward()
    expected = gradients(model)
    with fresh_dynamo() as reports:
        compiled(model)(input_ids=ids).logits.square().sum().backward()
    assert "an autograd.Function with several results" in reports[0].reason
    assert_equal_gradients(gradients(model), expected)


@pytest.mark.slow
def test_packed_step_with_checkpoints() -> None:
    """Layers computed twice to save memory: graphs of their own, with experts and functions kept whole in them."""
    model, call = build("qwen3_next"), batch("packed", texts("qwen3_next"))
    expected = expected_gradients(model, call.texts)
    model.train().activation_checkpointing_enable()
    with fresh_dynamo() as reports:
        step = compiled(model)
        step(**call.inputs, labels=labels(call.inputs, call.rows), use_cache=False).loss.backward()
    assert [report.served for report in reports] == [True]
    assert_equal_gradients(gradients(model), expected)


@pytest.mark.parametrize("form", ["plain", "padded left"])
def test_other_forms(form: str) -> None:
    model, call = build("qwen3_next"), batch(form, texts("qwen3_next"))
    expected = expected_gradients(model, call.texts)
    with fresh_dynamo():
        step = compiled(model)
        step(**call.inputs, labels=labels(call.inputs, call.rows), use_cache=False).loss.backward()
    assert_equal_gradients(gradients(model), expected)


def test_through_aot_autograd() -> None:
    """The operators' gradients survive being traced, and recomputed by a partitioned backward graph."""
    model, call = build("qwen3_next"), batch("packed", texts("qwen3_next"))
    expected = expected_gradients(model, call.texts)
    with fresh_dynamo():
        step = compiled(model, backend="aot_eager")
        step(**call.inputs, labels=labels(call.inputs, call.rows), use_cache=False).loss.backward()
    assert_equal_gradients(gradients(model), expected)


def test_frozen_weights_get_none() -> None:
    model, call = build("qwen3"), batch("packed", texts("qwen3"))
    frozen = [p for n, p in model.named_parameters() if ".mlp." in n]
    for parameter in frozen:
        parameter.requires_grad_(False)
    expected = expected_gradients(model, call.texts)
    with fresh_dynamo():
        step = compiled(model)
        step(**call.inputs, labels=labels(call.inputs, call.rows), use_cache=False).loss.backward()
    assert_equal_gradients(gradients(model), expected)
    assert all(p.grad is None for p in frozen)
