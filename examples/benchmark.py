"""Regraft beside every installed peer, in one process on one card, with the floor that none can be faster than.

    python examples/benchmark.py --shape qwen3-8b                       # 128 requests, prompts of 128 to 1024, 256 new
    python examples/benchmark.py --shape qwen3-8b --prompt 16 16 --new 512 --requests 16
    python examples/benchmark.py --shape tiny --device cpu --requests 4 --new 8 --peers generate

Peers: generate (transformers, padded on the left), static (the same with a static cache, which compiles), batch
(transformers' continuous batching), vllm if it can be imported. Weights are random, tokens greedy, ends ignored. Each
way runs once to warm up and then `--repeats` times; the best counts. Writes a table, and beside it JSON and a plot.
`regraft bench MODEL` measures a model of one's own.
"""

from __future__ import annotations

import argparse

import torch
from _shapes import SHAPES, build_shape

import regraft
from regraft.runtime.bench import PEERS, Load, bench


def main() -> None:
    """Measure, print, write."""
    options = _options()
    device = torch.device(options.device)
    model = build_shape(
        options.shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32
    )
    sizes = (options.requests, tuple(options.prompt), options.new, options.tokens, options.repeats)
    bench(model, regraft.wrap, Load(*sizes), options.peers, name=options.shape, out=options.out)


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


if __name__ == "__main__":
    main()
