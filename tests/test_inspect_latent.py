"""Reports of published latent-attention models from their configurations alone.

layer kinds and bytes of cache per token in bfloat16, all layers grafted
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig
from transformers.models.deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v32 import DeepseekV32Config
from transformers.models.glm4_moe_lite import Glm4MoeLiteConfig
from transformers.models.longcat_flash import LongcatFlashConfig
from transformers.models.minicpm3 import MiniCPM3Config

import regraft

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

YARN_V2 = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "rope_parameters": YARN_V2,
}
MINICPM3_4B: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 6400,
    "num_hidden_layers": 62,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "q_lora_rank": 768,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "vocab_size": 73448,
    "max_position_embeddings": 32768,
}


def attention_of(config: PreTrainedConfig) -> tuple[list[str], int]:
    """The kinds of the layers that mix tokens, and the bytes of cache per token."""
    config.dtype = torch.bfloat16
    report = regraft.inspect(config)
    assert report.expected == report.found
    assert {layer.served for layer in report.layers} == {"grafted"}
    assert report.bytes_per_request == 0
    return [layer.kind for layer in report.layers], report.bytes_per_token


def test_deepseek_v2_lite() -> None:
    kinds, size = attention_of(DeepseekV2Config(**DEEPSEEK_V2_LITE))
    assert kinds == ["latent attention"] * 27
    assert size == 27 * (512 + 64) * 2 == 31_104


def test_deepseek_v32() -> None:
    """The defaults are the published model: a latent row and an index key of 128 in each layer."""
    kinds, size = attention_of(DeepseekV32Config())
    assert kinds == ["indexed attention"] * 61
    assert size == 61 * (512 + 64 + 128) * 2 == 85_888


def test_glm_4_7_flash() -> None:
    """The defaults are the published model: 20 heads with values wider than their keys without rotary part."""
    kinds, size = attention_of(Glm4MoeLiteConfig())
    assert kinds == ["latent attention"] * 47
    assert size == 47 * (512 + 64) * 2 == 54_144


def test_minicpm3_4b() -> None:
    kinds, size = attention_of(MiniCPM3Config(**MINICPM3_4B))
    assert kinds == ["latent attention"] * 62
    assert size == 62 * (256 + 32) * 2 == 35_712


def test_longcat_flash() -> None:
    """The defaults are the published model: two attentions a layer, and 512 experts beside 256 identities."""
    kinds, size = attention_of(LongcatFlashConfig())
    assert kinds == ["latent attention", "experts", "latent attention"] * 28
    assert size == 2 * 28 * (512 + 64) * 2 == 64_512
