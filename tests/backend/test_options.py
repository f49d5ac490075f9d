"""Options, documented and refused; and that nothing else in the process notices."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

import regraft.rewriter.backend as backend
from tests.backend.batches import compiled, fresh_dynamo
from tests.backend.toys import ToyLM, WithBuffer, WithSum
from tests.tolerance import assert_close

IDS = torch.randint(0, 32, (2, 7), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bakend": "eager"}, "unknown option 'bakend': regraft has backend, fallback, strict"),
        ({"fallback": "maybe"}, "fallback='maybe'"),
        ({"backend": "regraft"}, "the name of another backend"),
        ({"strict": "no"}, "strict='no': expected True or False"),
        ({"batch_invariant": 1}, "batch_invariant=1: expected True or False"),
    ],
)
def test_unknown_options_are_refused(options: dict[str, object], says: str) -> None:
    with fresh_dynamo(), pytest.raises(ValueError, match=says):
        torch.compile(ToyLM(), backend="regraft", options=options)(input_ids=IDS)


def test_modes_are_refused() -> None:
    with fresh_dynamo(), pytest.raises(ValueError, match="max-autotune"):
        torch.compile(ToyLM(), backend="regraft", mode="max-autotune")(input_ids=IDS)


def test_options_are_documented() -> None:
    for name in backend.Options.__dataclass_fields__:
        assert f"    {name} " in (backend.__doc__ or "")


def test_no_import_is_needed() -> None:
    """The entry point is found by name, and loading it changes nothing that others see."""
    script = """
        import sys, torch
        from torch._dynamo.callback import callback_handler
        from torch._dynamo import trace_rules
        assert "regraft" in torch.compiler.list_backends()
        assert "regraft" not in sys.modules
        before = torch._dynamo.config.save_config()
        model = torch.nn.Linear(4, 4)
        compiled = torch.compile(model, backend="regraft", options={"backend": "eager"})
        assert "regraft" in sys.modules
        assert torch._dynamo.config.save_config() == before
        assert not callback_handler.start_callbacks and not callback_handler.end_callbacks
        x = torch.randn(2, 4)
        assert torch.equal(compiled(x), model(x))
        assert not callback_handler.start_callbacks and not callback_handler.end_callbacks
        assert torch._dynamo.config.save_config() == before
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=250)


def test_two_models_in_one_process() -> None:
    """Two compiled models and one that is not, interleaved, keep their own weights and graphs."""
    models = [ToyLM(), WithSum(), ToyLM()]
    with fresh_dynamo() as reports, torch.no_grad():
        steps = [compiled(model) for model in models]
        for _ in range(2):
            for model, step in zip(models, steps):
                assert_close(step(input_ids=IDS).logits, model(input_ids=IDS).logits)
        with torch.no_grad():
            models[0].head.weight.mul_(2)
        assert_close(steps[0](input_ids=IDS).logits, models[0](input_ids=IDS).logits)
    assert all(report.served for report in reports)


def test_buffers_that_the_forward_writes() -> None:
    """Read before and after they are written, call after call, they are what the model itself makes of them."""
    model, other = WithBuffer(), WithBuffer()
    other.load_state_dict(model.state_dict())
    with fresh_dynamo() as reports, torch.no_grad():
        step = compiled(model)
        for _ in range(3):
            assert_close(step(input_ids=IDS).logits, other(input_ids=IDS).logits)
            assert_close(model.total, other.total)
    assert (int(model.calls), reports[0].served) == (3, True)
