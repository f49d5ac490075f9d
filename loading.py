"""From what a user names (a model, a configuration, a hub id, a folder) to a model that can be captured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from regraft.rewriter.errors import RewriteError


def meta_model(source: object) -> nn.Module:
    """A model without weights, on the meta device, from a configuration, a hub id, a folder or a config.json."""
    config = source if isinstance(source, PreTrainedConfig) else load_config(source)
    if config.is_encoder_decoder:
        raise RewriteError(
            f"{type(config).__name__} is of an encoder-decoder model",
            fix="pass the configuration of a decoder-only causal language model",
        )
    with torch.device("meta"):
        model = model_class(config)._from_config(config, dtype=config.dtype or torch.bfloat16)
    return model.eval()


def load_config(source: object) -> PreTrainedConfig:
    """A configuration from a hub id, a folder, or the path of a config.json."""
    if not isinstance(source, (str, Path)):
        raise TypeError(f"a model, a configuration or a name is needed, not {type(source)}")
    path = Path(source)
    if path.suffix == ".json" and not path.exists():
        raise ValueError(f"{source} does not exist")
    if path.is_file() and path.name != "config.json":
        return _read(path)
    return AutoConfig.from_pretrained(path.parent if path.is_file() else source)


def _read(path: Path) -> PreTrainedConfig:
    """A configuration from a file of any name; code beside it is not looked for."""
    try:
        fields = json.loads(path.read_text())
    except ValueError as problem:
        raise ValueError(f"{path} is no JSON: {problem}") from problem
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ValueError(f"{path} is no configuration of a model: it has no model_type")
    return AutoConfig.for_model(**fields)


def model_class(config: PreTrainedConfig) -> Any:
    """The class that `AutoModelForCausalLM` takes for a configuration, or the one the configuration itself names."""
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) in mapping:
        return mapping[type(config)]
    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    named = type(config).__name__.removesuffix("Config").removesuffix("Text")
    for suffix in ("ForCausalLM", "ForConditionalGeneration"):
        found = getattr(transformers, named + suffix, None)
        if found is not None:
            return found
    raise RewriteError(
        f"no causal language model is known for {type(config).__name__}",
        fix="pass a model: regraft.inspect(model)",
    )
