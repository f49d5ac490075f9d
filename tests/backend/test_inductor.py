"""Through Inductor, as by default: the same numbers, and one compilation for every length."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from tests.backend.batches import batch, fresh_dynamo
from tests.backend.test_gradients import assert_equal_gradients, gradients
from tests.backend.toys import ToyLM
from tests.tolerance import assert_close

pytestmark = pytest.mark.slow


def test_a_packed_step() -> None:
    model = ToyLM()
    with fresh_dynamo() as reports:
        counters.clear()
        step = torch.compile(model, backend="regraft")
        for lengths in ((7, 1, 4), (3, 20)):
            call = batch("packed", [torch.randint(32, (n,)) for n in lengths])
            expected = [model(input_ids=text[None]).logits[0] for text in call.texts]
            sum(logits.square().sum() for logits in expected).backward()
            own = gradients(model)
            found = step(**call.inputs).logits
            found.square().sum().backward()
            for one, two in zip(call.split(found), expected, strict=True):
                assert_close(one, two)
            assert_equal_gradients(gradients(model), own)
        graphs = counters["stats"]["unique_graphs"]
    assert [report.calls for report in reports] == [2]
    assert graphs == 2  # Dynamo's, and the grafted one


def test_the_example() -> None:
    script = Path(__file__).parents[2] / "examples" / "score_packed.py"
    sizes = [
        "--layers",
        "1",
        "--vocabulary",
        "64",
        "--texts",
        "5",
        "--longest",
        "40",
        "--rounds",
        "1",
    ]
    done = subprocess.run([sys.executable, str(script), *sizes], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("scores differ by at most") == 3
