"""Tiny models with random weights of every family on the coverage table, and some beyond it.

    model = build("gemma2")                     # float32, eval mode, nothing downloaded
    model = build("gemma2", torch.bfloat16, attn_implementation="eager")
    FAMILIES["gemma2"].needs_eager              # what a test has to know of a family

The configurations are data: configs/row_NN.json, one file a row of the table, and
configs/beyond.json for families that are on no row and that nothing here was developed on. Every layer
type of a family is present, windows and chunks are shorter than a test's prompt, and the weights
(models_weights.py) leave no part of a layer without effect.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.families.models_weights import Gains, keep_in_float32, randomise

CONFIGS = Path(__file__).parent / "configs"
PLAIN_FACTS = ("about", "kwargs", "float32_only", "refused")
UNBOUNDED_LENGTH = 512


@dataclass(frozen=True)
class Family:
    """What is known of one tiny model without building it."""

    name: str
    row: int
    """The row of the coverage table, 0 for a family beyond it."""
    about: str
    config_class: str
    kwargs: dict[str, Any]
    model_class: str | None = None
    """The class with a language head, where AutoModelForCausalLM has none for the configuration."""
    gains: Gains = field(default_factory=Gains)
    avoid: tuple[int, ...] = ()
    """Token ids a text prompt must not contain (placeholders of images or sounds)."""
    float32_only: bool = False
    """Whether the family's own forward fails in other dtypes."""
    refused: str = ""
    """Why this model must be refused, where it must."""

    def config(self) -> PretrainedConfig:
        """A fresh configuration."""
        return _class(self.config_class)(**copy.deepcopy(self.kwargs))

    @property
    def text_config(self) -> PretrainedConfig:
        return self.config().get_text_config()

    @cached_property
    def vocab_size(self) -> int:
        """The width of the logits (inkling cuts the padding of its embedding off)."""
        config = self.text_config
        return int(getattr(config, "unpadded_vocab_size", None) or config.vocab_size)

    @cached_property
    def max_length(self) -> int:
        """The longest sequence that makes sense: the family's position table, where it has one."""
        return int(getattr(self.text_config, "max_position_embeddings", None) or UNBOUNDED_LENGTH)

    @cached_property
    def implementation(self) -> type[PreTrainedModel]:
        """The class that `build` makes an instance of."""
        if self.model_class is not None:
            return _class(self.model_class)
        return AutoModelForCausalLM._model_mapping[type(self.config())]

    @property
    def needs_eager(self) -> bool:
        """Whether the class refuses attn_implementation="sdpa"."""
        return not self.implementation._supports_sdpa

    @property
    def takes_position_ids(self) -> bool:
        return "position_ids" in inspect.signature(self.implementation.forward).parameters

    def prompt(self, length: int, seed: int = 0) -> torch.Tensor:
        """Random token ids `[length]`, int64, without special tokens and ids to avoid."""
        allowed = torch.tensor([i for i in range(3, self.vocab_size) if i not in self.avoid])
        generator = torch.Generator().manual_seed(seed)
        return allowed[torch.randint(len(allowed), (length,), generator=generator)]


def _load() -> dict[str, Family]:
    families = {}
    for path in sorted(CONFIGS.glob("*.json")):
        table_row = 0 if path.stem == "beyond" else int(path.stem.removeprefix("row_"))
        for name, entry in json.loads(path.read_text()).items():
            facts = {
                key: entry[key]
                for key in ("about", "kwargs", "refused", "float32_only")
                if key in entry
            }
            families[name] = Family(
                name=name,
                row=table_row,
                config_class=entry["config"],
                model_class=entry.get("model"),
                gains=Gains(**entry.get("init", {})),
                avoid=tuple(entry.get("avoid", ())),
                **facts,
            )
    return families


def _class(path: str) -> Any:
    """The class "llama.LlamaConfig" of transformers.models.llama."""
    package, name = path.split(".")
    return getattr(importlib.import_module(f"transformers.models.{package}"), name)


FAMILIES = _load()
NAMES = tuple(FAMILIES)


def row(name: str) -> int:
    """The row of the coverage table that `name` stands on; 0 for a family beyond it."""
    return FAMILIES[name].row


def names(*rows: int) -> list[str]:
    """The families of these rows, but for those that must be refused."""
    return [n for n, family in FAMILIES.items() if family.row in rows and not family.refused]


def build(
    name: str,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    *,
    seed: int = 0,
) -> PreTrainedModel:
    """The tiny model `name` in eval mode, on the CPU.

    The weights depend on `name` and `seed` only: the same for any attention implementation and,
    rounded, for any dtype. Modules that a family keeps in float32 stay there, as in
    `from_pretrained`. Generation never stops at an end token, so that lengths are what a test asks
    for. The global random state is left as it was.
    """
    family = FAMILIES[name]
    options: dict[str, Any] = {"dtype": dtype}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = family.implementation._from_config(family.config(), **options)
    if dtype != torch.float32:
        keep_in_float32(model, dtype)
    randomise(model, family.gains, seed)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()
