"""Each public name of transformers' continuous batching: same here, better, or an error that names it.

ROWS is the README's table; a name that transformers adds has no row and turns these tests red.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousMixin
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from regraft.runtime import batching_config
from regraft.runtime.errors import RequestError
from regraft.runtime.install import Installation, install, uninstall
from regraft.runtime.manager import Manager
from tests.runtime.engines import assert_idle, make_engine, make_prompts
from tests.runtime.toy import ToyModel

PROMPTS = make_prompts(4, longest=12)
TOY = ToyModel()


class Model(nn.Module, ContinuousMixin):
    """What the toy engine is installed on; its own continuous batching would need a config."""

    def __init__(self):
        super().__init__()
        self.generation_config = GenerationConfig(max_new_tokens=6)


@pytest.fixture
def installation():
    model = Model()
    with install(model, make_engine) as installation:
        installation.model = model
        yield installation
        assert_idle(installation.engine)


@pytest.fixture
def manager(installation):
    with installation.model.continuous_batching_context_manager() as manager:
        yield manager


def greedy(prompt, count=6):
    return TOY.continue_greedily(prompt, count)


# --- methods of the model ---------------------------------------------------------------------------


def generate_batch(installation, manager):
    """Same arguments and results; a bad prompt raises instead of being logged, a second call loses nothing."""
    for _ in range(2):
        results = installation.model.generate_batch(PROMPTS, max_new_tokens=5)
        assert [r.generated_tokens for r in results.values()] == [greedy(p, 5) for p in PROMPTS]
    with pytest.raises(RequestError, match="outside the vocabulary"):
        installation.model.generate_batch([[1], [77]])
    with pytest.raises(RequestError, match="'max_tokens' is no field"):
        installation.model.generate_batch([[1]], max_tokens=3)


def init_continuous_batching(installation, manager):
    """Same; the model's attention is not switched, so that there is nothing to forget to switch back."""
    made = installation.model.init_continuous_batching(GenerationConfig(max_new_tokens=3))
    assert isinstance(made, Manager)
    assert not made.is_running()
    assert made.generation_config.max_new_tokens == 3


def continuous_batching_context_manager(installation, manager):
    """Same; after an error inside, what is under way is stopped at once."""
    with installation.model.continuous_batching_context_manager(persistent_manager=True) as one:
        name = one.add_request([1])
    assert not one.is_running()
    assert one.get_result().request_id == name
    assert installation.model.init_continuous_batching() is one
    session = installation.model.continuous_batching_context_manager()
    one = session.__enter__()
    one.add_request([1], max_new_tokens=300)
    assert not session.__exit__(KeyError, KeyError(), None)
    assert one.get_result().error == "cancelled"


def destroy_cached_continuous_batching_manager(installation, manager):
    """Same."""
    with installation.model.continuous_batching_context_manager(persistent_manager=True) as one:
        pass
    installation.model.destroy_cached_continuous_batching_manager()
    assert installation.model.init_continuous_batching() is not one
    installation.model.destroy_cached_continuous_batching_manager()


# --- methods of the manager -------------------------------------------------------------------------


def switch_to_cb_friendly_attn(installation, manager):
    """Nothing: the model is not changed."""
    before = dict(vars(installation.model))
    assert manager.switch_to_cb_friendly_attn(installation.model) is None
    assert dict(vars(installation.model)) == before


def warmup(installation, manager):
    """Same."""
    assert manager.warmed_up
    manager.warmup()


def is_running(installation, manager):
    """Same."""
    assert manager.is_running()
    manager.stop()
    assert not manager.is_running()


def start(installation, manager):
    """Same, also after a stop or a fatal error; twice is nothing."""
    manager.start()
    manager.stop()
    manager.start()
    assert len(manager.get_result(manager.add_request([1])).generated_tokens) == 6


def stop(installation, manager):
    """What is finished can still be taken, and a request after it raises instead of being dropped."""
    name = manager.add_request([1])
    manager.stop(block=True, timeout=60)
    assert [result.request_id for result in manager] == [name]
    with pytest.raises(RequestError, match="the manager was stopped"):
        manager.add_request([1])


def join(installation, manager):
    """Same."""
    manager.add_request([1])
    manager.stop(block=False)
    manager.join(0.0, timeout=60)
    assert not manager.is_running()


def destroy(installation, manager):
    """Same."""
    manager.add_request([1], max_new_tokens=300)
    manager.destroy()
    manager.destroy()
    assert not manager.is_running()


def pause(installation, manager):
    """Same; weights changed within are used from then on, and everything cached of the old ones is left."""
    with manager.pause():
        name = manager.add_request([1, 2])
        installation.engine.model.weight = 3
    changed = ToyModel()
    changed.weight = 3
    assert manager.get_result(name).generated_tokens == changed.continue_greedily([1, 2], 6)
    installation.engine.model.weight = 0


