"""Checks on this machine's GPU that batch_invariant=True keeps its promise, and times what it costs.

    python examples/device_invariance.py                             # everything, on a GPU
    python examples/device_invariance.py --part bits --kinds llama,mamba2 --eager
    python examples/device_invariance.py --part time --shape qwen3.5-0.8b
    python examples/device_invariance.py --part bits --device cpu --tiny --kinds llama --sizes 1 3 --workers 1

bits: models of each kind of mixing at the widths of published ones, with few layers. One text in batches of many sizes
and cut in every way, greedy and sampled continuations, preempted or not, with a cold and a warm prefix: any bit that
differs is an error. time: decode steps and load in both modes, and the cost in %.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import warnings
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from _shapes import build_shape
from device_check import _contexts, _generate, _step_seconds

import regraft
from regraft.rewriter.check import SIZES, Haystack, bits

ATTENTION = {
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
WIDE: dict[str, dict[str, Any]] = {
    "llama": ATTENTION | {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
    "gemma2": ATTENTION | {"head_dim": 256, "num_attention_heads": 8, "sliding_window": 48},
    "mixtral": ATTENTION | {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 300},
    "deepseek_v3": {
        "hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 16,
        "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768,
    },
    "qwen3_next": ATTENTION | {
        "head_dim": 256, "num_key_value_heads": 2, "num_experts": 32, "num_experts_per_tok": 4,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    },
    "kimi_linear": {
        "hidden_size": 2304, "intermediate_size": 4096, "moe_intermediate_size": 512, "num_attention_heads": 16,
        "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "linear_head_dim": 128, "linear_num_heads": 16,
    },
    "mamba2": {"hidden_size": 2048, "num_heads": 64, "head_dim": 64, "state_size": 128, "n_groups": 1},
    "mamba": {"hidden_size": 2048},
    "minimax": ATTENTION | {"intermediate_size": 2048, "head_dim": 128},
    "lfm2": ATTENTION | {"num_key_value_heads": 8},
}  # fmt: skip
"""One model of each kind: what its tiny configuration in the tests is widened by."""

CUTS: dict[str, Any] = {
    "decode": "decode",
    "chunks of 7": 7,
    "chunks of 64": 64,
    "odd cuts": [[1, 2, 3, 63, 65, 255, 257]],
}
LONG = 600
"""Tokens of a text that is cut: over segments of attention and widest tiles of products."""


def main() -> None:
    """Run the parts that were asked for; 1 if a bit differs or a part fails."""
    options = _options()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    failed = False
    if options.part in ("bits", "all"):
        failed |= check_bits(options)
    if options.part in ("time", "all"):
        compare_times(options)
    sys.exit(failed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["bits", "time", "all"], default="all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kinds", default=",".join(WIDE), help="names")
    parser.add_argument("--tiny", action="store_true", help="the tests' own widths")
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "float16"], default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="neither compile nor record")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--modes", default="normal,invariant")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 16, 1])
    return parser.parse_args()


def check_bits(options: argparse.Namespace) -> bool:
    """All kinds, side by side, each in a process of its own; whether anything is not as promised."""
    failed = False
    with get_context("spawn").Pool(options.workers, maxtasksperchild=1) as pool:
        jobs = [(name, vars(options)) for name in options.kinds.split(",")]
        for name, seconds, problems, notes in pool.imap_unordered(check_kind, jobs):
            failed |= bool(problems)
            found = "; ".join(problems) or "the same bits"
            print(f"{name}: {found} [{seconds:.0f} s] {notes}", flush=True)
    return failed


def check_kind(job: tuple[str, dict[str, Any]]) -> tuple[str, float, list[str], list[str]]:
    """Name, seconds, what went wrong, and the engine's notes."""
    name, options = job
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    begin, problems, notes = time.perf_counter(), [], []
    try:
        model = build_kind(name, options)
        config = {"batch_invariant": True, "compile": False if options["eager"] else None}
        engine = regraft.wrap(model, cache_tokens=16384, max_requests=300, validate="off", **config)
        notes = list(engine.report.notes)
        for check in (needles, cuts, preempted, prefixes, validated):
            problems += check(engine, model, config, options)
    except Exception:  # noqa: BLE001 (a worker reports what went wrong with its kind)
        problems.append(traceback.format_exc()[-3000:])
    return name, time.perf_counter() - begin, problems, notes


def build_kind(name: str, options: dict[str, Any]) -> Any:
    """A model with random weights on the device."""
    from dataclasses import replace

    from transformers import AutoModelForCausalLM

    from tests.families.models import FAMILIES, build

    dtype = getattr(torch, options["dtype"])
    if options["tiny"]:
        return build(name, dtype).to(options["device"])
    family = FAMILIES[name]
    wider = {"max_position_embeddings": 4096} if "max_position_embeddings" in family.kwargs else {}
    family = replace(family, kwargs={**family.kwargs, **wider, **WIDE[name]})
    torch.manual_seed(0)
    with torch.device(options["device"]):
        model = AutoModelForCausalLM.from_config(family.config(), dtype=dtype)
    model.generation_config.eos_token_id = None
    return model.eval()


