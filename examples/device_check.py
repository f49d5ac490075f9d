"""Checks and times Regraft on this machine's GPU: first whether results are right, then how fast they come.

    python examples/device_check.py                        # everything, on a GPU
    python examples/device_check.py --device cpu --shape tiny --families qwen3 --parts families,decode,load

Parts: ceilings, families (tiny models against their own no-cache forward), compiled (a few of them compiled and from
CUDA graphs), decode (steps of a large shape against the floor), load (128 requests end to end), profile (kernels of a
step).
Figures go to --out as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import TimeoutError, get_context
from pathlib import Path
from typing import Any

import torch
from _family_checks import check_family
from _shapes import build_shape

import regraft
from regraft.runtime.bench.floor import Ceilings, Work


def main() -> None:
    """Run the parts that were asked for; a part that fails is printed and the next one runs."""
    options = _options()
    results: dict[str, Any] = {"torch": torch.__version__, "device": options.device}
    parts: dict[str, Callable[[argparse.Namespace, dict[str, Any]], Any]] = {
        "ceilings": ceilings, "families": families, "compiled": compiled, "decode": decode, "load": load,
        "profile": profile,
    }  # fmt: skip
    failed = False
    for name in options.parts.split(","):
        begin = time.perf_counter()
        try:
            results[name] = parts[name](options, results)
        except Exception:  # noqa: BLE001 (the report of a part that failed, and the exit status, say so)
            traceback.print_exc()
            results[name], failed = {"error": traceback.format_exc()}, True
        print(f"[{name}: {time.perf_counter() - begin:.1f} s]", flush=True)
        if options.out:
            Path(options.out).write_text(json.dumps(results, indent=2, default=str) + "\n")
    sys.exit(failed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", default="ceilings,families,compiled,decode,load,profile")
    parser.add_argument("--families", default="all", help="names, or all")
    parser.add_argument("--compiled", default="qwen3,gemma2,qwen3_moe,gpt_oss", help="names")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=300.0, help="for the families of a part")
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--batches", default="128,16,1")
    parser.add_argument("--tokens", type=int, default=2048, help="max_batch_tokens")
    parser.add_argument("--out", help="a JSON file")
    return parser.parse_args()


def ceilings(options: argparse.Namespace, results: dict[str, Any]) -> dict[str, float]:
    """Copy bandwidth and matmul rate of the card."""
    found = Ceilings.measure(torch.device(options.device))
    print(
        f"copy {found.bytes_per_second / 1e12:.2f} TB/s, matmul {found.flops_per_second / 1e12:.0f} TFLOP/s"
    )
    return vars(found)


def families(options: argparse.Namespace, results: dict[str, Any]) -> dict[str, Any]:
    """Every tiny family, step by step without compilation, in float32 and bfloat16."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.families.models import names

    chosen = names(*range(14)) if options.families == "all" else options.families.split(",")
    jobs = [(name, options.device, {"compile": False}) for name in chosen]
    return _check_all(jobs, options.workers, options.seconds)


def compiled(options: argparse.Namespace, results: dict[str, Any]) -> dict[str, Any]:
    """A few tiny families, compiled and from CUDA graphs."""
    config = {"compile": True, **({"cuda_graphs": True} if options.device == "cuda" else {})}
    jobs = [(name, options.device, config) for name in options.compiled.split(",")]
    return _check_all(jobs, options.workers, options.seconds)


def _check_all(
    jobs: list[tuple[str, str, dict[str, Any]]], workers: int, seconds: float
) -> dict[str, Any]:
    """As many families as the time allows, side by side, the others named."""
    deadline = time.perf_counter() + seconds
    outcomes, waiting = [], [job[0] for job in jobs]
    with get_context("spawn").Pool(workers) as pool:
        finished = pool.imap_unordered(check_family, jobs)
        while waiting:
            try:
                outcome = finished.next(max(0.0, deadline - time.perf_counter()))
            except TimeoutError:
                outcomes += [{"name": name, "unfinished": True} for name in waiting]
                break
            outcomes.append(outcome)
            waiting.remove(outcome["name"])
            found = {label: f"{worst:.1e}" for label, worst in outcome.get("float32", {}).items()}
            print(outcome["name"], found, outcome.get("problem", ""), flush=True)
        pool.terminate()
    return _print_families(outcomes)


