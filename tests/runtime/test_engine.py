"""The public surface over a model whose every token is known beforehand."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import GenerationConfig

from regraft.rewriter.errors import RewriteError
from regraft.runtime.errors import RequestError
from tests.runtime.engines import assert_idle, make_engine, make_prompts
from tests.runtime.tokenizers_made_here import byte_tokenizer
from tests.runtime.toy import ToyModel


@pytest.fixture
def engine():
    engine = make_engine()
    yield engine
    if not engine._loop.closed:
        assert_idle(engine)


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"has_states": False},
        {"has_rows": False},
        {"has_rows": False, "max_positions": None},
        {"min_tokens": 9},
        {"switch_lengths": (10, 30, 31)},
    ],
    ids=str,
)
def test_each_prompt_is_continued_as_if_alone(model):
    model = ToyModel(**model)
    engine = make_engine(model)
    prompts = make_prompts(20)
    lengths = [1 + i for i in range(20)]
    outputs = engine.generate(prompts, max_new_tokens=lengths)
    for prompt, length, output in zip(prompts, lengths, outputs):
        expected = model.continue_greedily(prompt, length)
        assert output.token_ids == expected
        assert output.prompt_token_ids == prompt
        assert output.finish_reason == "length"
        assert output.text is None
        for i, token in enumerate(expected):
            scores = model.logits_of(prompt + expected[:i])[-1].log_softmax(-1)
            assert output.logprobs[i] == pytest.approx(float(scores[token]), abs=1e-5)
    assert_idle(engine)


def test_two_calls_in_a_row_are_two_calls(engine):
    prompts = make_prompts(4)
    first, second = (engine.generate(prompts, max_new_tokens=5) for _ in range(2))
    assert [o.token_ids for o in first] == [o.token_ids for o in second]
    assert len({o.request_id for o in first + second}) == 8


def test_no_prompts_no_outputs(engine):
    assert engine.generate([]) == []


def test_prompts_may_be_arrays(engine):
    prompt = make_prompts(1)[0]
    forms = [prompt, tuple(prompt), torch.tensor(prompt), torch.tensor(prompt).numpy()]
    outputs = engine.generate(forms, max_new_tokens=3)
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    assert all(output.prompt_token_ids == prompt for output in outputs)


def test_an_end_of_sequence_token_ends_the_request(engine):
    prompt = make_prompts(1)[0]
    free = engine.model.continue_greedily(prompt, 12)
    eos = free[5]
    end = free.index(eos) + 1
    (output,) = engine.generate([prompt], max_new_tokens=12, eos_token_id=[63, eos])
    assert output.token_ids == free[:end]
    assert output.finish_reason == "stop"
    (late,) = engine.generate([prompt], max_new_tokens=12, eos_token_id=eos, min_new_tokens=end + 1)
    assert late.token_ids[: end - 1] == free[: end - 1]
    assert eos not in late.token_ids[:end]


def test_defaults_come_from_the_models_generation_config():
    config = GenerationConfig(max_new_tokens=3, repetition_penalty=1.0)
    engine = make_engine(generation_config=config)
    (output,) = engine.generate([[1, 2]])
    assert len(output.token_ids) == 3
    (output,) = engine.generate([[1, 2]], generation_config=GenerationConfig(max_new_tokens=2))
    assert len(output.token_ids) == 2


def test_processors_see_the_whole_history(engine):
    """Prompt and output, across steps: a token that was ever seen is never made again."""
    prompt = list(range(20))
    (output,) = engine.generate([prompt], max_new_tokens=40, no_repeat_ngram_size=1)
    assert len(set(prompt + output.token_ids)) == 60


def test_sampled_tokens_follow_the_seed_alone(engine):
    prompts = make_prompts(6)
    settings = {"max_new_tokens": 8, "do_sample": True, "temperature": 40.0, "top_k": 0}
    together = engine.generate(prompts, seed=[1, 2, 3, 1, 2, 3], **settings)
    for i, prompt in enumerate(prompts):
        (alone,) = engine.generate([prompt], seed=i % 3 + 1, **settings)
        assert alone.token_ids == together[i].token_ids
        assert alone.logprobs == together[i].logprobs
    (other,) = engine.generate(prompts[:1], seed=4, **settings)
    assert other.token_ids != together[0].token_ids


def test_logprobs_can_be_left_out(engine):
    with_, without = engine.generate([[1, 2]] * 2, max_new_tokens=2, logprobs=[True, False])
    assert len(with_.logprobs) == 2
    assert without.logprobs is None
    assert with_.token_ids == without.token_ids


def test_a_progress_bar_counts_tokens(engine, capsys):
    eos = engine.model.continue_greedily([1, 2], 3)[-1]
    engine.generate([[1, 2], [5]], max_new_tokens=40, progress=True, eos_token_id=eos)
    shown = capsys.readouterr().err.split("\r")[-1]
    (count, total) = shown.split("| ")[1].split(" [")[0].split("/")
    assert count == total
    engine.generate([[1, 2]], max_new_tokens=3)
    assert capsys.readouterr().err == ""


def test_interleaved_streams_see_their_own_tokens(engine):
    prompts = make_prompts(3)
    streams = [engine.stream(prompt, max_new_tokens=6) for prompt in prompts]
    seen = [[] for _ in prompts]
    for turn in range(6):
        for i in (2, 0, 1):
            token = next(streams[i])
            assert token.request_id == streams[i].request_id
            seen[i].append(token.token_id)
            assert (token.finish_reason == "length") == (turn == 5)
    for stream in streams:
        with pytest.raises(StopIteration):
            next(stream)
    assert seen == [engine.model.continue_greedily(prompt, 6) for prompt in prompts]
    assert [stream.output.token_ids for stream in streams] == seen


def test_a_stream_and_generate_and_step_take_nothing_from_each_other(engine):
    prompts = make_prompts(3)
    expected = [engine.model.continue_greedily(prompt, 5) for prompt in prompts]
    stream = engine.stream(prompts[0], max_new_tokens=5)
    queued = engine.add_request(prompts[1], max_new_tokens=5)
    (output,) = engine.generate(prompts[2:], max_new_tokens=5)
    assert output.token_ids == expected[2]
    stepped = []
    while engine.has_unfinished:
        stepped += engine.step()
    assert [token.token_id for token in stepped] == expected[1]
    assert {token.request_id for token in stepped} == {queued}
    assert stepped[-1].output.token_ids == expected[1]
    assert [token.logprob for token in stepped] == stepped[-1].output.logprobs
    assert [token.token_id for token in stream] == expected[0]


def test_a_dropped_stream_cancels_its_request(engine):
    stream = engine.stream([1, 2, 3], max_new_tokens=50)
    next(stream)
    assert engine.has_unfinished
    del stream
    gc.collect()
    assert_idle(engine)
    closed = engine.stream([1, 2, 3], max_new_tokens=50)
    closed.close()
    assert list(closed) == []
    assert closed.output.finish_reason == "cancelled"


def test_text_is_decoded_whole_and_in_pieces():
    model = ToyModel(vocab_size=257)
    engine = make_engine(model, tokenizer=byte_tokenizer())
    tokens = model.continue_greedily(engine.tokenizer("héé")["input_ids"], 30)
    (output,) = engine.generate(["héé"], max_new_tokens=30)
    assert output.token_ids == tokens
    assert output.text == engine.tokenizer.decode(tokens, skip_special_tokens=True)
    pieces = list(engine.stream("héé", max_new_tokens=30))
    assert [token.token_id for token in pieces] == tokens
    assert "".join(token.text for token in pieces) == output.text
    engine.add_request("héé", max_new_tokens=30)
    stepped = []
    while engine.has_unfinished:
        stepped += engine.step()
    assert "".join(token.text for token in stepped) == output.text
    assert_idle(engine)


def test_ids_are_made_up_or_given_and_free_again_at_the_end(engine):
    assert engine.add_request([1], request_id="mine", max_new_tokens=1) == "mine"
    made_up = engine.add_request([1], max_new_tokens=1)
    assert made_up != "mine"
    with pytest.raises(RequestError, match="request_id='mine' is a live request's already"):
        engine.add_request([2], request_id="mine")
    assert {token.request_id for token in engine.step()} == {"mine", made_up}
    assert engine.add_request([1], request_id="mine", max_new_tokens=1) == "mine"
    engine.step()


def test_weights_that_change_are_used_for_the_next_token_and_nothing_old_with_them(engine):
    model, prompt = engine.model, make_prompts(1)[0]
    stream = engine.stream(prompt, max_new_tokens=6)
    tokens = [next(stream).token_id for _ in range(3)]
    assert tokens == model.continue_greedily(prompt, 3)
    model.weight = 17
    tokens += [token.token_id for token in stream]
    assert tokens[3:] == model.continue_greedily(prompt + tokens[:3], 3)
    model.weight = 0
    assert tokens != model.continue_greedily(prompt, 6)


def test_weights_that_change_during_a_long_prompt_start_it_over(engine):
    prompt = make_prompts(1, longest=1)[0] * 100
    stream = engine.stream(prompt, max_new_tokens=2)
    engine._loop.advance()
    engine.model.weight = 17
    assert [t.token_id for t in stream] == engine.model.continue_greedily(prompt, 2)


def test_only_wanted_rows_have_logits(engine):
    engine.model.keeps_steps = True
    engine.generate(make_prompts(8), max_new_tokens=4)
    for step in engine.model.steps:
        assert len(step["logits_rows"]) <= len(step["context_lens"])
        assert len(step["input_ids"][0]) <= engine.config.max_batch_tokens
    phases = [{n == 1 for n in _counts(step)} for step in engine.model.steps]
    assert {True, False} in phases  # prompts and decodes shared a row


def _counts(step):
    return torch.tensor(step["cu_seqlens"]).diff().tolist()


def test_extents_are_the_known_length_of_each_request(engine):
    engine.model.keeps_steps = True
    engine.generate([[1] * 40], max_new_tokens=3)
    assert [step["extents"] for step in engine.model.steps] == [[40], [40], [41], [42]]


def test_an_engine_says_what_it_is():
    for has_rows, tokens in ((True, 400), (False, 0)):
        engine = make_engine(ToyModel(has_rows=has_rows))
        text = f"<Engine a model without a report; cache of {tokens} tokens, max_requests=8"
        assert repr(engine) == f"{text}>"
        engine.close()
        assert repr(engine) == f"{text}; closed>"


def test_validate_needs_something_to_compare_with(engine):
    with pytest.raises(RequestError, match="without an original model"):
        engine.validate()
    engine._validator = lambda size="quick", seed=0: (size, seed)
    assert engine.validate("full", seed=3) == ("full", 3)


def test_a_model_that_is_made_otherwise_is_refused_until_that_is_undone():
    """At once where nothing runs, and every so often where something does: never in each step."""
    engine = make_engine()
    model = engine.model
    looks = []
    plain = model.check_structure
    model.check_structure = lambda: (looks.append(1), plain())
    model.changed = "a module was replaced"
    with pytest.raises(RewriteError, match="a module was replaced"):
        engine.generate([[1, 2, 3]], max_new_tokens=2)
    assert_idle(engine)
    model.changed = ""
    name = engine.add_request([1, 2, 3], max_new_tokens=12)
    engine.step()
    engine._loop._check_due = float("inf")
    model.changed, seen = "a hook was added", len(looks)
    engine.step()
    assert len(looks) == seen
    engine._loop._check_due = 0
    with pytest.raises(RewriteError, match="a hook was added"):
        engine.step()
    model.changed = ""
    while engine.has_unfinished:
        outputs = [token.output for token in engine.step() if token.output]
    assert outputs[0].request_id == name
    assert outputs[0].token_ids == model.continue_greedily([1, 2, 3], 12)
    assert_idle(engine)
