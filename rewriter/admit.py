"""What is not captured at all, and what to do instead."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .errors import RewriteError
from .untouched import configs_of


def admit(model: nn.Module) -> None:
    """Raise RewriteError for a model that is no causal language model on one device in inference mode."""
    _refuse_autocast()
    inner = inner_model(model)
    _refuse_other_kinds(inner)
    _refuse_fetched(model)
    _refuse_spread(model)
    if model.training:
        _refuse_dropout(model)


def _refuse_autocast() -> None:
    """A trace would hold the casts, and the caches another dtype than the engine's later steps."""
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise RewriteError(
            "called under torch.autocast, in which operations have other dtypes than the model",
            fix="call it outside of autocast; for half precision, model.to(torch.bfloat16) before",
        )


def inner_model(model: nn.Module) -> nn.Module:
    """The model inside, where an adapter (PEFT) passes every argument through."""
    if hasattr(model, "get_base_model"):
        get_base_model: Callable[[], nn.Module] = model.get_base_model  # type: ignore[assignment]
        return get_base_model()
    return model


def _refuse_other_kinds(model: nn.Module) -> None:
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise RewriteError(
            f"{type(model).__name__} is an encoder-decoder model",
            fix="pass a decoder-only causal language model (AutoModelForCausalLM)",
        )
    can_generate = getattr(model, "can_generate", None)
    if callable(can_generate) and not can_generate():
        raise RewriteError(
            f"{type(model).__name__} has no language-modelling head over past tokens (it cannot generate)",
            fix="load the checkpoint with AutoModelForCausalLM; encoder-only models cannot be served",
        )


def _refuse_fetched(model: nn.Module) -> None:
    """What is put in the place of a weight, for a trace or a test, must go when it is taken away again."""
    for path, module in model.named_modules():
        kept = module._parameters
        if not isinstance(kept, dict):
            raise RewriteError(
                f"the weights of {path or 'the model'} are kept by a {type(kept).__name__}, which fetches them when "
                "they are read, and copies what is put in their place",
                path=path,
                fix="load them in place; of compressed-tensors, with CompressedTensorsConfig(dequantize=True)",
            )


def _refuse_spread(model: nn.Module) -> None:
    """One device, weights in place: a graph has no hooks that fetch weights or move activations."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    mapping = getattr(model, "hf_device_map", None) or {}
    placed = {str(place) for place in mapping.values()}
    hooked = any(hasattr(module, "_hf_hook") for module in model.modules())
    real = {device for device in devices if device.type != "meta"}
    offloaded = bool({"cpu", "disk"} & placed and len(placed) > 1) or "disk" in placed
    offloaded = offloaded or (hooked and any(device.type == "meta" for device in devices))
    if offloaded or len(placed) > 1:
        raise RewriteError(
            f"the model is spread over {sorted(placed) or sorted(map(str, devices))} by accelerate",
            fix="load it on one device: from_pretrained(..., device_map={'': 0}), or without device_map",
        )
    if len(real) > 1 or (real and len(real) != len(devices)):
        raise RewriteError(
            f"the model's tensors are on several devices: {sorted(map(str, devices))}",
            fix="move the whole model to one device: model.to(device)",
        )


def _refuse_dropout(model: nn.Module) -> None:
    active = [
        f"{name} (p={module.p})"
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    ]
    for config in configs_of(model):
        active += [
            f"config.{name}={value}"
            for name, value in vars(config).items()
            if ("dropout" in name or name.endswith("pdrop"))
            and isinstance(value, (int, float))
            and value > 0
        ]
    if active:
        raise RewriteError(
            f"the model is in training mode with dropout: {', '.join(active[:3])}",
            fix="call model.eval() first",
        )
