"""generate_batch: transformers' signature and result type."""

from __future__ import annotations

import inspect

import pytest
from transformers import GenerationConfig
from transformers.generation.continuous_batching import ContinuousMixin
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from regraft.runtime.engine import Engine
from regraft.runtime.errors import RequestError
from tests.runtime.engines import assert_idle, make_engine, make_prompts


def test_the_arguments_are_those_of_transformers():
    theirs = inspect.signature(ContinuousMixin.generate_batch).parameters
    ours = inspect.signature(Engine.generate_batch).parameters
    for name, parameter in theirs.items():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            assert ours[name].default == parameter.default
    assert list(ours)[: len(theirs) - 1] == list(theirs)[:-1]


def test_results_are_transformers_own():
    engine = make_engine()
    prompts = make_prompts(3)
    config = GenerationConfig(max_new_tokens=5)
    results = engine.generate_batch(prompts, generation_config=config, record_timestamps=True)
    for prompt, (name, result) in zip(prompts, results.items(), strict=True):
        assert isinstance(result, GenerationOutput)
        assert result.request_id == name
        assert result.prompt_ids == prompt
        assert result.generated_tokens == engine.model.continue_greedily(prompt, 5)
        assert len(result.logprobs) == 5
        assert result.status is RequestStatus.FINISHED
        assert result.is_finished()
        times = [result.created_time, *result.timestamps]
        assert times == sorted(times)
        assert result.lifespan == (result.created_time, result.timestamps[-1])
    (plain,) = engine.generate_batch(prompts[:1], max_new_tokens=2).values()
    assert plain.timestamps is None
    assert len(plain.generated_tokens) == 2
    assert engine.generate_batch([]) == {}
    assert_idle(engine)


def test_a_request_that_fails_says_so_in_its_result():
    engine = make_engine()
    plain = engine.model._rows
    engine.model._rows = lambda t, p, e: plain(t, p, e).masked_fill(t == 61, float("nan"))
    good, bad = engine.generate_batch([[1], [61]], max_new_tokens=3).values()
    assert (good.status, good.error) == (RequestStatus.FINISHED, None)
    assert bad.status is RequestStatus.FAILED
    assert "not finite" in bad.error


def test_a_config_of_transformers_engine_is_refused():
    with pytest.raises(RequestError, match="give this one an EngineConfig"):
        make_engine().generate_batch([[1]], continuous_batching_config=object())
