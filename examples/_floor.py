"""What a card could do at best: time floors from its measured ceilings, and the shapes that are measured against them.

A decode step reads every weight once, and the keys and values, or states, of every sequence. A prompt token costs two
FLOPs a weight. Nothing can be faster than these bytes at the copy bandwidth and these FLOPs at the matmul rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "config": "Qwen3Config",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "config": "Qwen3Config",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "deepseek-v2-lite": {
        "config": "DeepseekV2Config",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "topk_method": "greedy",
        "vocab_size": 102400,
        "max_position_embeddings": 32768,
    },
    "tiny": {
        "config": "Qwen3Config",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
    },
}
"""Sizes of published models, by name; the weights are random. "tiny" is for trying a script out."""


def build_shape(
    name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """A model of these sizes with random weights, made on the device."""
    import transformers

    sizes = dict(SHAPES[name])
    config = getattr(transformers, sizes.pop("config"))(**sizes)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def median_seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Median time of a call on the GPU, by events, after two calls to warm up."""
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


@dataclass(frozen=True)
class Ceilings:
    """Measured on this card."""

    bytes_per_second: float
    flops_per_second: float

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Ceilings:
        """A copy of 2 GB, counting bytes read and written, and a matrix product on random data."""
        return cls(_copy_rate(device), _product_rate(device, dtype))


def _copy_rate(device: torch.device) -> float:
    source = torch.randn(1 << 30, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source))


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    left, right = (torch.randn(8192, 8192, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * 8192**3 / median_seconds(lambda: torch.mm(left, right, out=out))


@dataclass(frozen=True)
class Work:
    """Bytes and FLOPs that serving a model cannot do without."""

    weight_bytes: int
    """Read in each step: all weights but the embedding table, of which a step reads single rows."""
    row_bytes: int
    """Kept per token and sequence, and read for each new one."""
    state_bytes: int
    """Kept per sequence, read and written for each new token."""
    weights: int
    attention_flops: float
    """Per pair of a token and an earlier one."""

    @classmethod
    def of(cls, model: PreTrainedModel, row_bytes: int, state_bytes: int) -> Work:
        """`row_bytes` and `state_bytes` as the report of a rewrite has them."""
        table = model.get_input_embeddings().weight
        tied = model.get_output_embeddings().weight is table
        tensors = {id(p): p for p in model.parameters() if tied or p is not table}
        config = model.config.get_text_config()
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        counted = [(p.nbytes, p.numel()) for p in tensors.values()]
        return cls(
            sum(size for size, _ in counted), row_bytes, state_bytes, sum(n for _, n in counted),
            4.0 * layers * heads * width,
        )  # fmt: skip

    def decode_seconds(self, contexts: Sequence[int], ceilings: Ceilings) -> float:
        """One step of sequences that have these many tokens cached."""
        read = (
            self.weight_bytes
            + self.row_bytes * sum(contexts)
            + 2 * self.state_bytes * len(contexts)
        )
        return read / ceilings.bytes_per_second

    def prefill_seconds(self, lengths: Sequence[int], ceilings: Ceilings) -> float:
        """All prompts."""
        flops = sum(2.0 * self.weights * n + self.attention_flops * n * n / 2 for n in lengths)
        return flops / ceilings.flops_per_second

    def load_seconds(self, lengths: Sequence[int], new: int, ceilings: Ceilings) -> float:
        """All prompts, and then `new` tokens for each, all sequences side by side."""
        steps = (
            self.decode_seconds([n + done for n in lengths], ceilings) for done in range(1, new)
        )
        return self.prefill_seconds(lengths, ceilings) + math.fsum(steps)
