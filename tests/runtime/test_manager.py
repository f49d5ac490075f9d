"""The manager: whose results are whose, what is lost (nothing), and what ends it."""

from __future__ import annotations

import queue
import threading
import time

import pytest
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import RequestStatus

from regraft.runtime import manager as manager_module
from regraft.runtime.errors import EngineBusyError, EngineFailedError, RequestError
from regraft.runtime.manager import Manager
from tests.runtime.engines import assert_idle, make_engine, make_prompts


@pytest.fixture(params=[False, True], ids=["", "overlaps"])
def engine(request):
    engine = make_engine(overlaps=request.param)
    yield engine
    engine.background.fatal_error = None
    assert not engine.background.is_alive, "a manager was not stopped"
    assert_idle(engine)


@pytest.fixture
def manager(engine):
    manager = Manager(engine)
    manager.start()
    yield manager
    manager.stop(timeout=60)


def slow(engine, seconds=0.005):
    """Makes each step take so long at least."""
    forward = engine.model.forward

    def delayed(inputs):
        time.sleep(seconds)
        return forward(inputs)

    engine.model.forward = delayed


def test_results_never_cross_between_consumers(engine, manager):
    """One iterates over whatever comes, others over single requests, all at once."""
    prompts = make_prompts(30, seed=3)
    expected = [engine.model.continue_greedily(prompt, 9) for prompt in prompts]
    streamed = [manager.add_request(p, max_new_tokens=9, streaming=True) for p in prompts[:10]]
    claims = [manager.request_id_iter(name) for name in streamed]
    waited = [manager.add_request(p, max_new_tokens=9) for p in prompts[10:20]]
    got: dict[str, list] = {}

    def read(name, results):
        got[name] = [result.generated_tokens for result in results]

    threads = [threading.Thread(target=read, args=pair) for pair in zip(streamed, claims)]
    threads += [
        threading.Thread(target=lambda n=n: read(n, [manager.get_result(n)])) for n in waited
    ]
    for thread in threads:
        thread.start()
    while any(
        box.num_claims == 0 for name, box in manager._results._boxes.items() if name in waited
    ):
        time.sleep(0.001)
    for prompt in prompts[20:]:
        manager.add_request(prompt, max_new_tokens=9)
    rest = [manager.get_result() for _ in range(10)]
    for thread in threads:
        thread.join()
    assert {tuple(r.generated_tokens) for r in rest} == {tuple(e) for e in expected[20:]}
    for name, tokens in zip(streamed, expected[:10]):
        assert got[name] == [tokens[:n] for n in range(1, 10)] + [tokens] or got[name] == [
            tokens[:n] for n in range(1, 10)
        ]
        assert got[name][-1] == tokens
    assert [got[name][-1] for name in waited] == expected[10:20]


def test_a_result_that_a_waiter_gave_up_on_is_anybodys_again(engine, manager):
    with manager.pause():
        name = manager.add_request([1, 2], max_new_tokens=2)
        assert manager.get_result(name, timeout=0.01) is None
        assert manager.get_result(timeout=0.01) is None
    assert manager.get_result().request_id == name
    with pytest.raises(RequestError, match=f"no request '{name}' is under way or has a result"):
        manager.get_result(name)


def test_nothing_is_lost_when_it_stops(engine, manager):
    names = manager.add_requests(make_prompts(12), max_new_tokens=7)
    manager.stop()
    assert not manager.is_running()
    assert {result.request_id for result in manager} == set(names)
    assert manager.get_result() is None
    with pytest.raises(RequestError, match="the manager was stopped: start it again"):
        manager.add_request([1])
    manager.start()
    again = manager.add_requests([[5], [6]], max_new_tokens=3)
    assert manager.get_result(again[1]).generated_tokens == engine.model.continue_greedily([6], 3)
    assert manager.get_result().request_id == again[0]


def test_a_hard_stop_fails_what_is_under_way(engine, manager):
    slow(engine)
    manager.add_requests(make_prompts(9), max_new_tokens=50)
    manager.stop(hard_stop=True)
    results = list(manager)
    assert len(results) == 9
    assert {(r.status, r.error) for r in results} == {(RequestStatus.FAILED, "cancelled")}


def test_requests_may_be_added_before_the_start(engine):
    manager = Manager(engine, GenerationConfig(max_new_tokens=3))
    name = manager.add_request([1, 2])
    assert manager.get_result(name) is None  # nothing runs
    manager.start()
    assert len(manager.get_result(name).generated_tokens) == 3
    manager.stop()


def test_a_fatal_error_reaches_every_waiter(engine, manager):
    slow(
        engine, 0.05
    )  # five seconds for a hundred tokens: all still wait when the step fails, on a busy machine too
    names = manager.add_requests(make_prompts(6), max_new_tokens=100)
    results = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: manager.get_result(n)}))
        for n in names
    ]
    blocked = []
    threads.append(threading.Thread(target=lambda: blocked.append(run_and_catch(engine))))
    for thread in threads:
        thread.start()
    while len(engine._loop.live) < 7:
        time.sleep(0.001)
    time.sleep(0.02)
    engine.model.fails_in = 1
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert {r.error for r in results.values()} == {"ArithmeticError: the toy broke"}
    assert set(results) == set(names)
    assert isinstance(manager.fatal_error, ArithmeticError)
    assert "ArithmeticError: the toy broke" in str(blocked[0])
    assert not manager.is_running()
    with pytest.raises(EngineFailedError, match="the manager takes no more: the toy broke"):
        manager.add_request([1])
    manager.start()  # anew
    name = manager.add_request([1], max_new_tokens=2)
    assert manager.get_result(name).generated_tokens == engine.model.continue_greedily([1], 2)


