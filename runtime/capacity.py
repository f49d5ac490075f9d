"""How many pages and slots there are, from the declared caches and the memory that is free."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from regraft.rewriter.declare import Reach, reaches_of

from .config import EngineConfig
from .page_groups import most_pages
from .runner import RewrittenModel
from .step_memory import step_bytes

_CPU_SHARE = 0.25
_ACCELERATOR_SHARE = 0.9

_PEAKS = 2
"""Steps whose memory is left free on a GPU, of the largest size: graphs have memory of their own, and so have steps
that run without one.
"""


@dataclass(frozen=True)
class Capacity:
    """Sizes of the pools, scratch page and scratch slot included.

    `pages` are those of each pool of rows, by the rows' reach. `page_size` is 0 for a model that declares no rows: it
    needs no pages.
    """

    pages: Mapping[Reach, int]
    page_size: int
    num_slots: int
    num_checkpoints: int = 0
    """Slots of the state pools, behind the others, that keep copies of states for the prefix cache."""

    def max_tokens(self, max_batch_tokens: int) -> int | None:
        """The longest request that fits, in steps of at most `max_batch_tokens`; None if nothing limits it.

        Rows of a bounded reach limit nothing if what one step of a request reads and writes of them fits.
        """
        limits = [
            (pages - 1) * self.page_size
            for reach, pages in self.pages.items()
            if not reach.size or pages - 1 < most_pages(reach, max_batch_tokens, self.page_size)
        ]
        return min(limits, default=None) if self.page_size else None


def plan_capacity(config: EngineConfig, model: RewrittenModel) -> Capacity:
    """Sizes the pools of `model`. ValueError if the memory is too small for one page."""
    page_size = config.page_size if model.rows else 0
    page_bytes = _page_bytes(model, page_size)
    state_bytes = sum(state.num_bytes for state in model.states)
    checkpoints = _most_checkpoints(config) if state_bytes else 0
    if config.cache_tokens is not None:
        num_pages = 1 + -(-config.cache_tokens // page_size) if page_size else 1
        pages = _pages_by_reach(num_pages, page_bytes, config)
        return Capacity(pages, page_size, 1 + config.max_requests, checkpoints)
    reserved = _PEAKS * step_bytes(model, config)
    budget = _budget(config, model.device, reserved)
    # States of recurrent models are large: they may take half of what they share with rows.
    share = budget // 2 if page_size else budget
    num_slots = 1 + config.max_requests
    if state_bytes:
        # Of that, checkpoints may take half, and what requests leave.
        wanted = min(checkpoints, share // state_bytes // 2)
        num_slots = min(num_slots, share // state_bytes - wanted)
        checkpoints = min(checkpoints, share // state_bytes - num_slots)
    num_pages = 1
    if page_size:
        states = (num_slots + checkpoints) * state_bytes
        num_pages = _most_pages(budget - states, page_bytes, config)
        if model.max_positions is not None:
            longest = -(-model.max_positions // page_size)
            num_pages = min(num_pages, 1 + config.max_requests * longest)
    if num_slots < 2 or (page_size and num_pages < 2):
        token_bytes = sum(row.num_bytes for row in model.rows)
        raise ValueError(
            f"{budget} bytes hold no request (a token takes {token_bytes} bytes, a request {state_bytes} more"
            + (f", and {reserved} are kept for the steps themselves" if reserved else "")
            + f"): raise memory_fraction={config.memory_fraction} or free memory"
        )
    pages = _pages_by_reach(num_pages, page_bytes, config)
    return Capacity(pages, page_size, num_slots, checkpoints)


def _page_bytes(model: RewrittenModel, page_size: int) -> dict[Reach, int]:
    """Bytes per page of the rows of each reach."""
    return {
        reach: sum(row.page_bytes(page_size) for row in model.rows if row.reach == reach)
        for reach in reaches_of(model.rows)
    }


def _pages_by_reach(
    num_pages: int, page_bytes: Mapping[Reach, int], config: EngineConfig
) -> dict[Reach, int]:
    """Pages of each pool where there are `num_pages` for rows that reach back to the start.

    No more for a bounded reach than all requests together can hold; with a prefix cache as many again, to be kept.
    """
    pages = dict.fromkeys(page_bytes, num_pages)
    for reach in page_bytes:
        if reach.size and num_pages > 1:
            size = config.page_size
            a_request = most_pages(reach, 1, size) + 1
            most = config.max_requests * a_request + -(-config.max_batch_tokens // size)
            pages[reach] = min(num_pages, 1 + most * (2 if config.prefix_cache else 1))
    return pages


def _most_pages(budget: int, page_bytes: Mapping[Reach, int], config: EngineConfig) -> int:
    """The largest number of pages, for rows that reach back to the start, with which all pools fit into the budget."""

    def fits(num_pages: int) -> bool:
        pages = _pages_by_reach(num_pages, page_bytes, config)
        return sum(pages[reach] * page_bytes[reach] for reach in pages) <= budget

    low, high = 0, 1 + max(0, budget) // min(page_bytes.values())
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _most_checkpoints(config: EngineConfig) -> int:
    if not config.prefix_cache:
        return 0
    wanted = config.prefix_checkpoints
    return config.max_requests if wanted is None else wanted


def _budget(config: EngineConfig, device: torch.device, reserved: int) -> int:
    """Bytes that the caches may take, with so many left to the steps."""
    if device.type == "cuda":
        free, share = torch.cuda.mem_get_info(device)[0], _ACCELERATOR_SHARE
    elif device.type == "cpu":
        free, share = _free_host_memory(), _CPU_SHARE
    else:
        raise ValueError(
            f"how much memory is free on {device} is unknown: give cache_tokens instead of "
            "memory_fraction"
        )
    return int(max(0, free - reserved) * (config.memory_fraction or share))


def _free_host_memory() -> int:
    """Bytes that this process may still take: of the machine and, in a container, of its limit."""
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    info = Path("/proc/meminfo")
    if info.exists():
        fields = dict(line.split(":") for line in info.read_text().splitlines())
        # Counts what the kernel would give up, as its file cache.
        free = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free
