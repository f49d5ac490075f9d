"""The engine in an event loop: every consumer its own tokens, and what becomes of those that go away."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from regraft.runtime import loop as loop_module
from regraft.runtime.asynchronous import AsyncEngine
from regraft.runtime.errors import (
    EngineClosedError,
    EngineFailedError,
    EngineFullError,
    RequestError,
)
from tests.runtime.engines import assert_idle, make_engine, make_prompts
from tests.runtime.tokenizers_made_here import byte_tokenizer
from tests.runtime.toy import ToyModel


def run(use, engine=None, **options):
    """Runs `use(engine, aengine)`; afterwards nothing is left of it anywhere."""
    engine = engine or make_engine()

    async def main():
        async with asyncio.timeout(60):
            async with AsyncEngine(engine, **options) as served:
                result = await use(engine, served)
        assert served.num_live == 0
        return result

    result = asyncio.run(main())
    assert not engine.background.is_alive
    assert_idle(engine)
    return result


def slow(engine, seconds=0.002):
    forward = engine.model.forward

    def delayed(inputs):
        time.sleep(seconds)
        return forward(inputs)

    engine.model.forward = delayed


@pytest.mark.parametrize("overlaps", [False, True])
def test_every_consumer_gets_its_own_tokens(overlaps):
    prompts = make_prompts(40, seed=2)

    async def use(engine, served):
        async def consume(prompt):
            stream = await served.stream(prompt, max_new_tokens=9)
            tokens = [token.token_id async for token in stream]
            assert stream.output.token_ids == tokens
            return tokens

        tasks = [asyncio.create_task(consume(prompt)) for prompt in prompts]
        outputs = await asyncio.gather(*(served.generate(p, max_new_tokens=5) for p in prompts))
        assert [out.token_ids for out in outputs] == [
            engine.model.continue_greedily(prompt, 5) for prompt in prompts
        ]
        assert await asyncio.gather(*tasks) == [
            engine.model.continue_greedily(prompt, 9) for prompt in prompts
        ]

    run(use, make_engine(overlaps=overlaps))


def test_a_request_that_has_ended_still_has_its_last_token(monkeypatch):
    """Its output is there a moment before: made long here, that moment loses nothing."""
    plain = loop_module._stream_token

    def late(request, token, text):
        time.sleep(0.003 if request.output is not None else 0)
        return plain(request, token, text)

    monkeypatch.setattr(loop_module, "_stream_token", late)

    async def use(engine, served):
        for index in range(10):
            stream = await served.stream([index], max_new_tokens=3)
            assert len([token async for token in stream]) == 3
            stream = await served.stream([index], max_new_tokens=3)
            read = []
            while tokens := await stream.read():
                read += tokens
                await asyncio.sleep(0)
            assert len(read) == 3
            reading = asyncio.to_thread(lambda i=index: list(engine.stream([i], max_new_tokens=3)))
            assert len(await reading) == 3

    run(use)


def test_text_comes_in_pieces():
    engine = make_engine(ToyModel(vocab_size=256), tokenizer=byte_tokenizer())

    async def use(engine, served):
        stream = await served.stream("hi", max_new_tokens=12)
        text = "".join([token.text async for token in stream])
        assert text == stream.output.text

    run(use, engine)


@pytest.mark.parametrize("how", ["close", "drop", "cancel", "leave"])
def test_a_consumer_that_goes_away_frees_its_pages_within_a_step(how):
    async def use(engine, served):
        slow(engine)
        other = asyncio.create_task(served.generate([7], max_new_tokens=60))
        if how == "cancel":

            async def consume():
                async for _ in await served.stream([1, 2], max_new_tokens=300):
                    pass

            task = asyncio.create_task(consume())
            while len(engine.live_requests()) < 2:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.wait([task])
        else:
            stream = await served.stream([1, 2], max_new_tokens=300)
            await anext(stream)
            if how == "close":
                await stream.aclose()
            elif how == "leave":
                async with stream:
                    pass
            del stream
        gc.collect()
        steps = engine.model.num_steps
        while len(engine.live_requests()) > 1:
            await asyncio.sleep(0)
        assert engine.model.num_steps <= steps + 1
        assert len((await other).token_ids) == 60

    run(use)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_request_rests_while_nobody_reads_it(overlaps):
    """Back-pressure: its tokens stop, others get on; it goes on when it is read again."""

    async def use(engine, served):
        stream = await served.stream([1, 2], max_new_tokens=50)
        while not stream._inbox.request.is_held:
            await asyncio.sleep(0.001)
        assert len((await served.generate([3], max_new_tokens=40)).token_ids) == 40
        assert len(stream._inbox.tokens) in (8, 8 + overlaps)  # one may be under way
        steps = engine.model.num_steps
        await asyncio.sleep(0.05)  # all that is live is held back: no step runs, and none spins
        assert engine.model.num_steps == steps
        assert [token.token_id async for token in stream] == engine.model.continue_greedily(
            [1, 2], 50
        )

    run(use, make_engine(overlaps=overlaps), max_unread=8)


def test_all_held_back_without_room_for_others_is_no_busy_wait():
    engine = make_engine(max_requests=1)

    async def use(engine, served):
        stream = await served.stream([1, 2], max_new_tokens=50)
        while not stream._inbox.request.is_held:
            await asyncio.sleep(0.001)
        waits = await served.stream([3], max_new_tokens=2)
        spent = time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - spent < 0.2
        assert len(await stream.read()) == 4
        await stream.result()
        assert len((await waits.result()).token_ids) == 2

    run(use, engine, max_unread=4)


def test_one_that_is_not_read_for_long_is_cancelled():
    async def use(engine, served):
        stream = await served.stream([1, 2], max_new_tokens=50)
        while stream.output is None:
            await asyncio.sleep(0.001)
        assert stream.output.finish_reason == "cancelled"
        assert len([token async for token in stream]) == 4

    run(use, max_unread=4, stall_seconds=0.02)


def test_a_request_past_its_time_is_cancelled():
    async def use(engine, served):
        slow(engine)
        stream = await served.stream([1, 2], max_new_tokens=300, timeout=0.05)
        with pytest.raises(TimeoutError):
            await stream.result()
        while stream.output is None:
            await asyncio.sleep(0.001)
        assert stream.output.finish_reason == "cancelled"
        assert (await served.generate([1], max_new_tokens=2, timeout=30)).finish_reason == "length"

    run(use)


def test_a_full_queue_makes_submitters_wait_or_is_told():
    async def use(engine, served):
        slow(engine)
        with engine.background.pause():
            first = [served.streams([[1]], max_new_tokens=3)[0] for _ in range(2)]
            with pytest.raises(EngineFullError, match="2 requests wait already") as caught:
                served.streams([[2]])
            assert caught.value.retry_after >= 1
            others = [
                asyncio.create_task(served.generate([i], max_new_tokens=3)) for i in range(20)
            ]
            await asyncio.sleep(0.02)
            assert not any(task.done() for task in others)
        outputs = await asyncio.gather(*others)
        assert [out.token_ids for out in outputs] == [
            engine.model.continue_greedily([i], 3) for i in range(20)
        ]
        for stream in first:
            await stream.result()

    run(use, max_waiting=2)


def test_those_who_wait_to_be_taken_in_are_told_of_the_end():
    engine = make_engine()

    async def main():
        served = AsyncEngine(engine, max_waiting=1)
        await served.start()
        with engine.background.pause():
            (held,) = served.streams([[1]], max_new_tokens=2)
            tasks = [asyncio.create_task(served.generate([2])) for _ in range(3)]
            await asyncio.sleep(0.01)
            tasks[0].cancel()
            await asyncio.sleep(0.01)
            drained = asyncio.create_task(served.drain())
            waited = asyncio.gather(*tasks, return_exceptions=True)
            results = await asyncio.wait_for(waited, 30)
        await asyncio.wait_for(drained, 30)
        assert held.output.finish_reason == "length"
        return results

    first, *others = asyncio.run(main())
    assert isinstance(first, asyncio.CancelledError)
    assert all(isinstance(other, EngineClosedError) for other in others)
    assert_idle(engine)


def test_several_sequences_are_several_streams():
    async def use(engine, served):
        with pytest.raises(RequestError, match="num_return_sequences=2 makes several requests"):
            await served.stream([1], num_return_sequences=2)
        streams = served.streams([[1]], num_return_sequences=2, max_new_tokens=3)
        assert [len((await stream.result()).token_ids) for stream in streams] == [3, 3]

    run(use)


def test_leaving_waits_for_what_is_under_way():
    engine = make_engine()

    async def main():
        async with AsyncEngine(engine) as served:
            task = asyncio.create_task(served.generate([1], max_new_tokens=100))
            await asyncio.sleep(0.01)
        with pytest.raises(EngineClosedError, match="takes no more requests"):
            await served.generate([1])
        return (await task).token_ids

    assert len(asyncio.run(main())) == 100
    assert_idle(engine)


def test_a_drain_has_an_end():
    engine = make_engine()
    slow(engine, 0.01)

    async def main():
        served = AsyncEngine(engine)
        await served.start()
        stream = await served.stream([1], max_new_tokens=300)
        start = time.perf_counter()
        await served.drain(timeout=0.05)
        assert time.perf_counter() - start < 2
        assert (await stream.result()).finish_reason == "cancelled"

    asyncio.run(main())
    assert_idle(engine)


def test_a_fatal_error_reaches_every_waiter():
    async def use(engine, served):
        slow(engine)
        tasks = [asyncio.create_task(served.generate([i], max_new_tokens=100)) for i in range(12)]
        await asyncio.sleep(0.05)
        engine.model.fails_in = 1
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineFailedError)
            assert "ArithmeticError: the toy broke" in str(result)
        with pytest.raises(EngineFailedError):
            await served.stream([1])

    run(use)


def test_a_bad_request_is_told_at_the_call_and_one_that_fails_fails_alone():
    def breaks(ids, scores):
        raise KeyError("x")

    async def use(engine, served):
        good = asyncio.create_task(served.generate([1], max_new_tokens=30))
        with pytest.raises(RequestError, match="outside the vocabulary"):
            await served.stream([64])
        bad = await served.generate([1], logits_processor=[breaks])
        assert bad.finish_reason == "error"
        assert "KeyError" in bad.error
        assert (await good).token_ids == engine.model.continue_greedily([1], 30)

    run(use)
