"""32 ragged chats on the CPU: Regraft beside transformers' own ways, in one process, greedily.

    python examples/benchmark_cpu.py                # SmolLM2-135M-Instruct, float32
    python examples/benchmark_cpu.py --chats 8

Prompts of 31 to 400 tokens, outputs of 16 to 128; every method gets the same. Each is run once to warm up on two
short chats, and then timed over all of them.
"""

from __future__ import annotations

import argparse
import os
import platform

import _smollm2
import torch
import transformers
from _baselines import BASELINES, Run, TokenIds, timed
from _chats import CHATS, encode, ragged_lengths
from _memory import print_memory
from quickstart import print_runs
from tqdm import tqdm

import regraft


def main() -> None:
    """Measure, print the table, the ratios and the hardware."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a hub id or a folder; by default SmolLM2-135M")
    parser.add_argument("--chats", type=int, default=len(CHATS), choices=range(1, len(CHATS) + 1))
    arguments = parser.parse_args()

    model, tokenizer = _smollm2.load(arguments.model)
    prompts = encode(tokenizer, CHATS[-arguments.chats :])
    lengths = ragged_lengths(len(prompts))
    engine = regraft.wrap(model, tokenizer=tokenizer)

    def graft(model: object, prompts: TokenIds, lengths: list[int]) -> TokenIds:
        outputs = engine.generate(prompts, do_sample=False, max_new_tokens=lengths)
        return [list(output.token_ids) for output in outputs]

    runs = []
    for name, method in tqdm({"Regraft": graft, **BASELINES}.items(), unit="way"):
        method(model, prompts[:2], [2, 2])
        runs.append(timed(name, lambda method=method: method(model, prompts, lengths)))
    print_runs(runs)
    print_ratios(runs)
    print_memory(engine, lambda: graft(model, prompts, [2] * len(prompts)))
    print(
        f"\n{os.cpu_count()} cores ({platform.processor() or platform.machine()}), "
        f"{torch.get_num_threads()} threads, {model.dtype}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )


def print_ratios(runs: list[Run]) -> None:
    """How many times faster the first run is than each of the others."""
    ours, *others = runs
    print()
    for run in others:
        ratio = ours.tokens_per_second / run.tokens_per_second
        print(f"{ours.name} is {ratio:.2f} times {run.name}")


if __name__ == "__main__":
    main()
