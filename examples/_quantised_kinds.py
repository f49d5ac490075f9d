"""The ways to load quantised weights that examples/quantised.py tries. A way: (folder, dtype, device) -> model."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

Way = Callable[[str, torch.dtype, torch.device], PreTrainedModel]


def plain(folder: str, dtype: torch.dtype, device: torch.device, **more: Any) -> PreTrainedModel:
    """By transformers, onto the device; on the CPU without a map, which would need accelerate."""
    where = {} if device.type == "cpu" else {"device_map": {"": device}}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **where, **more)


def by_config(name: str, **settings: Any) -> Way:
    """While loading, by a configuration of transformers."""

    def load(folder: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        config = getattr(transformers, name)(**settings)
        return plain(folder, dtype, device, quantization_config=config)

    return load


def by_torchao(name: str, *, granularity: str = "", **settings: Any) -> Way:
    """While loading, by a configuration of torchao."""

    def load(folder: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        module = importlib.import_module("torchao.quantization")
        rows = {"granularity": getattr(module, granularity)()} if granularity else {}
        config = getattr(module, name)(**settings, **rows)
        return by_config("TorchAoConfig", quant_type=config)(folder, dtype, device)

    return load


def compressed(scheme: str, name: str = "CompressedTensorsConfig", *, dequantize: bool) -> Way:
    """From a checkpoint with such weights, which is made of the folder's first."""

    def load(folder: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        made = Path(folder) / scheme
        if not made.exists():
            _compress(Path(folder), made, scheme)
        return by_config(name, dequantize=dequantize)(str(made), dtype, device)

    return load


BLOCKS = "blocks"
"""The scheme of a checkpoint like DeepSeek's, float8 with a scale for each 128 x 128 of a weight."""

SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("float-quantized", {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}),
    "w8a8": (
        "int-quantized",
        {
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        },
    ),
    "int4": (
        "pack-quantized",
        {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}},
    ),
}  # fmt: skip


def _compress(source: Path, target: Path, scheme: str) -> None:
    target.mkdir()
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            parts = _rounded(tensor.float(), scheme)
            if "weight_scale" in parts:
                parts["weight_scale"] = parts["weight_scale"].to(tensor.dtype)
            tensors |= {name.removesuffix("weight") + key: part for key, part in parts.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = _described(scheme)
    (target / "config.json").write_text(json.dumps(config))


def _described(scheme: str) -> dict[str, Any]:
    if scheme == BLOCKS:
        return {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"],
        }  # fmt: skip
    form, group = SCHEMES[scheme]
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], **group}}, "ignore": ["lm_head"],
    }  # fmt: skip


def _rounded(weight: Tensor, scheme: str) -> dict[str, Tensor]:
    if scheme == BLOCKS:
        tiles = weight.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        scale = tiles.abs().amax((1, 3), keepdim=True) / 448
        steps = (tiles / scale).flatten(0, 1).flatten(1).to(torch.float8_e4m3fn)
        return {"weight": steps, "weight_scale_inv": scale[:, 0, :, 0].contiguous()}
    largest = weight.abs().amax(1, keepdim=True)
    if scheme == "fp8":
        scale = largest / 448
        return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
    if scheme == "w8a8":
        scale = largest / 127
        return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}
    pack = importlib.import_module("compressed_tensors.compressors.pack_quantized.helpers")
    groups = weight.unflatten(1, (-1, 32))
    scale = groups.abs().amax(2) / 7
    steps = (groups / scale[..., None]).round().to(torch.int8).flatten(1)
    packed = pack.pack_to_int32(steps, 4)
    return {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }


AO, BNB, CT = "torchao", "bitsandbytes", "compressed-tensors"
WAYS: dict[str, tuple[str, Way]] = {
    "not quantised": ("torch", plain),
    "torchao int8": (AO, by_torchao("Int8WeightOnlyConfig")),
    "torchao int8 + int8 rows": (AO, by_torchao("Int8DynamicActivationInt8WeightConfig")),
    "torchao int4": (AO, by_torchao("Int4WeightOnlyConfig", group_size=32)),
    "torchao int4 preshuffled": (
        AO, by_torchao("Int4WeightOnlyConfig", group_size=128, int4_packing_format="preshuffled"),
    ),
    "torchao int4 tiles": (
        AO, by_torchao("Int4WeightOnlyConfig", group_size=32, int4_packing_format="tile_packed_to_4d"),
    ),
    "torchao int4 unpacked": (AO, by_torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4)),
    "torchao int4 + float8 rows": (AO, by_torchao("Float8DynamicActivationInt4WeightConfig")),
    "torchao float8": (AO, by_torchao("Float8WeightOnlyConfig")),
    "torchao float8 + float8 rows": (
        AO, by_torchao("Float8DynamicActivationFloat8WeightConfig", granularity="PerRow"),
    ),
    "torchao float8 + float8 batch": (
        AO, by_torchao("Float8DynamicActivationFloat8WeightConfig", granularity="PerTensor"),
    ),
    "bitsandbytes int8": (BNB, by_config("BitsAndBytesConfig", load_in_8bit=True)),
    "bitsandbytes int8 threshold 0": (
        BNB, by_config("BitsAndBytesConfig", load_in_8bit=True, llm_int8_threshold=0.0),
    ),
    "bitsandbytes nf4": (BNB, by_config("BitsAndBytesConfig", load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "bitsandbytes fp4 double": (
        BNB, by_config("BitsAndBytesConfig", load_in_4bit=True, bnb_4bit_use_double_quant=True),
    ),
    "quanto int8": ("optimum-quanto", by_config("QuantoConfig", weights="int8")),
    "quanto int4": ("optimum-quanto", by_config("QuantoConfig", weights="int4")),
    "quanto float8": ("optimum-quanto", by_config("QuantoConfig", weights="float8")),
    "compressed fp8 dequantize": (CT, compressed("fp8", dequantize=True)),
    "compressed fp8": (CT, compressed("fp8", dequantize=False)),
    "compressed int4 dequantize": (CT, compressed("int4", dequantize=True)),
    "compressed int4": (CT, compressed("int4", dequantize=False)),
    "compressed int8 + int8 rows": (CT, compressed("w8a8", dequantize=False)),
    "HQQ 4 bits": ("hqq", by_config("HqqConfig", nbits=4, group_size=64)),
    "fine-grained fp8": ("torch", by_config("FineGrainedFP8Config")),
    "fine-grained fp8 saved": ("torch", compressed(BLOCKS, "FineGrainedFP8Config", dequantize=False)),
    "fine-grained fp8 saved dequantize": ("torch", compressed(BLOCKS, "FineGrainedFP8Config", dequantize=True)),
    "FBGEMM fp8": ("fbgemm-gpu-genai", by_config("FbgemmFp8Config")),
}  # fmt: skip
"""By name: the package that is needed, and how to load with it."""

INT8 = ("bitsandbytes.int8_vectorwise_quant.default", "bitsandbytes.int8_scaled_mm.default")
FOUR = ("bitsandbytes.gemv_4bit.default", "bitsandbytes.gemm_4bit.default")
BYTES = ("quanto.qbytes_mm.default",)
ROW_WISE: dict[str, tuple[str, ...]] = {
    "bitsandbytes int8 threshold 0": INT8,
    "bitsandbytes nf4": FOUR,
    "bitsandbytes fp4 double": FOUR,
    "quanto int8": BYTES,
    "quanto float8": BYTES,
}
"""By name: operators of the library's own that are known to keep rows apart, on one device or another."""
