"""What a decoded token reads and costs in DeepSeek-V3: `python examples/latent.py --layers 61`.

Bytes come from the report on the published configuration (no weights). Times are of one layer's attention with random
weights of these sizes, float32, CPU: the operator over the latent rows, beside keys and values that are rebuilt from
the same rows in every step and then attended to. Both are compared before they are timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DeepseekV3Config

import regraft
from regraft.kernels.latent_attention import latent_attention

PAGE = 16
DIFFERENCE = 1e-4
"""Largest difference between the two, float32."""


def main() -> None:
    """Bytes per token and step, then milliseconds per step and layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=1, help="how many of the 61 to trace")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    config = DeepseekV3Config(num_hidden_layers=options.layers, dtype=torch.bfloat16)
    print_bytes(config, options.context)
    print_times(config, options.context, options.repeats)


def print_bytes(config: DeepseekV3Config, context: int) -> None:
    """What is cached of a token, and so what the next token reads of all of them."""
    report = regraft.inspect(config)
    layers = sum(layer.kind == "latent attention" for layer in report.layers)
    widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    expanded = config.num_hidden_layers * config.num_attention_heads * widths * 2
    latent = report.bytes_per_token
    print(
        f"latent attention in {layers} of {config.num_hidden_layers} layers, bfloat16\n"
        f"  latent rows      {latent:11,} bytes a token, {latent * context:16,} read a step behind {context:,} tokens\n"
        f"  keys and values  {expanded:11,} bytes a token, {expanded * context:16,} read: "
        f"{expanded / latent:.1f} times"
    )


def print_times(config: DeepseekV3Config, context: int, repeats: int) -> None:
    """One new token behind `context - 1` cached ones, in one layer."""
    torch.manual_seed(0)
    heads, rank = config.num_attention_heads, config.kv_lora_rank
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    weight = torch.randn(heads * (nope + value), rank) / rank**0.5
    pages = -(-context // PAGE)
    cache = torch.randn(pages, PAGE, rank + rope)
    query, held = torch.randn(1, heads, nope + rope), cache.view(-1, rank + rope)[:context]
    new = held[-1:].clone()
    w_k, w_v = weight.view(heads, nope + value, rank).split([nope, value], 1)
    scale = (nope + rope) ** -0.5
    metadata = (
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([context - 1], dtype=torch.int32),
        torch.arange(pages, dtype=torch.int32)[None],
        torch.tensor([context - 1]),
    )

    def absorbed() -> Tensor:
        return latent_attention(query, new, w_k, w_v, cache, *metadata, 0, nope, scale)

    def rebuilt() -> Tensor:
        both = (held[:, :rank] @ weight.T).view(context, heads, nope + value).transpose(0, 1)
        shared = held[None, :, rank:].expand(heads, context, rope)
        keys = torch.cat([both[..., :nope], shared], -1)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1), keys, both[..., nope:], scale=scale
        )
        return attended.transpose(0, 1)

    assert float((absorbed() - rebuilt()).abs().max()) <= DIFFERENCE
    first, second = (milliseconds(run, repeats) for run in (absorbed, rebuilt))
    print(
        f"one token behind {context:,}, one layer, float32, {torch.get_num_threads()} CPU threads\n"
        f"  absorbed {first:9.2f} ms\n"
        f"  rebuilt  {second:9.2f} ms: {second / first:.0f} times"
    )


@torch.no_grad()
def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """The median of some runs after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[1:])


if __name__ == "__main__":
    main()
