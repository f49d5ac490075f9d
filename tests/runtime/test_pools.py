"""Pages and slots: handed out once, taken back once; sizes from declarations and memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from regraft.rewriter.declare import Reach, RowSpec, StateSpec
from regraft.runtime import capacity as capacity_module
from regraft.runtime.capacity import Capacity, plan_capacity
from regraft.runtime.config import EngineConfig
from regraft.runtime.pages import BlockTables, PagePool
from regraft.runtime.runner import Runner
from regraft.runtime.states import SlotPool
from regraft.runtime.step_memory import step_bytes
from tests.runtime.toy import ToyModel


def test_pages_are_handed_out_once_and_never_the_scratch_page():
    pool = PagePool(num_pages=6, page_size=4)
    first, second = pool.take(2), pool.take(3)
    assert sorted(first + second) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0
    pool.give_back(first)
    assert sorted(pool.take(2)) == sorted(first)
    with pytest.raises(AssertionError, match="1 pages wanted, 0 free"):
        pool.take(1)


def test_a_page_given_back_twice_is_noticed():
    pool = PagePool(num_pages=3, page_size=4)
    pages = pool.take(2)
    pool.give_back(pages)
    with pytest.raises(AssertionError, match="twice"):
        pool.give_back(pages[:1])


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_for(tokens, pages):
    assert PagePool(9, page_size=4).pages_for(tokens) == pages
    assert PagePool(1, page_size=0).pages_for(tokens) == 0


def test_block_tables_grow_and_forget():
    tables = BlockTables(num_slots=3, width=1)
    tables.extend(1, 0, [7])
    tables.extend(1, 1, [5, 6])
    tables.extend(2, 0, [9])
    assert tables.array[:, :3].tolist() == [[0, 0, 0], [7, 5, 6], [9, 0, 0]]
    tables.clear(1)
    assert tables.array[1].sum() == 0
    assert tables.array.dtype == np.int32


def test_slots_are_handed_out_once_and_never_the_scratch_slot():
    pool = SlotPool(num_slots=4)
    assert sorted(pool.take() for _ in range(3)) == [1, 2, 3]
    assert pool.num_free == 0
    pool.give_back(2)
    assert pool.take() == 2
    with pytest.raises(AssertionError, match="belongs to nobody"):
        pool.give_back(0)


def test_capacity_from_tokens():
    config = EngineConfig(cache_tokens=100, page_size=16, max_requests=5)
    assert plan_capacity(config, ToyModel()) == Capacity({Reach(): 1 + 7}, 16, 1 + 5)
    without_rows = plan_capacity(config, ToyModel(has_rows=False))
    assert without_rows == Capacity({Reach(): 1}, 0, 1 + 5)
    assert without_rows.max_tokens(64) is None


def test_capacity_from_memory(monkeypatch):
    monkeypatch.setattr(capacity_module, "_free_host_memory", lambda: 100_000)
    model = ToyModel(max_positions=None)
    model.rows = (RowSpec("r", (25,), torch.float32),)  # 100 bytes a token
    model.states = (StateSpec("s", (250,), torch.float32),)  # 1000 bytes a request
    config = EngineConfig(memory_fraction=0.5, page_size=10, max_requests=1000)
    planned = plan_capacity(config, model)
    assert planned.num_slots == 25  # half of 50,000 bytes
    assert planned.pages[Reach()] == 25
    few = plan_capacity(EngineConfig(memory_fraction=0.5, page_size=10, max_requests=4), model)
    assert (few.num_slots, few.pages[Reach()]) == (5, 45)
    model.max_positions = 35
    capped = plan_capacity(EngineConfig(memory_fraction=0.5, page_size=10, max_requests=4), model)
    assert capped.pages[Reach()] == 1 + 4 * 4  # no more than four requests of full length can use
    monkeypatch.setattr(capacity_module, "_free_host_memory", lambda: 3000)
    with pytest.raises(ValueError, match=r"750 bytes hold no request .* 100 bytes, .* 1000 more"):
        plan_capacity(EngineConfig(page_size=10), model)


def test_what_steps_take_is_kept_free(monkeypatch):
    monkeypatch.setattr(capacity_module, "_free_host_memory", lambda: 100_000)
    monkeypatch.setattr(capacity_module, "step_bytes", lambda model, config: 20_000)
    model = ToyModel(max_positions=None)
    model.rows, model.states = (RowSpec("r", (25,), torch.float32),), ()  # 100 bytes a token
    config = EngineConfig(memory_fraction=0.5, page_size=10)
    # Half of the 60,000 that two steps leave.
    assert plan_capacity(config, model).pages[Reach()] == 30
    monkeypatch.setattr(capacity_module, "step_bytes", lambda model, config: 50_000)
    with pytest.raises(
        ValueError, match=r"0 bytes hold no request .* and 100000 are kept for the "
    ):
        plan_capacity(config, model)


def test_caches_that_do_not_fit_are_named(monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("regraft.runtime.runner._zeros", full)
    model = ToyModel()
    planned = plan_capacity(EngineConfig(cache_tokens=64), model)
    with pytest.raises(
        ValueError, match=r"the caches take \d+ bytes, which cpu has not: lower cache_"
    ):
        Runner(model, planned)


class Hungry:
    """Takes 64 MB for a moment, and so many bytes for each token."""

    device = torch.device("cuda")
    rows, states = (RowSpec("r", (25,), torch.float32),), (StateSpec("s", (9,), torch.float32),)
    min_tokens = bytes_a_token = 1

    def forward(self, inputs):
        assert len(inputs["context_lens"]) == len(inputs["logits_rows"]) == 128
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        tokens = inputs["input_ids"].shape[1]
        return torch.empty(tokens, self.bytes_a_token, dtype=torch.uint8, device="cuda")


@pytest.mark.gpu
def test_a_largest_step_is_measured():
    model, config = Hungry(), EngineConfig()
    before = torch.cuda.memory_allocated()
    assert 64 << 20 <= step_bytes(model, config) < 65 << 20
    model.bytes_a_token = 1 << 20
    assert 2 << 30 <= step_bytes(model, config) < 3 << 30
    model.bytes_a_token = 1 << 30  # 2 TB
    with pytest.raises(
        ValueError, match=r"max_batch_tokens=2048 tokens .* does not fit into the \d+"
    ):
        step_bytes(model, config)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize(("page_size", "rows"), [(16, 1), (128, 1), (129, 2), (256, 2)])
def test_rows_of_several_tokens(page_size, rows, monkeypatch):
    """A page has as many as may end in it."""
    entries = RowSpec("e", (25,), torch.float32, every=128)
    assert entries.pool_shape(7, page_size) == (7, rows, 25)
    assert entries.page_bytes(page_size) == 100 * rows
    assert entries.num_bytes == 1
    model = ToyModel(max_positions=None)
    model.rows, model.states = (RowSpec("r", (1,), torch.float32), entries), ()
    monkeypatch.setattr(capacity_module, "_free_host_memory", lambda: 100_000)
    config = EngineConfig(memory_fraction=0.5, page_size=page_size, max_requests=1000)
    planned = plan_capacity(config, model)
    assert planned.pages[Reach()] == 50_000 // (4 * page_size + 100 * rows)
    assert Runner(model, planned).pools["e"].shape == (planned.pages[Reach()], rows, 25)


def test_room_for_checkpoints(monkeypatch):
    monkeypatch.setattr(capacity_module, "_free_host_memory", lambda: 100_000)
    model = ToyModel(max_positions=None)
    model.rows = (RowSpec("r", (25,), torch.float32),)  # 100 bytes a token
    model.states = (StateSpec("s", (250,), torch.float32),)  # 1000 bytes a request
    sizes = {"memory_fraction": 0.5, "page_size": 10, "prefix_cache": True}
    planned = plan_capacity(EngineConfig(max_requests=1000, **sizes), model)
    # 25 states are half of 50,000 bytes.
    assert (planned.num_slots, planned.num_checkpoints, planned.pages[Reach()]) == (13, 12, 25)
    few = plan_capacity(EngineConfig(max_requests=4, **sizes), model)
    assert (few.num_slots, few.num_checkpoints, few.pages[Reach()]) == (5, 4, 41)
    none = plan_capacity(EngineConfig(max_requests=4, prefix_checkpoints=0, **sizes), model)
    assert (none.num_slots, none.num_checkpoints, none.pages[Reach()]) == (5, 0, 45)
    model.states = ()
    assert plan_capacity(EngineConfig(max_requests=4, **sizes), model).num_checkpoints == 0
    given = EngineConfig(cache_tokens=100, max_requests=4, prefix_cache=True)
    assert plan_capacity(given, ToyModel()).num_checkpoints == 4
    runner = Runner(ToyModel(), plan_capacity(given, ToyModel()))
    assert runner.pools["toy:state"].shape == (1 + 4 + 4, 1)


def test_states_are_copied_between_slots():
    runner = Runner(
        ToyModel(has_rows=False), Capacity({Reach(): 1}, 0, num_slots=3, num_checkpoints=2)
    )
    pool = runner.pools["toy:state"]
    pool[:, 0] = torch.arange(5.0)
    runner.copy_states({})
    runner.copy_states({3: 1, 4: 1})
    assert pool[:, 0].tolist() == [0, 1, 2, 1, 1]


def test_a_page_is_kept_until_room_is_needed():
    pool = PagePool(num_pages=6, page_size=4)
    evicted = []
    pool.on_evict = evicted.append
    first = pool.take(3)
    for page in first:
        pool.keep(page)
    pool.share(first[:2])
    pool.give_back(first)
    assert pool.kept == [first[2]]
    assert not pool.are_exclusive(first[:1])
    pool.give_back(first[:2])
    assert pool.kept == [first[2], first[1], first[0]]  # a text's end goes before its beginning
    assert pool.num_free == 5
    taken = pool.take(4)
    assert evicted == [first[2], first[1]]
    assert first[0] not in taken
    pool.share([first[0]])
    assert pool.num_free == 0
    with pytest.raises(AssertionError, match="1 pages wanted, 0 free"):
        pool.take(1)


def test_free_memory_is_measured():
    free = capacity_module._free_host_memory()
    assert 0 < free < 2**50


def test_pools_have_the_declared_shapes_and_start_at_zero():
    model = ToyModel()
    model.rows = (RowSpec("half", (3, 2), torch.bfloat16),)
    runner = Runner(model, Capacity({Reach(): 4}, page_size=8, num_slots=3))
    assert runner.pools["half"].shape == (4, 8, 3, 2)
    assert runner.pools["half"].dtype == torch.bfloat16
    assert runner.pools["toy:state"].shape == (3, 1)
    assert all(not pool.any() for pool in runner.pools.values())
    assert not any(pool.is_inference() for pool in runner.pools.values())


def test_a_request_grows_in_place() -> None:
    """Consecutive pages are one view of the pool; a new request leaves room behind its neighbours."""
    pool = PagePool(64, 4)
    first, second = pool.take(3, room=13), pool.take(3, room=13)
    for _ in range(10):
        first += pool.take(1, first[-1])
        second += pool.take(1, second[-1])
    assert first == list(range(first[0], first[0] + 13))
    assert second == list(range(second[0], second[0] + 13))
    rest = pool.take(pool.num_free)
    assert sorted(first + second + rest) == list(range(1, 64))
    pool.give_back(second)
    assert pool.free == sorted(second)
