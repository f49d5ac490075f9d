"""Checks and times the kernels on this machine's GPU, each against the least that its work could take.

    python examples/kernel_floors.py                             # on a GPU
    TRITON_INTERPRET=1 python examples/kernel_floors.py --device cpu --tiny

First each kernel's result is compared with its naive twin's. Then it runs from a CUDA graph, over memory much larger
than the caches. The floor is the larger of the bytes it must move at the measured copy bandwidth and its FLOPs at the
measured matmul rate; attention over a whole prompt is compared with torch's fastest backend for the unpaged problem.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _kernel_problems import PROBLEMS, Problem

from regraft.runtime.bench.floor import Ceilings

TOLERANCE = 2e-2
"""Of a result's largest value: bfloat16's, as the operands are."""


def main() -> None:
    """One line a problem."""
    options = _options()
    device = torch.device(options.device)
    ceilings = Ceilings.measure(device)
    print(
        f"copy {ceilings.bytes_per_second / 1e12:.3f} TB/s, matmul {ceilings.flops_per_second / 1e12:.0f} TFLOP/s"
    )
    print(
        f"{'':44} {'error':>8} {'us':>9} {'TB/s':>6} {'TFLOP/s':>8} {'of floor':>8} {'wanted':>6}"
    )
    results = []
    for name, (wanted, build) in PROBLEMS.items():
        if any(word not in name for word in options.only):
            continue
        torch.manual_seed(0)
        problem = build(device, options.tiny)
        row = measure(problem, ceilings, options.repeats)
        results.append({"name": name, "wanted": wanted, **row})
        _print(name, wanted, row)
        if options.out:
            Path(options.out).write_text(json.dumps(results, indent=2) + "\n")
        del problem
        if device.type == "cuda":
            torch.cuda.empty_cache()
    wrong = [row["name"] for row in results if not row["error"] <= TOLERANCE]
    sys.exit(f"not as the naive twin says: {wrong}" if wrong else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small enough for Triton's interpreter")
    parser.add_argument("--only", nargs="*", default=[], help="words that a problem's name has")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", help="a JSON file")
    return parser.parse_args()


def measure(problem: Problem, ceilings: Ceilings, repeats: int) -> dict[str, Any]:
    """Error, time of a call, and the share of it that the floor is."""
    error = problem.error()
    seconds = seconds_each(problem.calls, problem.device, repeats)
    peers = {n: seconds_each([c], problem.device, repeats) for n, c in problem.peers.items()}
    floor = max(
        problem.moved / ceilings.bytes_per_second, problem.flops / ceilings.flops_per_second
    )
    if peers:
        floor = min(peers.values())
    return {
        "error": error,
        "seconds": seconds,
        "bytes_per_second": problem.moved / seconds,
        "flops_per_second": problem.flops / seconds,
        "of_floor": floor / seconds,
        "peers": peers,
    }


def seconds_each(
    calls: list[Callable[[], object]], device: torch.device, repeats: int = 20
) -> float:
    """Median time of a call, all of them run in turn, on a GPU from a CUDA graph."""
    if device.type != "cuda":
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / len(calls))
    return statistics.median(times[2:])


def _print(name: str, wanted: float, row: dict[str, Any]) -> None:
    peers = "".join(f"  {n} {seconds * 1e6:.1f} us" for n, seconds in row["peers"].items())
    print(
        f"{name:44} {row['error']:8.1e} {row['seconds'] * 1e6:9.1f} {row['bytes_per_second'] / 1e12:6.2f} "
        f"{row['flops_per_second'] / 1e12:8.1f} {row['of_floor']:8.3f} {wanted or '':>6}{peers}",
        flush=True,
    )


if __name__ == "__main__":
    main()
