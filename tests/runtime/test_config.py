"""Engine settings: every wrong one is a ValueError that names it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from regraft.runtime import config as config_module
from regraft.runtime.config import EngineConfig


def test_defaults_are_valid_and_frozen():
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.page_size = 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_batch_tokens": 0}, "max_batch_tokens=0"),
        ({"max_requests": -1}, "max_requests=-1"),
        ({"page_size": 1.5}, r"page_size=1\.5"),
        ({"chunk_size": True}, "chunk_size=True"),
        ({"chunk_size": 0}, "chunk_size=0"),
        (
            {"max_batch_tokens": 32, "chunk_size": 33},
            "max_batch_tokens=32 is less than chunk_size=33",
        ),
        ({"cache_tokens": 0}, "cache_tokens=0"),
        ({"memory_fraction": 0}, "memory_fraction=0 "),
        ({"memory_fraction": 1.1}, r"memory_fraction=1\.1"),
        ({"memory_fraction": "all"}, "memory_fraction='all'"),
        ({"cache_tokens": 9, "memory_fraction": 0.5}, "give one of them"),
        ({"fallback": "guess"}, "fallback='guess' is none of replay, refuse"),
        ({"validate": True}, "validate=True is none of quick, full, off"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": "x"}, "seed='x'"),
        ({"prefix_cache": "yes"}, "prefix_cache='yes' is neither True nor False"),
        ({"prefix_checkpoints": -1}, "prefix_checkpoints=-1 is not a whole number"),
        ({"cuda_graphs": 0}, "cuda_graphs=0 is none of True, False, None"),
        ({"compile": 1}, "compile=1 is none of True, False, None"),
        ({"compile": False, "cuda_graphs": True}, "cuda_graphs=True needs a compiled graph"),
    ],
)
def test_a_wrong_setting_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)


def test_chunks_are_no_longer_than_a_step_unless_that_is_asked_for():
    assert EngineConfig().chunk_size == 64
    assert EngineConfig(max_batch_tokens=32).chunk_size == 32
    assert EngineConfig(max_batch_tokens=32, chunk_size=8).chunk_size == 8
    assert EngineConfig(max_batch_tokens=1).chunk_size == 1


def test_an_unknown_setting_is_named_beside_the_known_ones():
    with pytest.raises(ValueError, match=r"'page_sise' is no field of EngineConfig.*page_size"):
        EngineConfig.from_fields(page_sise=4)
    assert EngineConfig.from_fields(page_size=4).page_size == 4


def test_every_field_is_documented_with_its_default():
    text = Path(config_module.__file__).read_text()
    for field in dataclasses.fields(EngineConfig):
        docstring = re.search(rf'    {field.name}: .*\n    """([^"]|"[^"]+")*"""', text)
        assert docstring, field.name
        assert "default" in docstring.group(0), field.name


def test_compiled_on_cuda_unless_said_otherwise():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert not EngineConfig().compiles_on(cpu)
    assert EngineConfig().compiles_on(cuda)
    assert EngineConfig().records_on(cuda)
    assert EngineConfig(compile=True).compiles_on(cpu)
    assert not EngineConfig(compile=True).records_on(cpu)
    assert not EngineConfig(compile=False).compiles_on(cuda)
    assert not EngineConfig(cuda_graphs=False).records_on(cuda)
    with pytest.raises(ValueError, match="the model is on cpu: move it to a GPU"):
        EngineConfig(cuda_graphs=True).records_on(cpu)
