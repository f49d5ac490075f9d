"""Chosen tokens against transformers' own processors and warpers, applied as `generate` does."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.logits_process import LogitsProcessorList

from regraft.runtime import sampler
from regraft.runtime.errors import RequestError
from regraft.runtime.generation_config import resolve
from regraft.runtime.request import Request

CPU = torch.device("cpu")
VOCAB = 300


def make_request(prompt, output=(), vocab=VOCAB, arrival=0, **fields):
    fields.setdefault("max_new_tokens", 50)
    (params,) = resolve(None, None, fields, [len(prompt)], None)
    request = Request(f"r{arrival}", arrival, prompt, params)
    sampler.prepare(request, vocab, CPU, (0, arrival))
    request.tokens += output
    return request


def transformers_processors(fields, num_prompt, prompt):
    """The list that `generate` makes of these fields."""
    config = GenerationConfig(**{"top_k": 50, "max_new_tokens": 50, **fields})
    eos = config.eos_token_id
    config._eos_token_tensor = None if eos is None else torch.tensor(eos).reshape(-1)
    config.max_length = num_prompt + config.max_new_tokens
    stub = SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=False),
        _merge_criteria_processor_list=lambda default, custom: default,
    )
    return GenerationMixin._get_logits_processor(
        stub,
        config,
        input_ids_seq_length=num_prompt,
        encoder_input_ids=torch.tensor([prompt]),
        device="cpu",
    )


def random_fields(rng):
    """Some of the fields that shape scores, with values that bite."""
    choices = {
        "repetition_penalty": [0.7, 1.3],
        "encoder_repetition_penalty": [1.5],
        "no_repeat_ngram_size": [1, 2, 3],
        "encoder_no_repeat_ngram_size": [2],
        "bad_words_ids": [[[5], [6, 7]], [[1, 2, 3]]],
        "sequence_bias": [[[[8], 3.5], [[9, 1], -2.0]]],
        "min_length": [25],
        "min_new_tokens": [3, 30],
        "suppress_tokens": [[4, 5, 6]],
        "begin_suppress_tokens": [[7]],
        "forced_bos_token_id": [3],
        "forced_eos_token_id": [2],
        "exponential_decay_length_penalty": [(2, 1.2)],
        "remove_invalid_values": [True],
    }
    warps = {
        "temperature": [0.3, 1.7],
        "top_k": [0, 1, 5, 200, 1000],
        "top_p": [0.1, 0.5, 0.95, 0.0],
        "min_p": [0.02, 0.4],
        "typical_p": [0.5],
        "epsilon_cutoff": [0.002],
        "eta_cutoff": [0.003],
        "top_h": [0.4],
    }
    fields = {"eos_token_id": rng.choice([2, [2, 11]])}
    for name in rng.sample(sorted(choices), rng.randint(0, 4)):
        fields[name] = rng.choice(choices[name])
    if rng.random() < 0.7:
        fields["do_sample"] = True
        for name in rng.sample(sorted(warps), rng.randint(0, 3)):
            fields[name] = rng.choice(warps[name])
    return fields


def expected_scores(fields, request, logits):
    """Which of equal scores top-p drops is up to its sort: of the common warpers' a stable one."""
    prompt = request.tokens[: request.num_prompt]
    processors = transformers_processors(fields, len(prompt), prompt)
    with pytest.MonkeyPatch.context() as patch:
        if fields.keys().isdisjoint(["typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"]):
            patch.setattr(torch, "sort", partial(torch.sort, stable=True))
        return processors(torch.tensor([request.tokens]), logits.clone()[None])[0]


@pytest.mark.parametrize("seed", range(150))
def test_distribution_is_that_of_transformers(seed):
    """In a batch of differing requests, each is chosen from exactly its own distribution."""
    rng = random.Random(seed)
    requests, all_fields = [], []
    for arrival in range(3):
        fields = random_fields(rng)
        prompt = [rng.randrange(20) for _ in range(rng.randint(1, 20))]
        output = [rng.randrange(20) for _ in range(rng.choice([0, 1, 9, 49]))]
        requests.append(make_request(prompt, output, arrival=arrival, **fields))
        all_fields.append(fields)
    logits = torch.randn(3, VOCAB) * rng.choice([0.5, 3])
    if rng.random() < 0.3:
        logits = logits.bfloat16()  # full of equal scores
    for _ in range(4):
        tokens, logprobs = sampler.sample(logits, requests)
        for row, (request, fields) in enumerate(zip(requests, all_fields)):
            scores = expected_scores(fields, request, logits[row].float())
            logprob = scores.log_softmax(-1)[tokens[row]]
            assert logprob > -torch.inf, f"{fields} forbids token {tokens[row]}"
            assert abs(logprob - logprobs[row]) < 1e-4, fields
            if not fields.get("do_sample"):
                assert scores[tokens[row]] == scores.max()


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 0},
        {"top_k": 0, "temperature": 0.5},
        {"top_k": 5},
        {"top_k": 40, "top_p": 0.7},
        {"top_k": 0, "top_p": 0.7},
        {"top_k": 0, "top_p": 0.999},
        {"top_k": 0, "min_p": 0.1},
        {"top_k": 30, "min_p": 0.05},
    ],
)
@pytest.mark.parametrize("vocab", [50, 2500])
def test_frequencies_follow_the_distribution(fields, vocab):
    """Drawn at an even grid of numbers, every token comes as often as its probability says."""
    draws = 1000
    logits = torch.randn(vocab) * 2
    fields = {"do_sample": True, **fields}
    probs = expected_scores(fields, make_request([1], vocab=vocab), logits).softmax(-1).double()
    uniforms = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    warp = make_request([1], vocab=vocab, **fields).params.warp
    tokens, _ = sampler._draw(logits.expand(draws, -1), warp, uniforms)
    counts = torch.bincount(tokens, minlength=vocab).double() / draws
    assert (counts - probs).abs().max() <= 1.01 / draws