def add_request(installation, manager):
    """Every field of the request's own, processors over the whole history; a wrong field raises."""
    name = manager.add_request(
        PROMPTS[0], request_id="mine", max_new_tokens=4, repetition_penalty=50.0, eos_token_id=-1
    )
    assert name == "mine"
    (alone,) = installation.engine.resized(installation.engine.config).generate(
        PROMPTS[:1], max_new_tokens=4, repetition_penalty=50.0
    )
    assert manager.get_result("mine").generated_tokens == alone.token_ids
    stop = greedy(PROMPTS[1])[2]
    ended = manager.get_result(manager.add_request(PROMPTS[1], eos_token_id=[stop]))
    assert ended.generated_tokens == greedy(PROMPTS[1])[: len(ended.generated_tokens)]
    assert ended.generated_tokens[-1] == stop
    with pytest.raises(RequestError, match="num_beams=3 is not supported"):
        manager.add_request([1], num_beams=3)


def add_requests(installation, manager):
    """Same; all prompts are checked before one is submitted."""
    names = manager.add_requests(PROMPTS, max_new_tokens=3, record_timestamps=True)
    for name, prompt in zip(names, PROMPTS):
        result = manager.get_result(name)
        assert result.generated_tokens == greedy(prompt, 3)
        assert len(result.timestamps) == 3
    with pytest.raises(RequestError):
        manager.add_requests([[1], []])
    assert manager.get_result(timeout=0.05) is None


def cancel_request(installation, manager):
    """The result comes, as failed: who waits for it need not wait for ever."""
    with manager.pause():
        name = manager.add_request([1], max_new_tokens=300)
        manager.cancel_request(name)
        result = manager.get_result(name)
        assert (result.status, result.error) == (RequestStatus.FAILED, "cancelled")
    manager.cancel_request("nobody")


def get_result(installation, manager):
    """By id takes no other request's result, and does not poll; an id that cannot come raises."""
    first, second = manager.add_requests(PROMPTS[:2])
    assert manager.get_result(second).request_id == second
    assert manager.get_result().request_id == first
    assert manager.get_result(timeout=0.01) is None
    with pytest.raises(RequestError, match="no request 'nobody'"):
        manager.get_result("nobody")


def request_id_iter(installation, manager):
    """Sees its own request alone, to the end, though the manager stops meanwhile."""
    name, other = manager.add_requests(PROMPTS[:2], streaming=True)
    results = manager.request_id_iter(name)
    manager.stop()
    sizes = [len(result.generated_tokens) for result in results]
    assert sizes == [1, 2, 3, 4, 5, 6]
    assert {result.request_id for result in manager} == {other}


def register_result_handler(installation, manager):
    """Same; results that were there before the handler are called back too."""

    async def use():
        done, results = asyncio.Event(), []

        def take(result):
            results.append(result)
            if result.is_finished():
                done.set()

        name = manager.add_request(PROMPTS[0], streaming=True)
        manager.register_result_handler(name, take)
        await asyncio.wait_for(done.wait(), 60)
        assert [len(r.generated_tokens) for r in results] == [1, 2, 3, 4, 5, 6]

    asyncio.run(use())


# --- fields of a result -----------------------------------------------------------------------------


def fields_of_a_result(installation, manager):
    name = manager.add_request(PROMPTS[0], record_timestamps=True)
    result = manager.get_result(name)
    assert isinstance(result, GenerationOutput)
    expected = {
        "request_id": name,
        "prompt_ids": PROMPTS[0],
        "generated_tokens": greedy(PROMPTS[0]),
        "error": None,
        "status": RequestStatus.FINISHED,
    }
    assert {field: getattr(result, field) for field in expected} == expected
    assert len(result.logprobs) == len(result.timestamps) == 6
    times = [result.created_time, *result.lifespan[:1], *result.timestamps]
    assert times == sorted(times)
    assert result.lifespan[1] == result.timestamps[-1]


# --- fields of ContinuousBatchingConfig -------------------------------------------------------------

OTHER_VALUES = {
    "page_size": 8,
    "max_blocks_per_request": 3,
    "allow_block_sharing": False,
    "use_async_batching": True,
    "q_padding_interval_size": 4,
    "kv_padding_interval_size": 4,
    "default_compile_level": 2,
    "safety_margin": 0.3,
    "auto_switch_to_flash": False,
    "cpu_offload_space": 1.0,
    "cpu_offload_space_safety_threshold": 0.5,
    "per_request_processors": True,
    "drop_unsupported_processors": False,
    "disable_nccl_graph_mixing": False,
    "cpu_group_timeout": None,
    "varlen_compile_config": {},
    "decode_compile_config": {},
    "use_default_compile_configs": False,
    "max_cached_graphs": 3,
    "block_size": 8,
}


