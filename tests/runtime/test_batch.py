"""The packed row's metadata against a naive twin, written token by token."""

from __future__ import annotations

import random

import pytest
import torch

from regraft.rewriter.declare import Reach
from regraft.runtime.batch import build_batch
from regraft.runtime.page_groups import Held
from regraft.runtime.pages import BlockTables
from regraft.runtime.request import Request, ScoreRequest, Span
from regraft.runtime.sampling_params import SamplingParams
from tests.runtime.toy import check_inputs


def make_spans(rng, page_size, tables, count):
    free = list(range(1, 400))
    rng.shuffle(free)
    slots = rng.sample(range(1, 30), count)
    spans = []
    for slot in slots:
        length = rng.randint(1, 50)
        tokens = [rng.randrange(1000) for _ in range(length)]
        if rng.random() < 0.3:
            request = ScoreRequest("s", 0, tokens, [length], torch.empty(0))
        else:
            request = Request("r", 0, tokens, SamplingParams(max_new_tokens=1))
        request.slot = slot
        request.held = [Held(0, [free.pop() for _ in range(-(-length // page_size))])]
        tables.extend(slot, 0, request.held[0].pages)
        start = rng.randrange(length)
        spans.append(Span(request, start, rng.randint(start + 1, length)))
    return spans


def naive(spans, page_size):
    """Field by field, as the table in batch.py says."""
    expected = {
        name: []
        for name in (
            *("input_ids", "position_ids", "context_lens", "slot_mapping", "state_slots"),
            *("extents", "logits_rows"),
        )
    }
    cu_seqlens = [0]
    for span in spans:
        request = span.request
        for t in range(span.start, span.end):
            wants = isinstance(request, ScoreRequest) or t == len(request.tokens) - 1
            if wants:
                expected["logits_rows"].append(len(expected["input_ids"]))
            expected["input_ids"].append(request.tokens[t])
            expected["position_ids"].append(t)
            page = request.held[0].pages[t // page_size]
            expected["slot_mapping"].append(page * page_size + t % page_size)
        cu_seqlens.append(len(expected["input_ids"]))
        expected["context_lens"].append(span.start)
        expected["state_slots"].append(request.slot)
        expected["extents"].append(len(request.tokens))
    return {**expected, "cu_seqlens": cu_seqlens}


@pytest.mark.parametrize("seed", range(30))
def test_equals_the_naive_twin(seed):
    rng = random.Random(seed)
    page_size = rng.choice([1, 3, 4, 16])
    tables = BlockTables(30, width=1)
    spans = make_spans(rng, page_size, tables, rng.randint(1, 12))
    batch = build_batch(spans, {Reach(): tables}, page_size, 1)
    expected = naive(spans, page_size)
    assert batch.num_logits == len(expected["logits_rows"])
    for name, values in expected.items():
        got = batch.inputs[name].flatten().tolist()
        assert got == (values or [0]), name
    for row, span in zip(batch.inputs["block_table"].tolist(), spans):
        needed = -(-span.end // page_size)
        assert row[:needed] == span.request.held[0].pages[:needed]
        owned = span.request.held[0].pages
        assert row == (owned + [0] * len(row))[: len(row)]
    check_inputs(batch.inputs, 1)


def test_nobody_wants_logits_of_an_unfinished_prompt():
    tables = BlockTables(4, width=1)
    request = Request("r", 0, [1, 2, 3, 4], SamplingParams(max_new_tokens=1))
    request.slot, request.held = 1, [Held(0, [1])]
    tables.extend(1, 0, [1])
    batch = build_batch([Span(request, 0, 3)], {Reach(): tables}, 4, 1)
    assert batch.num_logits == 0
    assert batch.inputs["logits_rows"].tolist() == [0]  # the graph always has a row to work on


def test_a_short_row_is_padded_with_a_sequence_in_scratch():
    tables = BlockTables(4, width=1)
    request = Request("r", 0, [5, 6, 7], SamplingParams(max_new_tokens=1))
    request.slot, request.held = 2, [Held(0, [3])]
    tables.extend(2, 0, [3])
    batch = build_batch([Span(request, 2, 3)], {Reach(): tables}, 4, 8)
    check_inputs(batch.inputs, 8)
    assert batch.num_logits == 1
    assert batch.inputs["logits_rows"].tolist() == [0]
    assert batch.inputs["cu_seqlens"].tolist() == [0, 1, 8]
    assert batch.inputs["context_lens"].tolist() == [2, 0]
    assert batch.inputs["state_slots"].tolist() == [2, 0]
    assert batch.inputs["slot_mapping"].tolist() == [3 * 4 + 2, 0, 1, 2, 3, 0, 1, 2]
    assert batch.inputs["block_table"].tolist() == [[3, 0], [0, 0]]


def test_a_model_without_rows_has_no_pages():
    tables = BlockTables(4, width=1)
    request = Request("r", 0, [5, 6, 7], SamplingParams(max_new_tokens=1))
    request.slot = 2
    batch = build_batch([Span(request, 0, 3)], {Reach(): tables}, 0, 1)
    assert batch.inputs["block_table"].tolist() == [[0]]
    assert batch.inputs["slot_mapping"].tolist() == [0, 0, 0]
