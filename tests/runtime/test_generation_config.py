"""GenerationConfig in, SamplingParams out: precedence, values per prompt, and nothing dropped."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import GenerationConfig

from regraft.runtime.errors import RequestError
from regraft.runtime.generation_config import _IRRELEVANT, _OWN, _SERVED, _known_names, resolve
from regraft.runtime.sampling_params import WarpParams


def one(model=None, given=None, *, length=10, limit=100, **fields):
    (params,) = resolve(model, given, fields, [length], limit)
    return params


def test_keywords_beat_the_config_beats_the_model_beats_the_defaults():
    model = GenerationConfig(
        temperature=0.5, top_k=7, top_p=0.8, do_sample=True, max_new_tokens=9, eos_token_id=3
    )
    given = GenerationConfig(temperature=0.6, top_k=8)
    params = one(model, given, temperature=0.7)
    assert params.warp == WarpParams(temperature=0.7, top_k=8, top_p=0.8)
    assert params.max_new_tokens == 9
    assert params.eos_token_id == (3,)
    assert one().warp.top_k == 50  # as in generate
    assert one(do_sample=True, top_k=0).warp.top_k == 0
    assert one(model, eos_token_id=None).eos_token_id == ()
    assert one(model, eos_token_id=[4, 5]).eos_token_id == (4, 5)


def test_nothing_given_means_greedy_and_twenty_tokens():
    params = one()
    assert not params.do_sample
    assert params.max_new_tokens == 20
    assert params.logprobs
    assert one(limit=15).max_new_tokens == 5  # as generate: up to the model's positions
    assert one(limit=None).max_new_tokens == 20


def test_max_length_counts_the_prompt():
    assert one(max_length=14).max_new_tokens == 4
    model = GenerationConfig(max_length=64)
    assert one(model).max_new_tokens == 54
    assert one(model, max_new_tokens=3).max_new_tokens == 3
    assert one(GenerationConfig(max_new_tokens=30), max_length=12).max_new_tokens == 2
    with pytest.raises(RequestError, match="max_length=10 leaves no room after a prompt of 10"):
        one(max_length=10)
    with pytest.raises(RequestError, match="max_new_tokens=3 and max_length=40 both"):
        one(max_new_tokens=3, max_length=40)


def test_a_list_is_one_value_per_prompt():
    fields = {
        "seed": [1, 7, 3],
        "do_sample": [True, False, True],
        "temperature": [0.5, None, np.float64(2)],
        "max_new_tokens": [1, 2, 3],
    }
    params = resolve(None, None, fields, [4, 5, 6], None)
    assert [p.seed for p in params] == [1, 7, 3]
    assert [p.do_sample for p in params] == [True, False, True]
    assert [p.warp.temperature for p in params] == [0.5, 1.0, 2.0]
    assert [p.max_new_tokens for p in params] == [1, 2, 3]
    with pytest.raises(RequestError, match="seed has 2 values for 3 prompts"):
        resolve(None, None, {"seed": [1, 2]}, [4, 5, 6], None)


def test_fields_that_are_lists_by_nature_need_one_level_more():
    two = {"eos_token_id": [1, 2], "bad_words_ids": [[3], [4, 5]]}
    for params in resolve(None, None, two, [4, 5], None):
        assert params.eos_token_id == (1, 2)
        assert params.bad_words_ids == [[3], [4, 5]]
    each = {
        "eos_token_id": [[1, 2], [3]],
        "bad_words_ids": [[[3]], [[4, 5], [6]]],
        "exponential_decay_length_penalty": [(2, 1.1), (3, 1.2)],
        "sequence_bias": [{(1,): 2.0}, [[[2, 3], 1.0]]],
    }
    first, second = resolve(None, None, each, [4, 5], None)
    assert (first.eos_token_id, second.eos_token_id) == ((1, 2), (3,))
    assert (first.bad_words_ids, second.bad_words_ids) == ([[3]], [[4, 5], [6]])
    assert second.exponential_decay_length_penalty == (3, 1.2)
    assert first.sequence_bias == {(1,): 2.0}
    assert second.sequence_bias == [[[2, 3], 1.0]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temprature": 0.5}, r"'temprature' is no field of GenerationConfig \(value 0.5\).*temp"),
        ({"num_beams": 4}, "num_beams=4 is not supported: pass num_beams=1"),
        ({"num_return_sequences": 0}, "num_return_sequences=0: give a whole number of 1 or more"),
        (
            {"stop_strings": ["x", ""]},
            "stop_strings=.*: give a text or a list of texts, none empty",
        ),
        ({"stop_strings": 3}, r"stop_strings=\(3,\)"),
        ({"max_time": 0}, "max_time=0: give seconds above 0"),
        ({"top_logprobs": -1}, "top_logprobs=-1"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs=2 needs logprobs=True"),
        ({"prompt_logprobs": 1}, "prompt_logprobs=1: give True or False"),
        ({"logits_processor": [7]}, "logits_processor holds 7, which cannot be called"),
        ({"json_schema": 7}, "json_schema=7"),
        ({"regex": ""}, "regex=''"),
        ({"regex": "a", "json_schema": {}}, "json_schema and regex both say"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5 is not supported"),
        ({"output_scores": True}, "output_scores=True is not supported"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 is not supported"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: ask for a whole number of 1 or more"),
        ({"max_new_tokens": 2.0}, r"max_new_tokens=2\.0"),
        ({"max_new_tokens": 2, "min_new_tokens": 3}, "min_new_tokens=3 is more than"),
        ({"do_sample": 1}, "do_sample=1: give True or False"),
        ({"do_sample": True, "temperature": 0.0}, r"temperature=0\.0: .* do_sample=False"),
        ({"do_sample": True, "temperature": float("nan")}, "temperature=nan"),
        ({"do_sample": True, "top_k": -1}, "top_k=-1"),
        ({"do_sample": True, "top_p": 1.5}, r"top_p=1\.5: give a number from 0 to 1"),
        ({"do_sample": True, "min_p": -0.1}, r"min_p=-0\.1"),
        ({"do_sample": True, "seed": -1}, "seed=-1"),
        ({"seed": 1.5}, r"seed=1\.5"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: give a number above 0"),
        ({"no_repeat_ngram_size": -2}, "no_repeat_ngram_size=-2"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"logprobs": 5}, "logprobs=5"),
        ({"temperature": 0.7}, "temperature=0.7 has no effect on greedy decoding: pass do_sample"),
        ({"top_p": 0.9}, "top_p=0.9 has no effect"),
    ],
)
def test_a_wrong_field_is_named_with_its_fix(fields, message):
    with pytest.raises(RequestError, match=message):
        one(**fields)


def test_a_config_of_another_kind_is_refused():
    with pytest.raises(RequestError, match="is a dict: give a transformers GenerationConfig"):
        one(given={"temperature": 1.0})


def test_a_field_made_up_inside_a_config_is_refused_too():
    with pytest.raises(RequestError, match="'speed' is no field"):
        one(given=GenerationConfig(speed=3))


def test_the_models_own_config_may_say_what_generate_ignores():
    model = GenerationConfig.from_dict(
        {"chat_format": "chatml", "pad_token_id": 0, "use_cache": True, "temperature": 0.6}
    )
    assert not one(model).do_sample  # its temperature without sampling is no error of the caller
    with pytest.raises(RequestError, match="num_beams=4"):
        one(GenerationConfig(num_beams=4))
    assert one(GenerationConfig(num_beams=4), num_beams=1)


def test_what_asks_for_nothing_is_no_error():
    one(num_beams=1, num_return_sequences=1, guidance_scale=1.0, stop_strings=None)
    one(output_scores=False, temperature=1.0, return_dict_in_generate=False)


OTHER_THAN_DEFAULT = {
    "max_new_tokens": 3,
    "max_length": 17,
    "min_length": 4,
    "min_new_tokens": 2,
    "max_time": 2.5,
    "stop_strings": ["x"],
    "do_sample": True,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.1,
    "top_h": 0.4,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "repetition_penalty": 1.2,
    "encoder_repetition_penalty": 1.2,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[3]],
    "forced_bos_token_id": 3,
    "forced_eos_token_id": 3,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (3, 1.1),
    "suppress_tokens": [3],
    "begin_suppress_tokens": [3],
    "sequence_bias": [[[3], 1.0]],
    "num_return_sequences": 2,
    "eos_token_id": 5,
}
"""A value for each field of transformers' that is served."""


@pytest.mark.parametrize("name", sorted(_known_names() - set(_OWN)))
def test_every_field_is_served_irrelevant_or_refused(name):
    """Also those of a later transformers: what this version has never heard of is refused."""
    if name in _SERVED:
        sampled = {"do_sample": True} if name in WarpParams._fields else {}
        assert one(**{name: OTHER_THAN_DEFAULT[name]}, **sampled) != one(**sampled)
    elif name in _IRRELEVANT:
        assert one(**{name: 17}) == one()
    else:
        with pytest.raises(RequestError, match=f"{name}=17 is not supported"):
            one(**{name: 17})


def test_no_field_is_of_two_kinds():
    assert not (_SERVED | _IRRELEVANT) - _known_names()
    assert not _SERVED & _IRRELEVANT