def run_and_catch(engine):
    with pytest.raises(EngineFailedError) as caught:
        engine.generate([[3]], max_new_tokens=100)
    return caught.value


def test_the_engines_own_calls_wait_for_the_thread(engine, manager):
    name = manager.add_request([9, 8], max_new_tokens=40)
    (out,) = engine.generate([[1, 2]], max_new_tokens=5)
    assert out.token_ids == engine.model.continue_greedily([1, 2], 5)
    assert [t.token_id for t in engine.stream([1, 2], max_new_tokens=5)] == out.token_ids
    assert len(engine.score([[1, 2, 3]])[0]) == 3
    with pytest.raises(EngineBusyError, match="a background thread runs this engine's steps"):
        engine.step()
    assert len(manager.get_result(name).generated_tokens) == 40


def test_an_engine_that_is_closed_ends_its_managers(caplog):
    engine = make_engine()
    slow(engine)
    manager = Manager(engine)
    manager.start()
    names = manager.add_requests([[1], [2]], max_new_tokens=300)
    waiter = manager.request_id_iter(names[0])
    engine.close()
    assert next(waiter).error == "cancelled"
    assert manager.get_result().error == "cancelled"
    assert manager.get_result() is None
    assert not manager.is_running()
    assert not caplog.records
    manager.stop()


def test_a_thread_that_ends_as_another_starts_leaves_one(engine):
    managers = [Manager(engine) for _ in range(4)]

    def use(manager):
        for index in range(25):
            manager.start()
            name = manager.add_request([index], max_new_tokens=1)
            assert manager.get_result(name, timeout=30) is not None
            manager.stop(timeout=30)

    threads = [threading.Thread(target=use, args=(manager,)) for manager in managers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert manager_is_idle(managers)


def manager_is_idle(managers):
    return not any(manager.is_running() or manager._results._boxes for manager in managers)


def test_two_managers_share_an_engine(engine, manager):
    other = Manager(engine)
    other.start()
    mine, theirs = manager.add_request([1], max_new_tokens=4), other.add_request([2])
    other.stop()
    assert manager.is_running()
    assert not other.is_running()
    assert other.get_result().request_id == theirs
    assert manager.get_result().request_id == mine


def test_a_paused_engine_runs_no_step_and_loses_nothing(engine, manager):
    slow(engine)
    names = manager.add_requests([[1], [2]], max_new_tokens=30)
    with manager.pause():
        steps = engine.model.num_steps
        time.sleep(0.03)
        assert engine.model.num_steps == steps
        engine.model.weight = 5  # changed in place: what comes is of the new weights
        with pytest.raises(RuntimeError, match="stop would wait for ever within pause"):
            manager.stop()
    assert [len(manager.get_result(name).generated_tokens) for name in names] == [30, 30]
    manager.stop()
    with pytest.raises(RuntimeError, match="nothing runs that could be paused"):
        manager.pause()


def test_an_idle_thread_costs_nothing(engine, manager):
    manager.get_result(manager.add_request([1], max_new_tokens=2))
    steps, spent = engine.model.num_steps, time.process_time()
    manager.get_result(timeout=0.3)
    assert time.process_time() - spent < 0.15
    assert engine.model.num_steps == steps


def test_a_full_queue_holds_the_submitter_back(engine, monkeypatch):
    monkeypatch.setattr(manager_module, "FULL_QUEUE_SECONDS", 0.05)
    manager = Manager(engine, None, ContinuousBatchingConfig(max_queue_size=3))
    manager.start()
    with manager.pause():
        manager.add_requests([[1]] * 3, max_new_tokens=3)
        with pytest.raises(queue.Full, match="3 requests wait already"):
            manager.add_request([1])
    monkeypatch.setattr(manager_module, "FULL_QUEUE_SECONDS", 60)
    assert len(manager.add_requests([[1]] * 40, max_new_tokens=3)) == 40
    manager.stop()
    assert len(list(manager)) == 43


def test_a_bad_request_touches_nobody(engine, manager):
    name = manager.add_request([1, 2], max_new_tokens=20)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        manager.add_requests([[1], [99]])
    with pytest.raises(RequestError, match="'temprature' is no field"):
        manager.add_request([1], temprature=2)
    with pytest.raises(RequestError, match="has a result that nobody has taken yet"):
        manager.add_request([1], request_id=name)
    assert manager.get_result(name).generated_tokens == engine.model.continue_greedily([1, 2], 20)
    assert manager.add_request([1], request_id=name) == name


def test_results_taken_by_id_leave_nothing_behind(engine, manager):
    other = manager.add_request([7], max_new_tokens=3)
    for index in range(60):
        name = manager.add_request([index], max_new_tokens=5, streaming=True)
        assert len(list(manager.request_id_iter(name))) == 5
    assert len(manager._results._arrived) <= 66
    assert manager.get_result().request_id == other
    assert manager._results._boxes == {}


def test_random_traffic_from_many_threads(engine, manager):
    """Each thread gets what it asked for, whole, whatever is cancelled meanwhile."""
    prompts, wrong = make_prompts(60, seed=5, longest=25), []

    def use(worker):
        for index in range(worker, 60, 4):
            streaming = index % 3 == 0
            name = manager.add_request(prompts[index], max_new_tokens=8, streaming=streaming)
            results = list(manager.request_id_iter(name))
            if index % 5 == 0:
                manager.cancel_request(name)  # over already: nothing
            if results[-1].generated_tokens != engine.model.continue_greedily(prompts[index], 8):
                wrong.append(index)

    threads = [threading.Thread(target=use, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert manager._results._boxes == {}
