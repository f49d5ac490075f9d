"""Modules that Dynamo cannot look into for every number of tokens: kept whole, and run over each text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

import regraft.rewriter.backend  # noqa: F401 (Dynamo is told of it once and for all)
from regraft.rewriter import module_leaf, own_weights
from regraft.rewriter.errors import RewriteError
from tests.backend.batches import (
    LOGITS,
    Batch,
    alone,
    batch,
    compiled,
    fresh_dynamo,
    texts,
    worst,
)
from tests.backend.toys import WithChosen, WithJitter, WithMemory, WithRecurrence
from tests.families.models import build
from tests.tolerance import assert_close


def call(form: str, *lengths: int) -> Batch:
    torch.manual_seed(sum(lengths))
    return batch(form, [torch.randint(32, (n,)) for n in lengths])


def one_by_one(model: nn.Module, given: Batch) -> list[Tensor]:
    return [
        model(input_ids=text[None], position_ids=torch.arange(len(text))[None]).logits[0]
        for text in given.texts
    ]


@pytest.mark.parametrize("kind", [WithRecurrence, WithChosen])
def test_packed(kind: type[nn.Module]) -> None:
    """Rows of any lengths through one graph; the model itself mixes their texts."""
    model, rows = kind(), [call("packed", 7, 1, 4), call("packed", 9, 3), call("packed", 2, 2, 40)]
    random_state, plain = (
        torch.get_rng_state(),
        InstructionTranslatorBase.inline_user_function_return,
    )
    settings = torch._dynamo.config.get_config_copy()
    with fresh_dynamo() as reports, torch.no_grad():
        step = compiled(model)
        found = [row.split(step(**row.inputs).logits) for row in rows]
    assert torch.equal(torch.get_rng_state(), random_state)
    assert InstructionTranslatorBase.inline_user_function_return is plain
    assert torch._dynamo.config.get_config_copy() == settings
    with torch.no_grad():
        for row, logits in zip(rows, found, strict=True):
            expected = one_by_one(model, row)
            assert worst(logits, expected) < 1e-5
            assert worst(row.split(model(**row.inputs).logits), expected) > 1e-2
    (report,) = [report for report in reports if report.form]
    assert (report.form, report.calls, report.fallbacks) == ("packed", 3, 0)
    modules = [layer for layer in report.layers if layer.kind == "module"]
    assert [layer.region.path for layer in modules] == (
        ["first", "second"] if kind is WithRecurrence else ["chosen"]
    )
    assert {layer.served for layer in modules} == {"replayed"}


def test_padded_and_plain() -> None:
    model = WithRecurrence()
    batches = [call("padded right", 7, 1, 4), call("padded right", 5, 9), call("padded left", 3, 6)]
    with fresh_dynamo() as reports, torch.no_grad():
        step = compiled(model)
        found = [given.split(step(**given.inputs).logits) for given in batches]
        plain = call("plain", 8)
        rows = plain.split(step(**plain.inputs).logits)
    with torch.no_grad():
        for given, logits in zip([*batches, plain], [*found, rows], strict=True):
            assert worst(logits, given.split(model(**given.inputs).logits)) < 1e-5
    served = [(report.form, report.calls, report.fallbacks) for report in reports if report.form]
    assert served == [("padded", 3, 1), ("plain", 1, 0)]  # what is on the left may be counted


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def trained() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of a loss over a packed row through the backend, and of the same over its texts one by one."""
    torch.manual_seed(0)
    model, row = WithRecurrence(), call("packed", 7, 1, 4)
    with fresh_dynamo():
        logits = row.split(compiled(model)(**row.inputs).logits)
        found = gradients(model, sum(rows.square().sum() for rows in logits))
    return found, gradients(model, sum(rows.square().sum() for rows in one_by_one(model, row)))


def test_gradients_reach_the_weights_of_a_kept_module() -> None:
    found, expected = trained()
    assert found.keys() == expected.keys() > {"first.decay", "second.inner.weight"}
    for name, value in expected.items():
        assert_close(found[name], value, scale=float(value.abs().max()))


def test_mutant_weights_of_a_kept_module_are_not_its_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without(tensors: Any, sizes: Any, key: str, weights: Any) -> Any:
        return module_leaf._CALLS[key].run(tensors, sizes, [w.detach() for w in weights])

    monkeypatch.setattr(own_weights, "run_with_weights", without)
    found, expected = trained()
    assert float(found["first.decay"].abs().max()) == 0 < float(expected["first.decay"].abs().max())


@pytest.mark.parametrize(
    ("kind", "says"),
    [(WithMemory, "it sets its attribute last"), (WithJitter, "it draws random numbers")],
)
def test_a_module_that_does_more_than_return(kind: type[nn.Module], says: str) -> None:
    """It is left to the model, and a row in which the model would mix the texts is an error that says how to go on."""
    model, padded = kind(), call("padded right", 7, 4)
    row = call("packed", 7, 4).inputs
    with fresh_dynamo() as reports, torch.no_grad():
        step = compiled(model)
        torch.manual_seed(0)
        found = step(**padded.inputs).logits
        torch.manual_seed(0)
        assert_close(found, model(**padded.inputs).logits)
        for _ in range(2):
            with pytest.raises(RewriteError, match="give a padded batch") as error:
                step(**row)
        assert says in str(error.value)
        lone = {**row, "position_ids": torch.arange(11)[None]}  # one text, by the same graph
        torch.manual_seed(0)
        found = step(**lone).logits
        torch.manual_seed(0)
        assert_close(found, model(**lone).logits)
    assert says in " ".join(report.reason for report in reports)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rwkv", "minimax"])
def test_families(name: str) -> None:
    """Each text as by itself."""
    model, row = build(name), batch("packed", texts(name))
    with fresh_dynamo() as reports, torch.no_grad():
        logits = compiled(model)(**row.inputs, use_cache=False).logits
    assert worst(row.split(logits), alone(model, row.texts)) <= LOGITS
    assert [report.served for report in reports] == [True]
