"""How many pages and slots there are, from the declared caches and the memory that is free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from .config import EngineConfig
from .runner import RewrittenModel

_CPU_SHARE = 0.25
_ACCELERATOR_SHARE = 0.85


@dataclass(frozen=True)
class Capacity:
    """Sizes of the pools, scratch page and scratch slot included.

    `page_size` is 0 for a model that declares no rows: it needs no pages.
    """

    num_pages: int
    page_size: int
    num_slots: int
    num_checkpoints: int = 0
    """Slots of the state pools, behind the others, that keep copies of states for the prefix cache."""

    @property
    def max_tokens(self) -> int | None:
        """The longest request whose rows fit (tokens); None if nothing limits it."""
        return (self.num_pages - 1) * self.page_size if self.page_size else None


def plan_capacity(config: EngineConfig, model: RewrittenModel) -> Capacity:
    """Sizes the pools of `model`. ValueError if the memory is too small for one page."""
    row_bytes = sum(row.num_bytes for row in model.rows)
    state_bytes = sum(state.num_bytes for state in model.states)
    page_size = config.page_size if model.rows else 0
    checkpoints = _most_checkpoints(config) if state_bytes else 0
    if config.cache_tokens is not None:
        num_pages = 1 + -(-config.cache_tokens // page_size) if page_size else 1
        return Capacity(num_pages, page_size, 1 + config.max_requests, checkpoints)
    budget = _budget(config, model.device)
    # States of recurrent models are large: they may take half of what they share with rows.
    share = budget // 2 if row_bytes else budget
    num_slots = 1 + config.max_requests
    if state_bytes:
        # Of that, checkpoints may take half, and what requests leave.
        wanted = min(checkpoints, share // state_bytes // 2)
        num_slots = min(num_slots, share // state_bytes - wanted)
        checkpoints = min(checkpoints, share // state_bytes - num_slots)
    num_pages = 1
    if page_size:
        states = (num_slots + checkpoints) * state_bytes
        num_pages = (budget - states) // (row_bytes * page_size)
        if model.max_positions is not None:
            longest = -(-model.max_positions // page_size)
            num_pages = min(num_pages, 1 + config.max_requests * longest)
    if num_slots < 2 or (page_size and num_pages < 2):
        raise ValueError(
            f"{budget} bytes hold no request (a token takes {row_bytes} bytes, a request "
            f"{state_bytes} more): raise memory_fraction={config.memory_fraction} or free memory"
        )
    return Capacity(num_pages, page_size, num_slots, checkpoints)


def _most_checkpoints(config: EngineConfig) -> int:
    if not config.prefix_cache:
        return 0
    wanted = config.prefix_checkpoints
    return config.max_requests if wanted is None else wanted


def _budget(config: EngineConfig, device: torch.device) -> int:
    """Bytes that the caches may take."""
    if device.type == "cuda":
        free, share = torch.cuda.mem_get_info(device)[0], _ACCELERATOR_SHARE
    elif device.type == "cpu":
        free, share = _free_host_memory(), _CPU_SHARE
    else:
        raise ValueError(
            f"how much memory is free on {device} is unknown: give cache_tokens instead of "
            "memory_fraction"
        )
    return int(free * (config.memory_fraction or share))


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
