"""What a decoded token costs behind a long history: `python examples/history.py`.

A recurrent layer keeps a state of fixed size, so a token costs the same behind 100 tokens and behind 10,000; attention
reads every earlier row. Random weights, float32, one request, CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Mamba2Config, Qwen3NextConfig

import regraft

NEW = 24
"""Tokens timed behind each history: the median counts."""

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1024}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
LONGEST = {"max_position_embeddings": 1 << 15}

MODELS = {
    "Mamba-2, 4 scans": Mamba2Config(
        hidden_size=256, num_hidden_layers=4, vocab_size=1024, num_heads=8, head_dim=64, state_size=64, n_groups=1,
    ),
    "gated delta rule, 4 of 4 layers": Qwen3NextConfig(
        **SIZES, **HEADS, **LONGEST, num_experts=0, layer_types=["linear_attention"] * 4,
        linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
    ),
    "the same with attention in 1 of 4": Qwen3NextConfig(
        **SIZES, **HEADS, **LONGEST, num_experts=0, layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
    ),
    "attention, 4 of 4 layers": LlamaConfig(**SIZES, **HEADS, **LONGEST),
}  # fmt: skip


def main() -> None:
    """One line per model: milliseconds per token behind each history, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--histories", type=int, nargs=2, default=(100, 10_000), metavar="TOKENS")
    short, long = parser.parse_args().histories
    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        model.generation_config.eos_token_id = None
        with regraft.wrap(
            model, validate="off", cache_tokens=long + NEW + 64, max_requests=1
        ) as engine:
            first, second = (milliseconds_per_token(engine, length) for length in (short, long))
        print(
            f"{name:36s} {first:7.2f} ms behind {short:,} tokens, {second:7.2f} ms behind {long:,}: "
            f"{second / first:.2f} times",
            flush=True,
        )


def milliseconds_per_token(engine: regraft.Engine, history: int) -> float:
    """The median step of one request that has `history` tokens."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(3, 1024, (history,), generator=generator).tolist()
    times: list[float] = []
    last = 0.0
    for _ in engine.stream(prompt, do_sample=False, max_new_tokens=NEW + 2):
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return 1000 * statistics.median(times[2:])


if __name__ == "__main__":
    main()
