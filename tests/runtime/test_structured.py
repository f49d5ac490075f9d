"""Text of a JSON schema or a regular expression, whatever the model would rather say."""

from __future__ import annotations

import json
import re
import sys
import time

import pytest
from transformers import GenerationConfig

from regraft.runtime.errors import RequestError
from tests.runtime.engines import assert_idle, make_engine
from tests.runtime.tokenizers_made_here import byte_tokenizer
from tests.runtime.toy import ToyModel

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"[a-f]{3}-([0-9]{2}|é)"


def engine_with_text(**fields):
    tokenizer = byte_tokenizer()
    engine = make_engine(ToyModel(vocab_size=257), tokenizer=tokenizer, **fields)
    engine.generation_config = GenerationConfig(eos_token_id=256, max_new_tokens=150)
    return engine


pytest.importorskip("llguidance", reason="an optional extra: pip install 'regraft[structured]'")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("overlaps", [False, True])
def test_sampled_text_is_of_the_schema(seed, overlaps):
    engine = engine_with_text(overlaps=overlaps)
    sampling = {
        "do_sample": True,
        "temperature": 200.0,
        "top_k": 0,
        "seed": [seed, seed, seed + 50],
    }
    free, one, other = engine.generate(
        ["x", "x", "yy"], json_schema=[None, SCHEMA, json.dumps(SCHEMA)], **sampling
    )
    for out in (one, other):
        assert out.finish_reason == "stop"
        value = json.loads(out.text)
        assert set(value) == {"name", "age", "tags"}
        assert len(value["name"]) <= 5
        assert 0 <= value["age"] <= 130
        assert set(value["tags"]) <= {"a", "b"}
    (alone,) = engine_with_text().generate(["x"], **{**sampling, "seed": seed})
    assert free.token_ids == alone.token_ids
    assert_idle(engine)


@pytest.mark.parametrize("greedy", [True, False])
def test_text_matches_the_expression(greedy):
    engine = engine_with_text()
    sampling = {} if greedy else {"do_sample": True, "temperature": 90.0, "top_k": 0}
    for out in engine.generate(["a", "b", "c"], regex=REGEX, **sampling):
        assert re.fullmatch(REGEX, out.text)
        assert out.finish_reason == "stop"
    assert engine.generate(["a"], regex="[0-9]{40}", max_new_tokens=7)[0].finish_reason == "length"


def test_without_an_end_of_sequence_the_tokenizers_is_taken():
    engine = engine_with_text()
    (out,) = engine.generate(["a"], regex="ab", eos_token_id=-1)
    assert (out.text, out.token_ids[-1], out.finish_reason) == ("ab", 256, "stop")


def test_requests_preempted_half_way_go_on():
    engine = engine_with_text(cache_tokens=120)
    outs = engine.generate([[i] * 20 for i in range(1, 7)], regex="[a-z]{20}", max_new_tokens=40)
    assert engine.stats.num_preemptions
    assert all(re.fullmatch("[a-z]{20}", out.text) for out in outs)
    assert_idle(engine)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "a("}, r"regex='a\('"),
        ({"json_schema": "{nonsense"}, "json_schema='{nonsense'"),
        ({"json_schema": {"type": "nonsense"}}, "json_schema="),
    ],
)
def test_what_is_no_grammar_is_refused(fields, message):
    with pytest.raises(RequestError, match=message):
        engine_with_text().generate(["a"], **fields)


def test_a_grammar_that_costs_too_much_ends_its_request_alone():
    """A million states are not built: without a limit that takes tens of seconds, and all wait."""
    engine, start = engine_with_text(), time.perf_counter()
    bad, good = engine.generate(["a", "b"], regex=["(a{1000}){1000}", "b{3}"])
    assert bad.finish_reason == "error"
    assert "too many expressions" in bad.error
    assert good.text == "bbb"
    assert time.perf_counter() - start < 5


def test_without_a_tokenizer_or_the_package_it_is_refused(monkeypatch):
    with pytest.raises(RequestError, match="regex is about text: give the engine a tokenizer"):
        make_engine().generate([[1]], regex="a")
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(RequestError, match=r"needs the package llguidance: pip install 'regraft\["):
        engine_with_text().generate(["a"], regex="a")