def test_the_ends_of_the_unit_interval_meet_possible_tokens():
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]])
    wide = torch.full((1, 5000), -torch.inf)
    wide[0, [2500, 2600]] = 1.0
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    warp = make_request([1], vocab=4, do_sample=True, top_k=0).params.warp
    assert sampler._draw(logits.expand(2, -1), warp, ends)[0].tolist() == [1, 2]
    assert sampler._draw(wide.expand(2, -1), warp, ends)[0].tolist() == [2500, 2600]


@pytest.mark.parametrize("fields", [{}, {"top_k": 0}, {"top_k": 0, "top_p": 0.9}, {"top_k": 3}])
def test_a_seeded_request_does_not_see_its_neighbours(fields):
    """Alone, or in any place among others of any kind: the same tokens."""
    logits = torch.randn(20, 5, VOCAB).bfloat16()
    mine = {"do_sample": True, "seed": 5, **fields}

    def tokens_at(place):
        others = [
            make_request([1]),
            make_request([1], do_sample=True, arrival=1),
            make_request([1], do_sample=True, seed=9, arrival=2, **fields),
            make_request([1], repetition_penalty=1.3, arrival=3),
        ]
        requests = [*others[:place], make_request([1], **mine), *others[place:]]
        made = []
        for step in logits:
            rows = step[:4].clone()
            batch = torch.cat([rows[:place], step[4:], rows[place:]])
            made.append(sampler.sample(batch, requests)[0][place])
        return made

    alone = make_request([1], **mine)
    expected = [sampler.sample(step[4:], [alone])[0][0] for step in logits]
    assert len(set(expected)) > 3
    for place in (0, 2, 4):
        assert tokens_at(place) == expected


def test_requests_without_a_seed_differ_and_can_be_repeated():
    logits = torch.randn(1, VOCAB)

    def tokens(arrival):
        request = make_request([1], do_sample=True, arrival=arrival)
        return [sampler.sample(logits, [request])[0][0] for _ in range(20)]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": False},
        {"do_sample": True},
        {"do_sample": True, "top_k": 0},
        {"do_sample": True, "top_k": 0, "top_p": 0.5},
        {"repetition_penalty": 1.2},
    ],
)
def test_logits_that_are_not_finite_are_told_by_a_nan(fields, bad):
    logits = torch.randn(3, 5000)
    logits[1, 4321] = bad
    requests = [make_request([1], vocab=5000, **fields) for _ in range(3)]
    logprobs = torch.tensor(sampler.sample(logits, requests)[1])
    assert logprobs.isnan().tolist() == [False, True, False]


def test_logprobs_nobody_wants_are_not_computed(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("log_softmax over the vocabulary")

    monkeypatch.setattr(torch.Tensor, "log_softmax", refuse)
    logits = torch.randn(2, VOCAB)
    tokens, _ = sampler.sample(logits, [make_request([1], logprobs=False) for _ in range(2)])
    assert tokens == logits.argmax(-1).tolist()


def test_logits_are_left_as_they_were():
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    sampler.sample(logits, [make_request([1, 2], repetition_penalty=2.0, do_sample=True)] * 2)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bad_words_ids": [[300]]}, "bad_words_ids names token 300, outside the vocabulary of 30"),
        ({"suppress_tokens": [-1]}, "suppress_tokens"),
        ({"forced_eos_token_id": 999}, "forced_eos_token_id names token 999"),
        ({"sequence_bias": {(1, 400): 1.0}}, "sequence_bias names token 400"),
        ({"sequence_bias": [[[1], 2]]}, "sequence_bias"),
        ({"bad_words_ids": []}, "bad_words_ids"),
        ({"do_sample": True, "typical_p": 0.0}, "typical_p"),
        ({"do_sample": True, "top_h": 0.0}, "top_h"),
        ({"exponential_decay_length_penalty": (1, 1.1)}, "needs an eos_token_id"),
    ],
)
def test_a_value_no_processor_takes_is_refused_before_anything_runs(fields, message):
    with pytest.raises(RequestError, match=message):
        make_request([1], **fields)


def test_plain_requests_have_no_processors():
    assert make_request([1]).processors is None
    assert isinstance(
        make_request([1], min_new_tokens=2, eos_token_id=1).processors, LogitsProcessorList
    )


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("temperature", [5e-324, 3e-308, 1e-45, 1e-20])
def test_the_lowest_temperatures_leave_the_best(temperature, fields):
    """Scores divided by them would be infinite, or no numbers; of equal ones either is the best."""
    logits = torch.linspace(-40, 40, VOCAB).repeat(2, 1)
    logits[1, 7] = logits[1, -1]
    fields = {"top_k": 0, "do_sample": True, "temperature": temperature, **fields}
    warp = make_request([1], **fields).params.warp
    uniforms = torch.tensor([0.4, 0.4], dtype=torch.float64)
    tokens, logprobs = sampler._draw(logits, warp, uniforms)
    assert tokens[0] == VOCAB - 1 and tokens[1] in (7, VOCAB - 1)
    assert logprobs[0] == 0
    assert -0.7 < logprobs[1] <= 0


def test_the_highest_temperature_leaves_all_alike():
    logits = torch.linspace(-40, 40, VOCAB)[None].clone()
    logits[0, :100] = -torch.inf
    warp = make_request([1], do_sample=True, top_k=0, temperature=1e308).params.warp
    tokens, logprobs = sampler._draw(logits, warp, torch.tensor([0.5], dtype=torch.float64))
    assert int(tokens) in (199, 200)
    assert abs(float(logprobs.exp()) - 1 / 200) < 1e-6
