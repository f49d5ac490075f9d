"""Models with quantised weights: served as the model itself computes, or refused with the reason.

Libraries make such weights in a few ways (quantised.py); each is a model's own code like any other.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import regraft
from regraft.rewriter.backend_report import backend_reports
from regraft.rewriter.capture import capture
from regraft.rewriter.row_wise import mark_row_wise
from tests.families.models import FAMILIES, build
from tests.families.quantised import (
    FEW_ROWS,
    MIXING,
    ROUNDING,
    WAYS,
    Wrapper,
    fetching,
    quantised,
    rounded,
)
from tests.families.served import LOGITS, continue_greedily, forward, worst, wrap

PROMPT = FAMILIES["llama"].prompt(21, 3).tolist()
TEXTS = [FAMILIES["llama"].prompt(length, length).tolist() for length in (5, 17)]

NAMED = {"operator": ("quantised_test.product.default",)}
"""Operators without a rule that are said to keep rows apart."""

every_way = pytest.mark.parametrize("way", WAYS)


def model_of(way: str) -> PreTrainedModel:
    return quantised(build("llama"), WAYS[way])


def compiled_logits(model: PreTrainedModel) -> tuple[Tensor, ...]:
    """Of TEXTS in one packed row, through the backend."""
    compiled = torch.compile(model, backend="regraft", options={"backend": "eager"})
    ids = torch.tensor([[*TEXTS[0], *TEXTS[1]]])
    positions = torch.cat([torch.arange(len(text)) for text in TEXTS])[None]
    with torch.no_grad():
        logits = compiled(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    return logits.split([len(text) for text in TEXTS])


@every_way
def test_is_served_as_the_model_computes(way: str) -> None:
    model = model_of(way)
    kinds = {name: type(parameter) for name, parameter in model.named_parameters()}
    before = forward(model, PROMPT)
    engine = wrap(model, validate="quick", row_wise=NAMED.get(way, ()))
    assert engine.report.found == {"attention": 3}
    assert {layer.served for layer in engine.report.layers} == {"grafted"}
    expected = [forward(model, text) for text in TEXTS]
    for schedule in ("prefill", "decode"):
        assert worst(engine.score(TEXTS, schedule=schedule), expected) <= LOGITS
    (output,) = engine.generate([PROMPT], max_new_tokens=4)
    assert output.token_ids == continue_greedily(model, PROMPT, 4)
    assert {name: type(parameter) for name, parameter in model.named_parameters()} == kinds
    assert torch.equal(forward(model, PROMPT), before)


@every_way
def test_inspect_says_the_same(way: str) -> None:
    report = regraft.inspect(model_of(way), row_wise=NAMED.get(way, ()))
    assert report.found == {"attention": 3}
    measured = [note for note in report.notes if "measured" in note]
    assert bool(measured) == (way == "operator")


@pytest.mark.parametrize("way", [way for way in WAYS if way != "operator"])
def test_batch_invariant_where_products_are_seen(way: str) -> None:
    engine = wrap(model_of(way), batch_invariant=True)
    alone = [engine.score([text], schedule="decode")[0] for text in TEXTS]
    assert all(torch.equal(a, b) for a, b in zip(alone, engine.score(TEXTS)))


def test_batch_invariant_refuses_a_product_by_name() -> None:
    with pytest.raises(regraft.RewriteError, match="not known to be invariant") as refusal:
        wrap(model_of("operator"), batch_invariant=True, row_wise=NAMED["operator"])
    assert refusal.value.operation == "quantised_test.product.default"
    assert refusal.value.path == "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("wrapper", "this mixing is not causal"),
        ("dispatched", "this mixing is not causal"),
        ("operator", r"no rule for quantised_test\.by_tensor\.default, and it mixes rows"),
        ("outliers", r"no rule says what quantised_test\.outliers\.default does to rows"),
    ],
)
def test_weights_that_tie_rows_together_are_refused(way: str, reason: str) -> None:
    model = quantised(build("llama"), MIXING[way])
    assert forward(model, PROMPT).isfinite().all()
    with pytest.raises(regraft.RewriteError, match=reason) as refusal:
        wrap(model)
    assert refusal.value.path.startswith("model.layers.0.self_attn.")
    assert refusal.value.fix


def test_an_operator_that_nobody_speaks_for_is_refused() -> None:
    """Whatever a measurement says: it is no proof."""
    with pytest.raises(regraft.RewriteError, match="no rule says what quantised_test") as refusal:
        wrap(model_of("operator"))
    assert "say row_wise=('quantised_test.product.default',)" in str(refusal.value)
    assert "row_wise" in refusal.value.fix


def test_a_measurement_has_the_last_word() -> None:
    model = quantised(build("llama"), MIXING["operator"])
    with pytest.raises(regraft.RewriteError, match="mixes rows"):
        wrap(model, row_wise=("quantised_test.by_tensor.default",))


def test_a_name_of_nothing_is_an_error() -> None:
    with pytest.raises(regraft.RewriteError, match=r"row_wise names 'a\.b', and the model has no"):
        wrap(build("llama"), row_wise=("a.b",))
    with pytest.raises(ValueError, match=r"row_wise='a\.b' is no tuple"):
        wrap(build("llama"), row_wise="a.b")


@pytest.mark.parametrize(
    ("way", "operator", "reason"),
    [
        ("operator", "quantised_test.by_tensor.default", "mixes rows (cutting rows off changes"),
        ("outliers", "quantised_test.outliers.default", "have not one row each"),
    ],
)
def test_an_operator_that_mixes_is_named(way: str, operator: str, reason: str) -> None:
    model = quantised(build("llama"), MIXING[way], only="mlp.down_proj")
    reasons = mark_row_wise(capture(model))
    assert reason in reasons[operator]
    assert "model.layers.0.mlp.down_proj" in reasons[operator]


def test_an_operator_that_fails_on_short_texts_is_refused_by_name() -> None:
    model = quantised(build("llama"), FEW_ROWS["17 and more"], only="mlp.down_proj")
    name = "quantised_test.many_rows.default"
    with pytest.raises(regraft.RewriteError, match="needs to be at least 17, but got") as refusal:
        wrap(model, row_wise=(name,))
    assert refusal.value.operation == name
    assert refusal.value.path == "model.layers.0.mlp.down_proj"


def test_an_operator_that_fails_on_one_row_keeps_none_apart() -> None:
    model = quantised(build("llama"), FEW_ROWS["2 and more"], only="mlp.down_proj")
    name = "quantised_test.several_rows.default"
    (reason,) = mark_row_wise(capture(model), (name,)).values()
    assert reason.startswith("it fails on cutting rows off: self.size(0) needs to be at least 2")
    with pytest.raises(regraft.RewriteError, match="no pass takes this mixing") as refusal:
        wrap(model, row_wise=(name,), fallback="refuse")
    assert refusal.value.operation == name


def test_rows_of_float8_are_measured_too() -> None:
    model = quantised(build("llama"), ROUNDING["float8 rows"])
    engine = wrap(model, validate="quick", row_wise=("quantised_test.float8.default",))
    assert engine.report.validation.passed
    assert {layer.served for layer in engine.report.layers} == {"grafted"}


def test_weights_that_are_fetched_when_read_are_refused() -> None:
    model = quantised(build("llama"), fetching, only="mlp.down_proj")
    before = forward(model, PROMPT)
    with pytest.raises(regraft.RewriteError, match="kept by a Fetching") as refusal:
        wrap(model)
    assert refusal.value.path == "model.layers.0.mlp.down_proj"
    assert torch.equal(forward(model, PROMPT), before)


def test_rows_that_are_rounded_are_judged_as_in_half_precision() -> None:
    model = quantised(build("llama"), ROUNDING["by row"])
    engine = wrap(model, validate="quick")
    assert any("half precision" in note for note in engine.report.notes)
    assert engine.report.validation.passed
    plain = wrap(build("llama"), validate="quick")
    assert not any("half precision" in note for note in plain.report.notes)


def test_a_change_of_a_part_is_seen_at_once() -> None:
    model = model_of("wrapper")
    engine = wrap(model)
    before = engine.score([PROMPT])
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.scale.mul_(1.5)
    assert worst(engine.score([PROMPT]), before) > 0.01
    assert worst(engine.score([PROMPT]), [forward(model, PROMPT)]) <= LOGITS


def test_another_wrapper_in_its_place_is_read_anew() -> None:
    model = model_of("wrapper")
    engine = wrap(model)
    linear = model.model.layers[1].mlp.up_proj
    other = torch.randn(linear.weight.shape, generator=torch.Generator().manual_seed(1))
    linear.weight = nn.Parameter(Wrapper(*rounded(other)), requires_grad=False)
    assert worst(engine.score([PROMPT]), [forward(model, PROMPT)]) <= LOGITS


def test_a_plain_weight_in_its_place_is_refused() -> None:
    model = model_of("wrapper")
    engine = wrap(model)
    linear = model.model.layers[1].mlp.up_proj
    linear.weight = nn.Parameter(torch.zeros(linear.weight.shape))
    with pytest.raises(regraft.RewriteError, match=r"weight\.q was a part of a weight"):
        engine.score([PROMPT])


@pytest.mark.parametrize("way", ["wrapper", "dispatched", "buffers", "composite"])
def test_the_backend_grafts_it(way: str) -> None:
    model = model_of(way)
    assert worst(compiled_logits(model), [forward(model, text) for text in TEXTS]) <= LOGITS
    assert backend_reports()[-1].served, str(backend_reports()[-1])


@pytest.mark.parametrize("way", ["wrapper", "dispatched"])
def test_with_one_scale_for_all_rows_the_backend_scales_each_text_by_itself(way: str) -> None:
    model = quantised(build("llama"), MIXING[way])
    assert worst(compiled_logits(model), [forward(model, text) for text in TEXTS]) <= LOGITS
    served = {layer.served for layer in backend_reports()[-1].layers}
    assert served == {"grafted", "replayed"}


def test_the_backend_leaves_a_trained_wrapper_alone() -> None:
    model = model_of("wrapper")
    for module in model.modules():
        if isinstance(module, nn.Linear) and isinstance(module.weight, Wrapper):
            module.weight.requires_grad_(True)
    compiled_logits(model)
    report = backend_reports()[-1]
    assert not report.served
    assert "made of several tensors" in str(report)