def config_without_effect(name):
    def check(installation, manager):
        manager.stop()
        config = ContinuousBatchingConfig(**{name: OTHER_VALUES[name]}, return_logprobs=True)
        engine = installation.engine
        results = installation.model.generate_batch(PROMPTS, continuous_batching_config=config)
        assert [r.generated_tokens for r in results.values()] == [greedy(p) for p in PROMPTS]
        assert installation.engine is engine

    return check


def config_size(name, value, field, expected):
    def check(installation, manager):
        manager.stop()
        config = ContinuousBatchingConfig(**{name: value})
        if name == "use_cuda_graph":
            with pytest.raises(RequestError, match="cuda_graphs=True, but the model is on cpu"):
                installation.model.generate_batch(PROMPTS, continuous_batching_config=config)
            assert installation.model.generate_batch([[1]])  # goes on as it was
            return
        results = installation.model.generate_batch(PROMPTS, continuous_batching_config=config)
        assert [r.generated_tokens for r in results.values()] == [greedy(p) for p in PROMPTS]
        assert getattr(installation.engine.config, field) == expected
        installation.model.generate_batch(PROMPTS)  # and back to its own
        assert installation.engine.config == installation._base

    return check


def return_logprobs(installation, manager):
    for value in (True, False):
        config = ContinuousBatchingConfig(return_logprobs=value)
        (result,) = installation.model.generate_batch([[1]], None, config).values()
        assert len(result.logprobs) == (6 if value else 0)
    (result,) = installation.model.generate_batch([[1]]).values()
    assert len(result.logprobs) == 6  # unasked, they are there


def seed(installation, manager):
    """One seed, but each request's own random numbers: the same whatever else runs."""
    sampling = GenerationConfig(do_sample=True, temperature=50.0, top_k=0, max_new_tokens=9)

    def run(prompts, value):
        config = ContinuousBatchingConfig(seed=value)
        results = installation.model.generate_batch(prompts, sampling, config)
        return [result.generated_tokens for result in results.values()]

    first = run([[1], [1], [2]], 5)
    assert first[0] != first[1]
    assert run([[1], [1]], 5) == first[:2]
    assert run([[1], [1], [2]], 6) != first
    made = installation.model.init_continuous_batching(sampling, ContinuousBatchingConfig(seed=5))
    made.start()
    names = made.add_requests([[1], [1], [2]])
    assert [made.get_result(name).generated_tokens for name in names] == first
    made.stop()


def scheduler_type(installation, manager):
    config = ContinuousBatchingConfig(scheduler_type="prefill_first")
    with pytest.raises(RequestError, match="scheduler_type='prefill_first' is not supported"):
        installation.model.generate_batch([[1]], continuous_batching_config=config)


def max_queue_size(installation, manager):
    """As there: a full queue makes the submitter wait (tested with the manager)."""
    made = installation.model.init_continuous_batching(
        None, ContinuousBatchingConfig(max_queue_size=2)
    )
    made.start()
    names = made.add_requests(PROMPTS * 3)
    made.stop()
    assert {result.request_id for result in made} == set(names)


METHODS: dict[str, tuple[str, Callable]] = {
    "generate_batch": ("better", generate_batch),
    "init_continuous_batching": ("better", init_continuous_batching),
    "continuous_batching_context_manager": ("better", continuous_batching_context_manager),
    "destroy_cached_continuous_batching_manager": (
        "same",
        destroy_cached_continuous_batching_manager,
    ),
    "switch_to_cb_friendly_attn": ("same", switch_to_cb_friendly_attn),
    "warmup": ("same", warmup),
    "is_running": ("same", is_running),
    "start": ("better", start),
    "stop": ("better", stop),
    "join": ("same", join),
    "destroy": ("same", destroy),
    "pause": ("better", pause),
    "add_request": ("better", add_request),
    "add_requests": ("better", add_requests),
    "cancel_request": ("better", cancel_request),
    "get_result": ("better", get_result),
    "request_id_iter": ("better", request_id_iter),
    "register_result_handler": ("better", register_result_handler),
}
CONFIG: dict[str, tuple[str, Callable]] = {
    "num_blocks": ("same", config_size("num_blocks", 2, "cache_tokens", 512)),
    "max_batch_tokens": ("same", config_size("max_batch_tokens", 6, "max_batch_tokens", 6)),
    "max_memory_percent": (
        "same",
        config_size("max_memory_percent", 0.001, "memory_fraction", 0.001),
    ),
    "max_requests_per_batch": ("same", config_size("max_requests_per_batch", 2, "max_requests", 2)),
    "use_cuda_graph": ("same", config_size("use_cuda_graph", True, "cuda_graphs", True)),
    "return_logprobs": ("same", return_logprobs),
    "seed": ("better", seed),
    "scheduler_type": ("error", scheduler_type),
    "max_queue_size": ("same", max_queue_size),
    **{name: ("same", config_without_effect(name)) for name in OTHER_VALUES},
}
CONFIG["per_request_processors"] = ("better", CONFIG["per_request_processors"][1])
CONFIG["drop_unsupported_processors"] = ("better", CONFIG["drop_unsupported_processors"][1])
ROWS = {
    **{f"{name}()": row for name, row in METHODS.items()},
    **{f"GenerationOutput.{name}": ("same", fields_of_a_result) for name in ("*",)},
    **{f"ContinuousBatchingConfig.{name}": row for name, row in CONFIG.items()},
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ROWS)
def test_row(name, installation, manager):
    ROWS[name][1](installation, manager)


