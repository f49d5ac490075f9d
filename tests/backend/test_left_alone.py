"""Graphs that the backend leaves alone: right as the model is right, counted, and said why."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regraft.rewriter import grafted
from regraft.rewriter.backend_report import GraphReport
from regraft.rewriter.errors import RewriteError
from tests.backend.batches import LOGITS, batch, compiled, fresh_dynamo, slow_but, texts, worst
from tests.backend.toys import ToyLM, WithBreak, WithLoop, WithMean, WithSum, WithTable
from tests.families.models import FAMILIES, build
from tests.tolerance import assert_close

IDS = torch.randint(0, 32, (3, 9), generator=torch.Generator().manual_seed(3))


def run(model: torch.nn.Module, **inputs: Tensor) -> tuple[Tensor, list[GraphReport]]:
    with fresh_dynamo() as reports, torch.no_grad():
        logits = compiled(model)(**inputs).logits
    with torch.no_grad():
        assert_close(logits, model(**inputs).logits)
    return logits, reports


def reasons(reports: list[GraphReport]) -> str:
    return "; ".join(report.reason for report in reports if not report.served)


def test_a_toy_is_grafted() -> None:
    """What the other tests change is the only reason for what they see."""
    _, reports = run(ToyLM(), input_ids=IDS)
    assert [report.served for report in reports] == [True]


def test_several_graphs() -> None:
    """The part of a forward up to a break is grafted, as it has one row per token; what follows has no token ids."""
    _, reports = run(WithBreak(), input_ids=IDS)
    assert [report.served for report in reports] == [True, False, False]  # the two methods' rests
    assert reasons(reports).count("no input is called input_ids") == 2
    assert "`torch._dynamo.graph_break()` (toys.py:" in reports[0].ends
    assert reports[0].ends in str(reports[0])


def test_a_mask_of_another_shape() -> None:
    mask = torch.ones(3, 1, 9, 9)
    _, reports = run(ToyLM(), input_ids=IDS, attention_mask=mask[:, 0, 0])
    assert "attention_mask holds torch.float32" in reasons(reports)


def test_a_mixing_over_the_whole_text_is_replayed() -> None:
    """Nothing is cached, so a region need not be causal: it sees the whole of its own text, and no other."""
    _, reports = run(WithMean(), input_ids=IDS)
    assert [report.served for report in reports] == [True]


def test_an_unknown_causal_mixing_is_replayed_or_refused() -> None:
    model = WithSum()
    _, reports = run(model, input_ids=IDS)
    assert [layer.served for layer in reports[0].layers if layer.kind != "position"] == [
        "grafted",
        "replayed",
    ]
    with fresh_dynamo() as refusing, torch.no_grad():
        compiled(model, fallback="refuse")(input_ids=IDS)
    assert "no pass takes this" in reasons(refusing)


def test_strict() -> None:
    with fresh_dynamo(), pytest.raises(RewriteError, match="leave strict=True"):
        compiled(WithLoop(), strict=True)(input_ids=IDS)


def test_a_loop_over_tokens_fixes_their_number() -> None:
    _, reports = run(WithLoop(), input_ids=IDS)
    assert "the number of tokens is fixed to 9" in reasons(reports)


def test_a_batch_as_long_as_its_rows() -> None:
    """Dynamo may take the two sizes for one, which they are not in a packed row."""
    _, reports = run(ToyLM(), input_ids=IDS[:, :3])
    assert [report.served for report in reports] == [True]


def test_padding_in_the_middle_runs_the_batch_as_it_is() -> None:
    model, mask = ToyLM(), torch.ones_like(IDS)
    mask[1, 4] = 0
    with fresh_dynamo() as reports, torch.no_grad():
        logits = compiled(model)(input_ids=IDS, attention_mask=mask).logits
        assert_close(logits, model(input_ids=IDS, attention_mask=mask).logits)
    assert (reports[0].served, reports[0].fallbacks) == (True, 1)
    assert "between the tokens of a row" in reports[0].last_fallback


def test_padding_on_the_left_counts_where_a_replayed_region_counts_places() -> None:
    """Such a region runs over each text from place 0 on, which is not what the model does with this padding."""
    model, mask = WithTable(), torch.ones_like(IDS)
    mask[0, 4:] = 0
    with fresh_dynamo() as reports, torch.no_grad():
        step = compiled(model)
        for padding in (mask, mask.flip(1)):
            logits = step(input_ids=IDS, attention_mask=padding).logits
            expected = model(input_ids=IDS, attention_mask=padding).logits
            assert_close(logits[padding.bool()], expected[padding.bool()])
    assert [layer.served for layer in reports[0].layers if layer.replay] == ["replayed"]
    assert (reports[0].calls, reports[0].fallbacks) == (2, 1)
    assert "padding on the left" in reports[0].last_fallback


@pytest.mark.slow
def test_padding_on_the_left_counts_where_windows_of_tokens_are_made() -> None:
    """The model's own windows have padding in them, those of an operator begin at a text's first token."""
    model = build("deepseek_v4")
    calls = [batch(form, texts("deepseek_v4")) for form in ("padded right", "padded left")]
    with fresh_dynamo() as reports, torch.no_grad():
        step = compiled(model)
        for call in calls:
            logits = call.split(step(**call.inputs, use_cache=False).logits)
            own = call.split(model(**call.inputs, use_cache=False).logits)
            assert worst(logits, own) <= LOGITS
    assert (reports[0].calls, reports[0].fallbacks) == (2, 1)
    assert "which windows of tokens" in reports[0].last_fallback


def test_mutant_padding_on_the_left_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, mask = WithTable(), torch.ones_like(IDS)
    mask[0, :4] = 0
    monkeypatch.setattr(grafted, "refuse_shifted", lambda mask: None)
    with fresh_dynamo(), torch.no_grad():
        logits = compiled(model)(input_ids=IDS, attention_mask=mask).logits
        expected = model(input_ids=IDS, attention_mask=mask).logits
    assert float((logits - expected)[mask.bool()].abs().max()) > 1e-2


@pytest.mark.parametrize("name", slow_but(["qwen3", "qwen3_next"], ["qwen3"]))
def test_generate(name: str) -> None:
    """A compiled model generates what it generates itself; the steps that read a cache are left alone."""
    model = build(name)
    prompt = texts(name)[0][None]
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(prompt, **options)
    with fresh_dynamo() as reports:
        model.compile(backend="regraft", options={"backend": "eager"})
        found = model.generate(prompt, **options)
    assert torch.equal(found, expected)
    assert {report.served for report in reports} == {True, False}


def test_the_cache_that_a_call_returns() -> None:
    """Keys and values of a plain call, computed on the packed row, are where and what the model's are."""
    model = build("gemma2")
    call = batch("plain", texts("gemma2"))
    with fresh_dynamo() as reports, torch.no_grad():
        found = compiled(model)(**call.inputs).past_key_values
        expected = model(**call.inputs).past_key_values
    assert reports[0].served
    for one, two in zip(found.layers, expected.layers, strict=True):
        assert_close(one.keys, two.keys)
        assert_close(one.values, two.values)


def test_states_that_a_call_returns() -> None:
    model = build("qwen3_next")
    call = batch("plain", texts("qwen3_next"))
    with fresh_dynamo() as reports, torch.no_grad():
        found = compiled(model)(**call.inputs).past_key_values
        expected = model(**call.inputs).past_key_values
    assert reports[0].served
    following = FAMILIES["qwen3_next"].prompt(3, seed=9)[:, None]
    with torch.no_grad():
        one = model(input_ids=following, past_key_values=found).logits
        two = model(input_ids=following, past_key_values=expected).logits
    assert_close(one, two, scale=10)  # through four layers of states summed in another order
