"""Regraft beside every installed peer, in one process on one card, with the floor that none can be faster than.

    python examples/benchmark.py --shape qwen3-8b                       # 128 requests, prompts of 128 to 1024, 256 new
    python examples/benchmark.py --shape qwen3-8b --prompt 16 16 --new 512 --requests 16
    python examples/benchmark.py --shape tiny --device cpu --requests 4 --new 8 --peers generate

Peers: generate (transformers, padded on the left), static (the same with a static cache, which compiles), batch
(transformers' continuous batching), vllm if it can be imported. Weights are random, tokens greedy, ends ignored. Each
way runs once to warm up and then `--repeats` times; the best counts. Writes a table, and beside it JSON and a plot.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _floor import SHAPES, Ceilings, Work, build_shape

import regraft

Prompts = list[list[int]]
Way = Callable[[Prompts, int], object]


@dataclass(frozen=True)
class Row:
    """One way's result: seconds for all requests, of each repeat."""

    name: str
    seconds: tuple[float, ...]
    tokens_per_second: float
    of_floor: float
    start_seconds: float
    problem: str = ""


def main() -> None:
    """Measure, print, write."""
    options = _options()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build_shape(options.shape, device, dtype)
    generator = torch.Generator().manual_seed(1)
    low, high = options.prompt
    lengths = torch.randint(low, high + 1, (options.requests,), generator=generator).tolist()
    vocab = model.config.get_text_config().vocab_size
    prompts = [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]
    limits = Ceilings.measure(device, dtype) if device.type == "cuda" else Ceilings(20e9, 50e9)
    start = time.perf_counter()
    way, work = regraft_way(model, options)
    floor = work.load_seconds(lengths, options.new, limits)
    rows = [measure("Regraft", way, prompts, options, floor, time.perf_counter() - start)]
    del way
    gc.collect()
    for name in options.peers:
        rows.append(_measure_peer(name, model, prompts, options, floor))
        print_row(rows[-1])
    print_table(rows, floor, limits, options)
    write(rows, floor, limits, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt", type=int, nargs=2, default=(128, 1024), metavar=("LOW", "HIGH"))
    parser.add_argument("--new", type=int, default=256, help="output tokens per request")
    parser.add_argument("--tokens", type=int, default=8192, help="most tokens of one step")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--peers", nargs="*", default=[*PEERS], choices=PEERS)
    parser.add_argument("--out", default="benchmark", help="where JSON and plot go, without suffix")
    return parser.parse_args()


def regraft_way(model: Any, options: argparse.Namespace) -> tuple[Way, Work]:
    """An engine that is closed when its way is forgotten."""
    engine = regraft.wrap(
        model, validate="off", max_requests=options.requests, max_batch_tokens=options.tokens,
        cache_tokens=options.requests * (max(options.prompt) + options.new + 16),
    )  # fmt: skip

    def run(prompts: Prompts, new: int) -> object:
        return engine.generate(prompts, max_new_tokens=new, do_sample=False)

    report = engine.report
    return run, Work.of(model, report.bytes_per_token, report.bytes_per_request)


def padded_way(model: Any, options: argparse.Namespace, **settings: Any) -> Way:
    """transformers' generate: one batch, padded on the left."""

    def run(prompts: Prompts, new: int) -> object:
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        return model.generate(
            ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=new, min_new_tokens=new,
            do_sample=False, **settings,
        )  # fmt: skip

    return run


def static_way(model: Any, options: argparse.Namespace) -> Way:
    """The same with a static cache, for which transformers compiles the model."""
    return padded_way(model, options, cache_implementation="static")


def batch_way(model: Any, options: argparse.Namespace) -> Way:
    """transformers' continuous batching."""
    from _baselines import generate_batch

    return lambda prompts, new: generate_batch(model, prompts, [new] * len(prompts))


def vllm_way(model: Any, options: argparse.Namespace) -> Way:
    """vLLM on a copy of the shape with weights of its own; it wants most of the card, so the model is moved away."""
    import tempfile

    from vllm import LLM, SamplingParams

    folder = tempfile.mkdtemp()
    model.config.save_pretrained(folder)
    model.to("cpu")
    torch.cuda.empty_cache()
    engine = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=options.requests
    )

    def run(prompts: Prompts, new: int) -> object:
        settings = SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        return engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], settings, use_tqdm=False
        )

    return run


