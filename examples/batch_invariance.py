"""The same bits in any batch: a real model in both modes, what the mode costs, and that the difference is noise.

    python examples/batch_invariance.py                     # SmolLM2-135M-Instruct, float32, CPU
    python examples/batch_invariance.py FOLDER --requests 4 --new 8

Prompts of 16 to 128 tokens are continued in both modes, taking turns; times are this process's CPU seconds, and the
less of two passes counts. Then `regraft check` in the mode, with batches of a few sizes, and a comparison of the modes.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

import torch
from _smollm2 import load

import regraft
from regraft.rewriter.check import check


def main() -> int:
    """Measure and check; 1 if the check fails or the modes differ by more than noise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a hub id or a folder (default: SmolLM2)")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--new", type=int, default=32, help="tokens per request")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 3, 17])
    options = parser.parse_args()

    torch.set_num_threads(1)
    model, _ = load(options.model)
    vocabulary = model.get_input_embeddings().num_embeddings
    chosen = random.Random(0)
    prompts = [
        chosen.choices(range(vocabulary), k=chosen.randint(16, 128))
        for _ in range(options.requests)
    ]
    engines = {
        mode: regraft.wrap(
            model, batch_invariant=mode == "invariant", cache_tokens=16384, validate="off"
        )
        for mode in ("normal", "invariant")
    }
    seconds: dict[str, list[float]] = {mode: [] for mode in engines}
    for _ in range(2):
        for mode, engine in engines.items():
            begin = time.process_time()
            engine.generate(prompts, do_sample=False, max_new_tokens=options.new, eos_token_id=[])
            seconds[mode].append(time.process_time() - begin)
    tokens = options.requests * options.new
    for mode, all_seconds in seconds.items():
        print(f"{mode:10} {tokens / min(all_seconds):8.1f} new tokens a CPU second")
    print(f"cost       {min(seconds['invariant']) / min(seconds['normal']):8.2f} times the time")

    report = check(engines["invariant"], model, sizes=options.sizes)
    print(report)
    logits = [engine.score(prompts[:4]) for engine in engines.values()]
    compared = regraft.compare(*logits, prompts[:4])
    print(f"normal and invariant mode: {compared}, {'noise' if compared.acceptable else 'HARM'}")
    return 0 if report.passed and compared.acceptable else 1


if __name__ == "__main__":
    sys.exit(main())
