"""200 chats that begin with one system prompt of 600 tokens, with and without the prefix cache.

    python examples/prefix_chats.py                      # SmolLM2-135M-Instruct, then a small hybrid
    python examples/prefix_chats.py --uncached 200       # measure every chat without the cache too: minutes on a CPU

Chats arrive one after another. Per model it prints how many tokens went through the model up to each chat's first
token, and how long that took, both with the cache and without it, in one process. The hybrid (gated delta rule and
attention, random weights) has states, which are found again from checkpoints.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import _smollm2
import torch
from _chats import NOTES, QUICK, STORY
from tqdm import tqdm
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

import regraft

SETTINGS = {"cache_tokens": 16_384, "max_requests": 16, "validate": "off"}
"""For both ways. Room for all that the chats share and for some dozens of their own parts."""


@dataclass(frozen=True)
class Run:
    """Chats served one way: tokens computed and seconds up to the first token, of each chat."""

    name: str
    tokens: list[int]
    seconds: list[float]
    first_tokens: list[int]


def main() -> None:
    """Two models, two ways each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a hub id or a folder; by default SmolLM2-135M")
    parser.add_argument("--chats", type=int, default=200, metavar="N")
    parser.add_argument(
        "--uncached", type=int, default=12, metavar="N", help="chats measured without the cache"
    )
    parser.add_argument(
        "--shared", type=int, default=600, metavar="N", help="tokens that the chats begin with"
    )
    arguments = parser.parse_args()
    model, tokenizer = _smollm2.load(arguments.model)
    prompts = make_prompts(tokenizer, arguments.chats, arguments.shared)
    print(f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {model.device}")
    compare(arguments.model or _smollm2.NAME, model, prompts, arguments.uncached)
    hybrid = small_hybrid(len(tokenizer)).to(model.device)
    compare("a small hybrid with random weights", hybrid, prompts, arguments.uncached)


def make_prompts(tokenizer: Any, count: int, shared: int) -> list[list[int]]:
    """Token ids of `count` chats; their first `shared` tokens are the same."""
    system = tokenizer((NOTES + STORY) * 9)["input_ids"][:shared]
    return [system + tokenizer(question(number))["input_ids"] for number in range(count)]


def question(number: int) -> str:
    """What one of the chats asks."""
    return f"\n\nVisitor {number + 1} asks: {QUICK[number % len(QUICK)]}\n\nAnswer:"


def small_hybrid(vocab_size: int) -> Qwen3NextForCausalLM:
    """Three layers with recurrent states and one with rows, of random weights."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=vocab_size,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=4,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        mlp_only_layers=[0, 1, 2, 3],
        max_position_embeddings=2048,
    )
    return Qwen3NextForCausalLM(config).eval()


def compare(name: str, model: Any, prompts: list[list[int]], uncached: int) -> None:
    """Serve the chats both ways and print what the cache saved."""
    print(f"\n{name}: {len(prompts)} chats")
    without = serve("without", model, prompts[:uncached], prefix_cache=False)
    cached = serve("with", model, prompts, prefix_cache=True)
    for run in (without, cached):
        print(
            f"{run.name:8} {len(run.tokens):4} chats  {sum(run.tokens) / len(run.tokens):7.1f} tokens each   "
            f"first token after {statistics.median(run.seconds) * 1e3:8.1f} ms (median), "
            f"{statistics.mean(run.seconds) * 1e3:8.1f} ms (mean)"
        )
    computed, asked = sum(cached.tokens), sum(map(len, prompts))
    faster = statistics.mean(without.seconds) / statistics.mean(cached.seconds)
    pairs = zip(without.first_tokens, cached.first_tokens)
    same = sum(one == two for one, two in pairs)
    print(
        f"prefilled tokens fall by {1 - computed / asked:.1%} ({asked} -> {computed}), "
        f"the first token comes {faster:.1f} times as soon; "
        f"{same} of {len(without.first_tokens)} first tokens are the same"
    )


def serve(name: str, model: Any, prompts: list[list[int]], *, prefix_cache: bool) -> Run:
    """The chats one after another, each up to its first token."""
    tokens, seconds, first_tokens = [], [], []
    with regraft.wrap(model, prefix_cache=prefix_cache, **SETTINGS) as engine:
        engine.generate([[prompts[0][-1]]], max_new_tokens=2, do_sample=False)  # warm up
        for prompt in tqdm(prompts, desc=name, unit="chat", leave=False):
            before, begin = engine.stats.computed_tokens, time.perf_counter()
            stream = engine.stream(prompt, max_new_tokens=8, do_sample=False)
            first_tokens.append(next(stream).token_id)
            seconds.append(time.perf_counter() - begin)
            tokens.append(engine.stats.computed_tokens - before)
            stream.close()
    return Run(name, tokens, seconds, first_tokens)


if __name__ == "__main__":
    main()
