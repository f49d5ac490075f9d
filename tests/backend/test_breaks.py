"""Graph breaks, and what a graph must not hand on over one."""

from __future__ import annotations

import pytest
import torch

from regraft.rewriter import dynamo_cut, dynamo_hook
from tests.backend.batches import Batch, batch, compiled, fresh_dynamo, worst
from tests.backend.toys import WithPositionsUnread, WithSegments, WithSelectedTokens
from tests.tolerance import assert_close


def packed() -> Batch:
    torch.manual_seed(0)
    return batch("packed", [torch.randint(32, (n,)) for n in (7, 1, 4)])


def run_segments() -> tuple[torch.Tensor, torch.Tensor]:
    model, call = WithSegments(), packed()
    with fresh_dynamo(), torch.no_grad():
        return compiled(model)(**call.inputs).logits, model(**call.inputs).logits


def test_what_is_read_behind_a_break_is_the_models_own() -> None:
    """The numbers of sequences are all one where each sequence is a row by itself."""
    found, expected = run_segments()
    assert_close(found, expected)


def test_mutant_numbers_from_the_grafted_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = dynamo_cut.Writes.spread
    monkeypatch.setattr(
        dynamo_cut.Writes,
        "spread",
        lambda self, found: found.update(self._graph.nodes) if found else spread(self, found),
    )
    found, expected = run_segments()
    assert float((found - expected).abs().max()) > 1e-2


def test_positions_that_are_handed_on_and_never_read() -> None:
    """They say where sequences begin all the same."""
    model, call = WithPositionsUnread(), packed()
    with fresh_dynamo() as reports, torch.no_grad():
        found = compiled(model)(**call.inputs).logits
    assert [(report.reason, report.form) for report in reports] == [("", "packed")]
    with torch.no_grad():
        expected = [
            model(input_ids=text[None], position_ids=torch.arange(len(text))[None]).logits[0]
            for text in call.texts
        ]
    assert worst(call.split(found), expected) < 1e-5


def test_a_shape_that_depends_on_values_breaks_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo is asked to keep it; nothing of that remains afterwards."""
    model, call = WithSelectedTokens(), packed()
    settings = torch._dynamo.config.get_config_copy()
    with fresh_dynamo() as reports, torch.no_grad():
        found = compiled(model)(**call.inputs).logits
    assert torch._dynamo.config.get_config_copy() == settings
    assert [report.served for report in reports] == [True]
    with torch.no_grad():
        expected = [model(input_ids=text[None]).logits[0] for text in call.texts]
    assert worst(call.split(found), expected) < 1e-5
    monkeypatch.setattr(dynamo_hook, "KEEPING_VALUES", ())
    with fresh_dynamo() as reports, torch.no_grad():
        compiled(model)(**call.inputs)
    assert len(reports) > 1