def test_every_public_name_has_a_row():
    theirs = {
        name
        for kind in (ContinuousBatchingManager, ContinuousMixin)
        for name, value in vars(kind).items()
        if callable(value) and not name.startswith("_")
    }
    assert theirs == set(METHODS)
    assert set(ContinuousBatchingConfig.__dataclass_fields__) == set(CONFIG)
    known = {*batching_config.HEEDED, *batching_config.SIZES, *batching_config.WITHOUT_EFFECT}
    assert known == set(CONFIG)


@pytest.mark.parametrize("name", METHODS)
def test_arguments_are_those_of_transformers(name):
    ours_kind = Manager if hasattr(ContinuousBatchingManager, name) else Installation
    theirs_kind = ContinuousBatchingManager if ours_kind is Manager else ContinuousMixin
    ours = inspect.signature(getattr(ours_kind, name)).parameters
    theirs = inspect.signature(getattr(theirs_kind, name)).parameters
    for mine, other in zip(ours.values(), theirs.values(), strict=True):
        assert mine.kind is other.kind
        if mine.kind is not inspect.Parameter.VAR_KEYWORD:
            assert (mine.name, mine.default) == (other.name, other.default)


def test_a_model_gets_its_own_methods_back():
    model = Model()
    with install(model, make_engine) as installation:
        assert model.generate_batch([[1]])
        assert str(inspect.signature(model.generate_batch)).startswith("(inputs:")
    assert "generate_batch" not in vars(model)
    assert model.generate_batch.__func__ is ContinuousMixin.generate_batch
    with pytest.raises(RequestError, match="the engine is closed"):
        installation.generate_batch([[1]])


def test_copies_have_their_own_methods():
    model = Model()
    with install(model, make_engine):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            method = other.generate_batch
            assert method.__self__ is other
            assert method.__func__ is ContinuousMixin.generate_batch
        assert model.generate_batch(PROMPTS[:1])


def test_inference_mode_leaves_nothing_behind(installation, manager):
    """Caches that were made within it are used outside, by the caller and by the thread."""
    manager.stop()
    config = ContinuousBatchingConfig(max_requests_per_batch=3)
    for within in (True, False, True):
        with torch.inference_mode(within):
            results = installation.model.generate_batch(PROMPTS, None, config)
            assert [r.generated_tokens for r in results.values()] == [greedy(p) for p in PROMPTS]
    manager = installation.model.init_continuous_batching(None, config)
    manager.start()
    names = manager.add_requests(PROMPTS)
    assert [manager.get_result(n).generated_tokens for n in names] == [greedy(p) for p in PROMPTS]
    manager.stop()


def test_a_model_is_installed_once_and_uninstalled_as_often_as_one_likes():
    model = Model()
    installation = install(model, make_engine)
    with pytest.raises(ValueError, match="the model is installed already: uninstall it first"):
        install(model, make_engine)
    uninstall(model)
    uninstall(model)
    with install(model, make_engine) as again:
        assert again.engine is not installation.engine
    assert "generate_batch" not in vars(model)


def test_sizes_cannot_change_while_requests_are_under_way(installation, manager):
    config = ContinuousBatchingConfig(max_requests_per_batch=3)
    with pytest.raises(RequestError, match="asks for other sizes while requests are under way"):
        installation.model.generate_batch([[1]], continuous_batching_config=config)


def test_a_model_that_goes_away_takes_its_engine_along():
    model = Model()
    engine = weakref.ref(install(model, make_engine).engine)
    del model
    gc.collect()
    assert engine() is None
