"""Regraft beside every installed peer over one load: a table, JSON, and a plot where matplotlib is installed."""

from __future__ import annotations

import gc
import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .floor import Ceilings, Work
from .peers import PEERS, Load, TokenIds, Way

FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, ImportError, OSError)
"""Of a peer, a program of somebody else's: its failure is its result."""


@dataclass(frozen=True)
class Row:
    """One way's result: seconds for all requests, of each repeat."""

    name: str
    seconds: tuple[float, ...]
    tokens_per_second: float
    of_floor: float
    start_seconds: float
    problem: str = ""


def bench(
    model: Any,
    wrap: Callable[..., Any],
    load: Load,
    peers: Sequence[str] = tuple(PEERS),
    *,
    name: str = "model",
    out: str | Path = "benchmark",
    say: Callable[[str], object] = print,
) -> list[Row]:
    """Measure, `say` a table, and write `out`.json and `out`.png. Regraft's row is the first.

    model   on its device; prompts are random token ids. Its end token is ignored: every request gets `load.new` tokens
    wrap    regraft.wrap
    peers   of PEERS; one that is not installed, or fails, is a row that says so
    """
    device, dtype = model.device, model.dtype
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    lengths, prompts = random_prompts(model, load)
    limits = Ceilings.measure(device, dtype)
    start = time.perf_counter()
    way, work = regraft_way(model, wrap, load)
    floor = work.load_seconds(lengths, load.new, limits)
    rows = [measure("Regraft", way, prompts, load, floor, time.perf_counter() - start)]
    del way
    gc.collect()
    for peer in peers:
        rows.append(_measure_peer(peer, model, prompts, load, floor))
        say(line_of(rows[-1]))
    say(table(rows, floor, limits, load, f"{name} on {_device_name(device)}"))
    write(rows, floor, limits, load, name, Path(out))
    return rows


def random_prompts(model: Any, load: Load) -> tuple[list[int], TokenIds]:
    """The same for every call: lengths, and token ids."""
    generator = torch.Generator().manual_seed(1)
    low, high = load.prompt
    lengths = torch.randint(low, high + 1, (load.requests,), generator=generator).tolist()
    vocab = model.config.get_text_config().vocab_size
    return lengths, [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]


def regraft_way(model: Any, wrap: Callable[..., Any], load: Load) -> tuple[Way, Work]:
    """An engine that is closed when its way is forgotten."""
    engine = wrap(
        model, validate="off", max_requests=load.requests, max_batch_tokens=load.tokens,
        cache_tokens=load.requests * (max(load.prompt) + load.new + 16),
    )  # fmt: skip

    def run(prompts: TokenIds, new: int) -> object:
        return engine.generate(prompts, max_new_tokens=new, do_sample=False)

    report = engine.report
    return run, Work.of(model, report.bytes_per_token, report.bytes_per_request)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _measure_peer(name: str, model: Any, prompts: TokenIds, load: Load, floor: float) -> Row:
    """A peer that is not there, or fails, is a row that says so."""
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        return Row(name, (), 0.0, 0.0, 0.0, "not installed")
    try:
        start = time.perf_counter()
        way = PEERS[name](model, load)
        return measure(name, way, prompts, load, floor, time.perf_counter() - start)
    except FAILURES as error:
        return Row(name, (), 0.0, 0.0, 0.0, f"{type(error).__name__}: {str(error)[:200]}")


def measure(name: str, way: Way, prompts: TokenIds, load: Load, floor: float, start: float) -> Row:
    """One run to warm up, which counts as starting, and the timed ones."""
    begin = time.perf_counter()
    way(prompts, load.new)
    start += time.perf_counter() - begin
    seconds = []
    for _ in range(load.repeats):
        begin = time.perf_counter()
        way(prompts, load.new)
        seconds.append(time.perf_counter() - begin)
    best = min(seconds)
    return Row(name, tuple(seconds), len(prompts) * load.new / best, floor / best, start)


def line_of(row: Row) -> str:
    """One line of the table."""
    if row.problem:
        return f"{row.name:12s} {row.problem}"
    every = ", ".join(f"{s:.2f}" for s in row.seconds)
    return (
        f"{row.name:12s} {row.tokens_per_second:10,.0f} tok/s   {row.of_floor:6.3f} of the floor   "
        f"({every} s; start {row.start_seconds:.0f} s)"
    )


def table(rows: list[Row], floor: float, limits: Ceilings, load: Load, title: str) -> str:
    """All rows, and what they are measured against."""
    low, high = load.prompt
    ours, *others = rows
    ratios = [
        f"Regraft is {ours.tokens_per_second / row.tokens_per_second:.2f} times {row.name}"
        for row in others
        if row.tokens_per_second
    ]
    return "\n".join(
        [
            f"\n{title}: {load.requests} requests, prompts of {low} to {high}, {load.new} new",
            f"floor {floor:.2f} s: copy {limits.bytes_per_second / 1e12:.2f} TB/s, "
            f"matmul {limits.flops_per_second / 1e12:.2f} TFLOP/s",
            *map(line_of, rows),
            *ratios,
        ]
    )


def write(
    rows: list[Row], floor: float, limits: Ceilings, load: Load, name: str, out: Path
) -> None:
    """JSON with every figure, and a plot where matplotlib is installed."""
    data = {
        "model": name, "load": asdict(load), "floor_seconds": floor, "ceilings": asdict(limits),
        "torch": torch.__version__, "rows": [asdict(row) for row in rows],
    }  # fmt: skip
    out.with_suffix(".json").write_text(json.dumps(data, indent=2) + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        return
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    measured = [row for row in rows if row.tokens_per_second]
    figure, axis = plt.subplots(figsize=(7, 0.6 * len(measured) + 1.2))
    axis.barh([row.name for row in measured], [row.tokens_per_second for row in measured])
    limit = load.requests * load.new / floor
    axis.axvline(limit, linestyle="--", color="black", label=f"floor: {limit:,.0f} tok/s")
    axis.invert_yaxis()
    axis.set_xlabel("output tokens per second")
    axis.set_title(f"{name}, {load.requests} requests")
    axis.legend()
    figure.tight_layout()
    figure.savefig(out.with_suffix(".png"), dpi=120)
