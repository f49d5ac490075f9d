"""Decode steps by bucket on the CPU, where a recorded step is simply called again: what is copied, padded and kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from regraft.runtime import cuda_graphs
from regraft.runtime.cuda_graphs import CaptureError, StepGraphs, buckets
from tests.runtime.engines import assert_idle, make_engine, make_prompts
from tests.runtime.test_fuzz import CROWDS, Crowd
from tests.runtime.toy import ToyModel


def called_again(call):
    """Records as a CUDA graph does: the result is always in the same place."""
    result = call().clone()
    return lambda: result.copy_(call()), result


def use_graphs(engine, monkeypatch, recorder=called_again):
    # Sequences that fill a bucket up share the scratch slot, which the toy would not allow.
    monkeypatch.setattr("tests.runtime.toy.check_inputs", lambda *a: None)
    runner = engine._loop.runner
    runner._graphs = StepGraphs(
        engine.model.forward, runner.pools, runner.last_tokens, engine.config.max_requests, 60, recorder,
        explain=lambda inputs: "toy.item", max_tokens=engine.config.max_batch_tokens,
    )  # fmt: skip
    return runner


def decode_steps(runner):
    return [key[:3] for key in runner._graphs._recorded if key.is_decode]


def steps_with_prompts(runner):
    return [key[:3] for key in runner._graphs._recorded if not key.is_decode]


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 9, 100, 128, 1000])
def test_buckets_hold_every_batch_and_waste_little(largest):
    sizes = buckets(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max(2, largest)
    for count in range(1, largest + 1):
        bucket = next(size for size in sizes if size >= count)
        assert bucket <= max(2, 2 * count, count + 8 + count // 8)
    assert len(sizes) < 16 + largest / 32


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("number", range(len(CROWDS)))
def test_a_crowd_gets_what_a_run_alone_gives(number, overlaps, monkeypatch):
    model, fields = CROWDS[number]
    crowd = Crowd(number, model, {**fields, "overlaps": overlaps})
    runner = use_graphs(crowd.engine, monkeypatch)
    crowd.run(200)
    crowd.check()
    assert decode_steps(runner)
    assert steps_with_prompts(runner)


def test_a_batch_that_shrinks_to_one_and_grows_again(monkeypatch):
    engine = make_engine(overlaps=True)
    runner = use_graphs(engine, monkeypatch)
    prompts = make_prompts(8, longest=3)
    for lengths in ([3, 6, 9, 12, 15, 18, 21, 24], [24, 2, 2, 2, 2, 2, 2, 2]):
        outputs = engine.generate(prompts, max_new_tokens=lengths)
        for prompt, length, output in zip(prompts, lengths, outputs):
            assert output.token_ids == ToyModel().continue_greedily(prompt, length)
    assert {bucket for _, bucket, _ in decode_steps(runner)} == {2, 4, 8}
    assert_idle(engine)


def test_long_sequences_have_a_graph_of_their_own(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_PAGES", (2, 5))
    engine = make_engine(page_size=4)
    runner = use_graphs(engine, monkeypatch)
    for length in (6, 15, 30, 5):
        prompt = list(range(length))
        (output,) = engine.generate([prompt], max_new_tokens=2)
        assert output.token_ids == ToyModel().continue_greedily(prompt, 2)
    assert decode_steps(runner) == [(2, 2, 2), (2, 2, 5), (2, 2, 60)]


def test_a_step_with_prompts_is_filled_up_to_its_bucket(monkeypatch):
    engine = make_engine(max_batch_tokens=64, chunk_size=4, max_requests=4)
    runner = use_graphs(engine, monkeypatch)
    # Tokens of two prompts, and the buckets then recorded: another sequence takes what lacks to a multiple of four.
    for length, graphs in (
        (61, set()), (62, {(64, 5)}), (64, {(64, 5)}), (64, {(64, 5), (64, 2)}), (57, {(64, 5), (64, 2)}),
        (59, {(64, 5), (64, 2), (60, 5)}),
    ):  # fmt: skip
        prompts = [list(range(40)), list(range(length - 40))]
        outputs = engine.generate(prompts, max_new_tokens=2)
        for prompt, output in zip(prompts, outputs):
            assert output.token_ids == ToyModel().continue_greedily(prompt, 2)
        assert {key[:2] for key in steps_with_prompts(runner)} == graphs, length
    assert_idle(engine)


def test_a_step_of_as_many_requests_as_there_may_be_is_filled_up_too(monkeypatch):
    engine = make_engine(max_batch_tokens=64, chunk_size=4, max_requests=4)
    runner = use_graphs(engine, monkeypatch)
    prompts = [list(range(15)), list(range(16)), list(range(16)), list(range(15))]
    for _ in range(2):
        outputs = engine.generate(prompts, max_new_tokens=2)
        for prompt, output in zip(prompts, outputs):
            assert output.token_ids == ToyModel().continue_greedily(prompt, 2)
    assert {key[:2] for key in steps_with_prompts(runner)} == {(64, 5)}
    assert_idle(engine)


def refuse(call):
    raise CaptureError("operation not permitted when stream is capturing")


def test_a_step_that_cannot_be_recorded_runs_without_and_says_so(monkeypatch):
    engine = make_engine()
    runner = use_graphs(engine, monkeypatch, refuse)
    (output,) = engine.generate([[1, 2, 3]], max_new_tokens=4)
    assert output.token_ids == ToyModel().continue_greedily([1, 2, 3], 4)
    (note,) = runner._notes
    assert note.startswith(
        "decode steps run without CUDA graphs: toy.item cannot be recorded: oper"
    )


def test_a_step_with_prompts_that_cannot_be_recorded_leaves_decode_steps_alone(monkeypatch):
    def refuse_first(call):
        if num_calls[0] == 0:
            num_calls[0] += 1
            refuse(call)
        return called_again(call)

    num_calls = [0]
    engine = make_engine(max_batch_tokens=16, max_requests=4)
    runner = use_graphs(engine, monkeypatch, refuse_first)
    (output,) = engine.generate([list(range(40))], max_new_tokens=4)
    assert output.token_ids == ToyModel().continue_greedily(list(range(40)), 4)
    (note,) = runner._notes
    assert note.startswith(
        "steps with prompts run without CUDA graphs: toy.item cannot be recorded: oper"
    )
    assert decode_steps(runner)
    assert not steps_with_prompts(runner)


def test_a_step_that_must_be_recorded_and_cannot_is_an_error(monkeypatch):
    engine = make_engine()
    runner = use_graphs(engine, monkeypatch, refuse)
    runner._needs_graphs = True
    with pytest.raises(CaptureError, match=r"toy\.item cannot be recorded"):
        engine.generate([[1, 2, 3]], max_new_tokens=4)


def never_updates_pages(monkeypatch):
    upload = cuda_graphs.upload
    monkeypatch.setattr(
        cuda_graphs, "upload", lambda arrays, device: {n: t * 0 for n, t in upload(arrays, device).items()}
    )  # fmt: skip


def takes_pending_for_a_token(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "PENDING", -2)


def takes_the_slots_of_others(monkeypatch):
    def backwards(arrays):
        return np.resize(arrays["state_slots"][::-1], arrays["cu_seqlens"][-1])

    monkeypatch.setattr(cuda_graphs, "_token_slots", backwards)


@pytest.mark.parametrize(
    ("fault", "number"),
    [(never_updates_pages, 0), (takes_pending_for_a_token, 0), (takes_the_slots_of_others, 1)],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_a_fault_is_seen(fault, number, monkeypatch):
    fault(monkeypatch)
    model, fields = CROWDS[number]
    crowd = Crowd(number, model, {**fields, "overlaps": True})
    use_graphs(crowd.engine, monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        run_and_check(crowd)


def run_and_check(crowd):
    crowd.run(200)
    crowd.check()


@pytest.mark.gpu
def test_a_real_graph_follows_its_inputs_and_names_what_waits():
    recorder = cuda_graphs.CudaRecorder()
    x = torch.zeros(4, device="cuda")
    replay, result = recorder(lambda: x * 2 + 1)
    for value in (3.0, -1.0):
        x.fill_(value)
        replay()
        assert result.tolist() == [2 * value + 1] * 4
    stream = torch.cuda.current_stream()
    with pytest.raises(CaptureError):
        recorder(lambda: x * x.sum().item())
    replay()
    assert result.tolist() == [-1.0] * 4
    assert torch.cuda.current_stream() == stream
    assert torch.randn(4, device="cuda").isfinite().all()
    replay, result = recorder(lambda: x * 3)
    replay()
    assert result.tolist() == [-3.0] * 4
