"""One compilation for all lengths, on either side of the backend."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from tests.backend.batches import alone, batch, compiled, fresh_dynamo, texts, worst
from tests.backend.toys import ToyLM
from tests.families.models import build
from tests.tolerance import assert_close


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_lengths_and_batch_sizes(inner: str) -> None:
    """The first call fixes nothing: the backend has Dynamo trace it for any size."""
    model = ToyLM()
    with fresh_dynamo() as reports, torch.no_grad():
        counters.clear()
        step = compiled(model, backend=inner)
        for shape in ((3, 9), (3, 17), (5, 4), (2, 33)):
            ids = torch.randint(0, 32, shape)
            assert_close(step(input_ids=ids).logits, model(input_ids=ids).logits)
        graphs = counters["stats"]["unique_graphs"]
    assert [report.served for report in reports] == [True]
    assert graphs == (1 if inner == "eager" else 2)  # Dynamo's, and the grafted one
    assert reports[0].calls == 4


@pytest.mark.parametrize("name", ["qwen3", "mamba2", "qwen3_next"])
def test_a_packed_row_of_any_length(name: str) -> None:
    """Loops over chunks and time are kept out of the graph: no compilation per length."""
    model = build(name)
    with (
        fresh_dynamo() as reports,
        torch.no_grad(),
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        step = compiled(model)
        for lengths in ((9, 4), (70, 1, 2), (5, 5, 5, 140)):
            call = batch("packed", texts(name, lengths))
            logits = step(**call.inputs, use_cache=False).logits
            assert worst(call.split(logits), alone(model, call.texts)) < 1e-4
    assert [report.calls for report in reports] == [3]