def _print_families(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    wrong = 0
    for outcome in outcomes:
        name, problem = outcome["name"], outcome.get("problem", "")
        worst = max(outcome.get("float32", {"": 0.0}).values())
        if problem or worst > 1e-4:
            wrong += 1
            print(f"{name}: float32 {worst:.1e} {problem}")
        if outcome.get("kl", 0) > 1.1 * outcome.get("plain kl", 1) + 1e-6:
            print(
                f"{name}: bfloat16 mean KL {outcome['kl']:.2e}, the plain model's {outcome['plain kl']:.2e}"
            )
        for note in outcome.get("notes", ()):
            print(f"{name}: {note}")
    unfinished = [outcome["name"] for outcome in outcomes if "unfinished" in outcome]
    right = len(outcomes) - wrong - len(unfinished)
    print(
        f"{right} of {len(outcomes)} families right in float32; no time was left for {unfinished}"
    )
    return {outcome["name"]: outcome for outcome in outcomes}


_engines: dict[str, Any] = {}


def _engine(options: argparse.Namespace, results: dict[str, Any]) -> tuple[Any, Work, Ceilings]:
    """The engine of the large shape, wrapped once, with the seconds that it took."""
    if "start" in results and options.shape not in _engines:
        raise RuntimeError("the engine could not be made: see above")
    if options.shape not in _engines:
        results["start"] = {}
        device = torch.device(options.device)
        begin = time.perf_counter()
        model = build_shape(
            options.shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32
        )
        built = time.perf_counter()
        engine = regraft.wrap(
            model, validate="off", max_requests=options.requests, max_batch_tokens=options.tokens,
            **({} if device.type == "cuda" else {"cache_tokens": 20000}),
        )  # fmt: skip
        wrapped = time.perf_counter()
        engine.generate([[1, 2, 3]], max_new_tokens=2, do_sample=False)
        first = time.perf_counter()
        seconds = {"build": built - begin, "wrap": wrapped - built, "first token": first - wrapped}
        print(
            {name: round(value, 1) for name, value in seconds.items()},
            engine.report.notes,
            flush=True,
        )
        results["start"] = seconds
        report = engine.report
        _engines[options.shape] = (
            engine, Work.of(model, report.bytes_per_token, report.bytes_per_request),
        )  # fmt: skip
    known = results.get("ceilings", {})
    limits = Ceilings(known.get("bytes_per_second", 4.2e12), known.get("flops_per_second", 770e12))
    return *_engines[options.shape], limits


def decode(options: argparse.Namespace, results: dict[str, Any]) -> dict[str, Any]:
    """One decode step by batch, contexts 128 to 1280 in the scheduler's order, as the engine runs it, without it."""
    engine, work, limits = _engine(options, results)
    found = {}
    for batch in map(int, options.batches.split(",")):
        contexts = _contexts(batch)
        seconds = _step_seconds(engine, contexts, options.device)
        floor = work.decode_seconds(contexts, limits)
        found[batch] = {"ms": seconds * 1e3, "floor ms": floor * 1e3, "of floor": floor / seconds}
        print(
            f"decode, batch {batch}: {seconds * 1e3:.3f} ms, floor {floor * 1e3:.3f} ms ({floor / seconds:.3f})",
            flush=True,
        )
    return found


def _contexts(count: int) -> list[int]:
    """Contexts of 128 to 1280, longest first."""
    generator = torch.Generator().manual_seed(0)
    return sorted(torch.randint(128, 1281, (count,), generator=generator).tolist(), reverse=True)


def _decode_batch(engine: Any, contexts: list[int]) -> Any:
    """A decode step of made-up sequences, each on pages of its own."""
    import numpy as np

    from regraft.rewriter.declare import field_of, reaches_of
    from regraft.runtime.batch import Batch

    page_size = engine.config.page_size
    count, width = len(contexts), max(contexts) // page_size + 1
    generator = np.random.default_rng(0)
    pages = generator.permutation(count * width).reshape(count, width).astype(np.int32) + 1
    context = np.array(contexts)
    paged = {}
    for reach in reaches_of(engine.model.rows):
        names = [row.name for row in engine.model.rows if row.reach == reach]
        table = pages % engine._loop.runner.pools[names[0]].shape[0] if names else pages
        last = table[np.arange(count), context // page_size].astype(np.int64)
        paged[field_of("block_table", reach)] = table
        paged[field_of("slot_mapping", reach)] = last * page_size + context % page_size
    arrays = {
        "input_ids": generator.integers(1, 500, (1, count)),
        "position_ids": context.reshape(1, -1),
        "cu_seqlens": np.arange(count + 1, dtype=np.int32),
        "context_lens": context.astype(np.int32),
        **paged,
        "state_slots": np.arange(1, count + 1),
        "extents": context + 1,
        "logits_rows": np.arange(count),
    }
    return Batch(arrays, count)


def _step_seconds(engine: Any, contexts: list[int], device: str) -> float:
    runner, batch = engine._loop.runner, _decode_batch(engine, contexts)
    times = []
    for _ in range(23):
        _wait(device)
        begin = time.perf_counter()
        runner.run(batch)
        if device == "cuda":
            # The device's own time: from an idle device, the copies and the replay.
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    if device == "cuda" and runner._graphs is not None:
        from regraft.runtime.bench.floor import median_seconds

        width = max(contexts) // engine.config.page_size + 1
        return median_seconds(runner._graphs.recorded(len(contexts), width).replay)
    return statistics.median(times[3:])


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def load(options: argparse.Namespace, results: dict[str, Any]) -> dict[str, Any]:
    """Requests with prompts of 128 to 1024 tokens, all at once; and short prompts, which is decoding only."""
    engine, work, limits = _engine(options, results)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(128, 1025, (options.requests,), generator=generator).tolist()
    found: dict[str, Any] = {}
    for _ in range(2):
        seconds = _generate(engine, lengths, options.new, options.device)
        floor = work.load_seconds(lengths, options.new, limits)
        rate = options.requests * options.new / seconds
        found["mixed"] = {
            "seconds": seconds,
            "tok/s": rate,
            "floor s": floor,
            "of floor": floor / seconds,
        }
        print(
            f"{options.requests} requests: {seconds:.2f} s, {rate:.0f} tok/s, {floor / seconds:.3f} of the floor"
        )
    for batch in map(int, options.batches.split(",")):
        new = 2 * options.new
        seconds = _generate(engine, [16] * batch, new, options.device)
        found[f"short {batch}"] = batch * new / seconds
        print(f"{batch} x 16 tokens, {new} new: {batch * new / seconds:.0f} tok/s", flush=True)
    found["allocated GB"] = (
        torch.cuda.max_memory_allocated() / 1e9 if options.device == "cuda" else 0
    )
    program = engine._loop.runner._compiled
    found["compiled"] = (
        None if program is None else (program.num_compiled, program.program.num_bodies)
    )
    print("compilations, distinct bodies:", found["compiled"], engine.report.notes)
    return found


def _generate(engine: Any, lengths: list[int], new: int, device: str) -> float:
    generator = torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(3, engine.model.vocab_size, (n,), generator=generator).tolist()
        for n in lengths
    ]
    _wait(device)
    begin = time.perf_counter()
    outputs = engine.generate(prompts, max_new_tokens=new, do_sample=False)
    seconds = time.perf_counter() - begin
    assert [len(output.token_ids) for output in outputs] == [new] * len(prompts)
    return seconds


def profile(options: argparse.Namespace, results: dict[str, Any]) -> dict[str, Any]:
    """Kernels of one decode step of the largest batch, and the host's time for a step of the engine."""
    engine, _, _ = _engine(options, results)
    count = max(map(int, options.batches.split(",")))
    batch = _decode_batch(engine, _contexts(count))
    runner = engine._loop.runner
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    if options.device != "cuda":
        activities.pop()
    runner.run(batch)
    _wait(options.device)
    with torch.profiler.profile(activities=activities) as profiler:
        runner.run(batch)
        _wait(options.device)
    rows = [
        (event.self_device_time_total, event.count, event.key) for event in profiler.key_averages()
    ]
    rows = [row for row in sorted(rows, reverse=True) if row[0] > 0]
    print(f"{sum(row[0] for row in rows) / 1e3:.3f} ms in {sum(row[1] for row in rows)} kernels")
    for time_us, number, name in rows[:25]:
        print(f"{time_us / 1e3:9.3f} ms {number:5d} x {name[:90]}")
    import cProfile
    import pstats

    prompts = [[3 + i] * 16 for i in range(count)]
    watched = cProfile.Profile()
    watched.enable()
    engine.generate(prompts, max_new_tokens=40, do_sample=False)
    watched.disable()
    pstats.Stats(watched).sort_stats("tottime").print_stats(22)
    return {"kernels": rows[:60]}


warnings.filterwarnings("ignore")

if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
