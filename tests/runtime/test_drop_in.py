"""generate_batch: transformers' signature and result type."""

from __future__ import annotations

import inspect

import pytest
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
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
        assert result.created_time <= result.lifespan[0] <= result.timestamps[0]
        assert result.lifespan[1] == result.timestamps[-1]
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


def test_a_config_that_sizes_the_engine_otherwise_is_refused():
    engine = make_engine()
    plain = engine.generate_batch([[1]], max_new_tokens=3)
    same = ContinuousBatchingConfig(max_requests_per_batch=8, return_logprobs=True)
    results = [plain, engine.generate_batch([[1]], None, same, max_new_tokens=3)]
    assert len({tuple(r.generated_tokens) for one in results for r in one.values()}) == 1
    with pytest.raises(RequestError, match="asks for max_requests=9, and this engine has 8: make"):
        engine.generate_batch([[1]], None, ContinuousBatchingConfig(max_requests_per_batch=9))
    with pytest.raises(RequestError, match="give a ContinuousBatchingConfig of transformers"):
        engine.generate_batch([[1]], continuous_batching_config=object())


def test_several_sequences_come_in_the_order_of_transformers():
    engine = make_engine()
    config = GenerationConfig(num_return_sequences=3, max_new_tokens=4, do_sample=True)
    names = list(engine.generate_batch([[1], [2, 3]], config))
    parents = names[2::3]
    assert names == [n for p in parents for n in (f"{p}__child#0", f"{p}__child#1", p)]
    assert_idle(engine)