def needles(engine: Any, model: Any, config: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """One text among many, whole, token by token and in pieces; continuations alone and in a crowd."""
    haystack = Haystack(engine, model)
    wrong = [str(run) for run in haystack.runs(options["sizes"]) if run.differing]
    return [*wrong[:4], *([f"{len(wrong)} needles"] if wrong else []), *haystack.generations()[:4]]


def text(engine: Any, length: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, engine.model.vocab_size, (length,), generator=generator).tolist()


def cuts(engine: Any, model: Any, config: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """Logits of texts, cut in every way."""
    problems = []
    for length in (70, min(LONG, engine.model.max_positions or LONG)):
        tokens = text(engine, length)
        (expected,) = engine.score([tokens])
        if not expected.isfinite().all():
            problems.append(f"logits of {length} tokens are not finite")
        for name, schedule in CUTS.items():
            cut = [[at for at in schedule[0] if at < length]] if isinstance(schedule, list) else schedule  # fmt: skip
            differing = int((bits(engine.score([tokens], schedule=cut)[0]) != bits(expected)).sum())
            if differing:
                problems.append(f"{length} tokens, {name}: {differing} logits differ")
    return problems


def outcome(engine: Any, prompts: list[list[int]], **fields: Any) -> list[Any]:
    """Tokens and their log-probabilities."""
    outputs = engine.generate(prompts, max_new_tokens=12, logprobs=True, **fields)
    return [(output.token_ids, output.logprobs) for output in outputs]


def preempted(
    engine: Any, model: Any, config: dict[str, Any], options: dict[str, Any]
) -> list[str]:
    """Requests in a cache that is too small for all of them."""
    sizes = {"cache_tokens": 64, "page_size": 4, "max_requests": 8}
    small = regraft.Engine(engine.model, regraft.EngineConfig(**config, **sizes))
    prompts = [text(engine, 9 + i, seed=i) for i in range(8)]
    sampled = {"do_sample": True, "temperature": 0.9, "top_p": 0.9, "seed": list(range(8))}
    problems = [
        f"preempted requests differ, do_sample={fields['do_sample']}"
        for fields in ({"do_sample": False}, sampled)
        if outcome(small, prompts, **fields) != outcome(engine, prompts, **fields)
    ]
    grows = any(not row.reach.size for row in engine.model.rows)  # a window's pages come back
    if grows and not small._loop.scheduler.num_preemptions:
        problems.append("nothing was preempted")
    return problems


def prefixes(engine: Any, model: Any, config: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """Requests that find a part of their text computed already."""
    sizes = {"cache_tokens": 512, "page_size": 4, "chunk_size": 8, "max_requests": 8}
    warm = regraft.Engine(engine.model, regraft.EngineConfig(**config, prefix_cache=True, **sizes))
    prompts = [text(engine, 40) + text(engine, n, seed=n) for n in (1, 5, 9)]
    expected = outcome(engine, prompts, do_sample=False)
    found = [outcome(warm, [prompt], do_sample=False)[0] for _ in range(2) for prompt in prompts]
    problems = [] if found == 2 * expected else ["a warm prefix gives other bits"]
    if warm.stats.prefix_hit_tokens <= 3 * 32:
        problems.append("no prefix was found")
    return problems


def validated(
    engine: Any, model: Any, config: dict[str, Any], options: dict[str, Any]
) -> list[str]:
    """The comparison with the model itself, not compiled: what a compiled graph chose cannot be watched."""
    if not options["eager"]:
        eagerly = {**config, "compile": False, "validate": "off"}
        engine = regraft.wrap(model, cache_tokens=4096, **eagerly)
    found = engine.validate("quick")
    return [] if found.passed else [f"against the model: {found}"]


def compare_times(options: argparse.Namespace) -> None:
    """One model, an engine of each mode after the other: decode steps by batch, and load end to end."""
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build_shape(options.shape, device, dtype)
    found: dict[str, dict[str, float]] = {}
    for mode in options.modes.split(","):
        begin = time.perf_counter()
        engine = regraft.wrap(
            model, validate="off", max_requests=options.requests, batch_invariant=mode == "invariant",
            compile=False if options.eager else None, memory_fraction=0.4 if device.type == "cuda" else None,
        )  # fmt: skip
        print(f"{mode}: wrapped in {time.perf_counter() - begin:.1f} s {engine.report.notes}", flush=True)  # fmt: skip
        found[mode] = _times(engine, options)
        engine.close()
        del engine
    for name, normal in found.get("normal", {}).items():
        if "invariant" in found:
            mine = found["invariant"][name]
            cost = 100 * (mine / normal - 1)
            print(f"{name}: {normal:.4g} normal, {mine:.4g} invariant, {cost:+.1f} % time")


def _times(engine: Any, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of decode steps, seconds of a load."""
    times = {}
    for batch in options.batches:
        name = f"decode step of {batch}, ms"
        times[name] = 1e3 * _step_seconds(engine, _contexts(batch), options.device)
        print(f"    {name}: {times[name]:.3f}", flush=True)
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randint(128, 1025, (options.requests,), generator=generator).tolist()
    loads = {"load, prompts of 128 to 1024": mixed, "load, prompts of 16": [16] * options.requests}
    for name, lengths in loads.items():
        seconds = min(_generate(engine, lengths, options.new, options.device) for _ in range(2))
        times[f"{name}, s"] = seconds
        rate = options.requests * options.new / seconds
        print(f"    {name}: {seconds:.2f} s, {rate:.0f} tok/s", flush=True)
    return times


warnings.filterwarnings("ignore")

if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
