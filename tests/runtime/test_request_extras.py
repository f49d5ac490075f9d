"""What only some requests ask for: several sequences, likeliest tokens, the prompt's log-probabilities,
processors of their own."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from regraft.runtime.errors import RequestError
from regraft.runtime.sampler import build_warpers
from tests.runtime.engines import assert_idle, make_engine, make_prompts

PROMPTS = make_prompts(5, longest=40)


class Only(LogitsProcessor):
    """Leaves the token after the last one; notes what it saw."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        mask = torch.ones_like(scores, dtype=torch.bool)
        mask[:, (input_ids[0, -1] + 1) % scores.shape[1]] = False
        return scores.masked_fill(mask, -torch.inf)


class Breaks(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise KeyError("no such thing")


def test_a_processor_of_the_callers_sees_the_whole_history():
    engine, processor = make_engine(), Only()
    (out,) = engine.generate([[5, 9]], max_new_tokens=4, logits_processor=[processor])
    assert out.token_ids == [10, 11, 12, 13]
    assert processor.seen == [[5, 9], [5, 9, 10], [5, 9, 10, 11], [5, 9, 10, 11, 12]]
    two = engine.generate(
        [[5], [20]], max_new_tokens=2, logits_processor=[LogitsProcessorList([Only()]), []]
    )
    assert two[0].token_ids == [6, 7]
    assert two[1].token_ids == engine.model.continue_greedily([20], 2)


def test_a_processor_of_the_callers_is_used_in_place_of_the_built_in_one():
    engine = make_engine()
    prompt, own = PROMPTS[1], RepetitionPenaltyLogitsProcessor(penalty=1.0)
    fields = {"max_new_tokens": 8, "repetition_penalty": 9.0}
    (plain,) = engine.generate([prompt], max_new_tokens=8)
    (penalised,) = engine.generate([prompt], **fields)
    (replaced,) = engine.generate([prompt], logits_processor=[own], **fields)
    assert penalised.token_ids != plain.token_ids == replaced.token_ids


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (Breaks(), "a logits processor raised KeyError: 'no such thing'"),
        (
            lambda ids, scores: scores[:, :3],
            "raised ValueError: scores .1, 64. came back as .1, 3.",
        ),
        (lambda ids, scores: scores * float("nan"), "the logits after its token 0 are not finite"),
        (lambda ids, scores: torch.full_like(scores, -torch.inf), "are not finite"),
    ],
)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_processor_that_breaks_ends_its_request_alone(processor, message, sampled):
    engine = make_engine()
    fields = {"max_new_tokens": 6, "do_sample": sampled, "seed": 4}
    alone = [engine.generate([prompt], **fields)[0].token_ids for prompt in PROMPTS]
    engine.add_request([1], logits_processor=[processor], **fields)
    together = engine.generate(PROMPTS, **fields)
    assert [out.token_ids for out in together] == alone
    (end,) = engine.step()
    assert end.output.finish_reason == "error"
    assert re.search(message, end.output.error)
    assert_idle(engine)


@pytest.mark.parametrize("overlaps", [False, True])
def test_likeliest_tokens_are_of_the_distribution_drawn_from(overlaps):
    engine = make_engine(overlaps=overlaps)
    sampling = {"do_sample": True, "temperature": 40.0, "top_k": 5, "seed": 1}
    for fields in ({}, sampling):
        for out in engine.generate(PROMPTS, max_new_tokens=5, top_logprobs=4, **fields):
            assert len(out.top_logprobs) == len(out.token_ids) == 5
            tokens = out.prompt_token_ids + out.token_ids
            for i, pairs in enumerate(out.top_logprobs):
                row = engine.model.logits_of(tokens[: len(out.prompt_token_ids) + i])[-1:]
                if fields:
                    (params,) = [r.params for r in engine._factory.make([[1]], None, fields)]
                    row = build_warpers(params.warp, row.device)(torch.empty(1, 0), row)
                values, ids = row.log_softmax(-1)[0].topk(4)
                assert pairs == list(zip(ids.tolist(), values.tolist()))
                own = dict(pairs).get(out.token_ids[i], out.logprobs[i])
                assert own == pytest.approx(out.logprobs[i], rel=1e-6)
    (few,) = engine.generate([[1]], do_sample=True, top_k=2, top_logprobs=9, max_new_tokens=1)
    assert len(few.top_logprobs[0]) == 2  # the others are impossible
    assert engine.generate([[1]], max_new_tokens=1)[0].top_logprobs is None


def test_likeliest_tokens_come_with_the_stream():
    engine = make_engine()
    (whole,) = engine.generate([PROMPTS[0]], max_new_tokens=5, top_logprobs=2)
    streamed = list(engine.stream(PROMPTS[0], max_new_tokens=5, top_logprobs=2))
    assert [token.top_logprobs for token in streamed] == whole.top_logprobs
    assert [token.logprob for token in streamed] == whole.logprobs


@pytest.mark.parametrize(
    "cache_tokens", [400, 72]
)  # the second: too few, so that some are preempted
def test_log_probabilities_of_the_prompt(cache_tokens):
    engine = make_engine(cache_tokens=cache_tokens)
    asked = [True, False, True, True, True]
    outs = engine.generate(PROMPTS, max_new_tokens=9, prompt_logprobs=asked, top_logprobs=3)
    assert outs[1].prompt_logprobs is None
    for out, prompt, wanted in zip(outs, PROMPTS, asked):
        assert out.token_ids == engine.model.continue_greedily(prompt, 9)
        if not wanted:
            continue
        rows = engine.model.logits_of(prompt).log_softmax(-1)
        expected = [rows[i, token].item() for i, token in enumerate(prompt[1:])]
        assert out.prompt_logprobs == [None, *expected]
        assert out.prompt_top_logprobs[0] == []
        for row, pairs in zip(rows, out.prompt_top_logprobs[1:]):
            values, ids = row.topk(3)
            assert pairs == list(zip(ids.tolist(), values.tolist()))
    assert_idle(engine)


def test_several_sequences_of_one_prompt():
    engine = make_engine()
    fields = {"do_sample": True, "temperature": 60.0, "max_new_tokens": 12, "top_k": 0}
    outs = engine.generate(PROMPTS[:2], num_return_sequences=[3, 1], seed=[7, 8], **fields)
    assert [out.prompt_token_ids for out in outs] == [PROMPTS[0]] * 3 + [PROMPTS[1]]
    first = outs[0].request_id
    names = [first, f"{first}__child#0", f"{first}__child#1"]
    assert [out.request_id for out in outs[:3]] == names
    assert len({tuple(out.token_ids) for out in outs[:3]}) == 3
    again = engine.generate(PROMPTS[:1], num_return_sequences=3, seed=7, **fields)
    assert [out.token_ids for out in again] == [out.token_ids for out in outs[:3]]
    (alone,) = engine.generate(PROMPTS[:1], seed=7, **fields)
    assert alone.token_ids == outs[0].token_ids
    with pytest.raises(RequestError, match="num_return_sequences=2 makes several requests"):
        engine.stream([1], num_return_sequences=2)
    assert_idle(engine)