PEERS: dict[str, Callable[[Any, argparse.Namespace], Way]] = {
    "generate": padded_way,
    "static": static_way,
    "batch": batch_way,
    "vllm": vllm_way,
}


def _measure_peer(
    name: str, model: Any, prompts: Prompts, options: argparse.Namespace, floor: float
) -> Row:
    """A peer that is not there, or fails, is a row that says so."""
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        return Row(name, (), 0.0, 0.0, 0.0, "not installed")
    try:
        start = time.perf_counter()
        way = PEERS[name](model, options)
        return measure(name, way, prompts, options, floor, time.perf_counter() - start)
    except Exception as error:  # noqa: BLE001 (somebody else's program: its failure is the result)
        return Row(name, (), 0.0, 0.0, 0.0, f"{type(error).__name__}: {str(error)[:200]}")


def measure(
    name: str, way: Way, prompts: Prompts, options: argparse.Namespace, floor: float, start: float
) -> Row:
    """One run to warm up, which counts as starting, and the timed ones."""
    begin = time.perf_counter()
    way(prompts, options.new)
    start += time.perf_counter() - begin
    seconds = []
    for _ in range(options.repeats):
        begin = time.perf_counter()
        way(prompts, options.new)
        seconds.append(time.perf_counter() - begin)
    best = min(seconds)
    return Row(name, tuple(seconds), len(prompts) * options.new / best, floor / best, start)


def print_row(row: Row) -> None:
    """One line of the table."""
    if row.problem:
        print(f"{row.name:12s} {row.problem}")
        return
    every = ", ".join(f"{s:.2f}" for s in row.seconds)
    print(
        f"{row.name:12s} {row.tokens_per_second:10,.0f} tok/s   {row.of_floor:6.3f} of the floor   "
        f"({every} s; start {row.start_seconds:.0f} s)",
        flush=True,
    )


def print_table(
    rows: list[Row], floor: float, limits: Ceilings, options: argparse.Namespace
) -> None:
    """All rows, and what they are measured against."""
    print(
        f"\n{options.shape}, {options.requests} requests, prompts of {options.prompt[0]} to {options.prompt[1]}, "
        f"{options.new} new; {torch.cuda.get_device_name() if options.device == 'cuda' else options.device}"
    )
    print(
        f"floor {floor:.2f} s: copy {limits.bytes_per_second / 1e12:.2f} TB/s, "
        f"matmul {limits.flops_per_second / 1e12:.0f} TFLOP/s"
    )
    for row in rows:
        print_row(row)
    for row in rows[1:]:
        if row.tokens_per_second:
            ratio = rows[0].tokens_per_second / row.tokens_per_second
            print(f"Regraft is {ratio:.2f} times {row.name}")


def write(rows: list[Row], floor: float, limits: Ceilings, options: argparse.Namespace) -> None:
    """JSON with every figure, and a plot where matplotlib is installed."""
    out = Path(options.out)
    data = {
        "options": vars(options), "floor_seconds": floor, "ceilings": asdict(limits), "torch": torch.__version__,
        "rows": [asdict(row) for row in rows],
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
    limit = options.requests * options.new / floor
    axis.axvline(limit, linestyle="--", color="black", label=f"floor: {limit:,.0f} tok/s")
    axis.invert_yaxis()
    axis.set_xlabel("output tokens per second")
    axis.set_title(f"{options.shape}, {options.requests} requests")
    axis.legend()
    figure.tight_layout()
    figure.savefig(out.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main()
