"""The tiny models: they run, depend on every token and weight, and are what their seed says."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.families.models import FAMILIES, NAMES, build, names, row

LENGTH = 64
# Weights that a text prompt does not reach; blt's patcher only decides where its patches end.
UNREACHED = re.compile(r"vision|visual|audio|mm_projector|multi_modal|word_timestamp|\.patcher\.")
# Weights without a gradient because a choice (a top-k, a detached state) lies behind them.
CHOICES = re.compile(r"indexer|correction_bias|expert_bias|router|z_L_init")


def logits(model: PreTrainedModel, name: str, ids: Tensor) -> Tensor:
    """The no-cache forward's logits `[len(ids), vocab]` in float32."""
    inputs = {"input_ids": ids[None]}
    if FAMILIES[name].takes_position_ids:
        inputs["position_ids"] = torch.arange(len(ids))[None]
    return model(**inputs, use_cache=False).logits[0].float()


@pytest.mark.parametrize("name", NAMES)
def test_runs_and_is_sensitive(name: str) -> None:
    """Finite, spread-out logits that depend on the token itself and on those before, not after."""
    model, ids = build(name), FAMILIES[name].prompt(LENGTH)
    other = ids.clone()
    other[40] = ids[41] if ids[40] != ids[41] else ids[42]
    with torch.no_grad():
        reference, changed = logits(model, name, ids), logits(model, name, other)

    assert reference.shape == (LENGTH, FAMILIES[name].vocab_size)
    assert reference.isfinite().all()
    assert reference.std(-1).min() > 0.3
    difference = (reference - changed).abs().amax(-1)
    assert difference[40] > 0.5
    assert difference[41:46].max() > 0.05
    if not FAMILIES[name].refused:
        assert difference[:40].max() < 2e-5


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_matters(name: str) -> None:
    """Each parameter has a gradient; those behind a choice change the logits when drawn anew."""
    model, ids = build(name), FAMILIES[name].prompt(LENGTH)
    reference = logits(model, name, ids)
    (reference * torch.randn(reference.shape)).sum().backward()
    behind_a_choice = [
        (path, parameter)
        for path, parameter in model.named_parameters()
        if not UNREACHED.search(path) and (parameter.grad is None or not parameter.grad.any())
    ]
    assert [path for path, _ in behind_a_choice if not CHOICES.search(path)] == []
    if not behind_a_choice:
        return
    again = dict(build(name, seed=1).named_parameters())
    with torch.no_grad():
        for path, parameter in behind_a_choice:
            parameter.copy_(again[path])
        assert (logits(model, name, ids) - reference).abs().max() > 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_seed_decides_the_weights(name: str) -> None:
    """Same seed, same weights, whatever the global random state; another seed, other logits."""
    ids = FAMILIES[name].prompt(8)
    torch.manual_seed(1)
    first = build(name)
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    second, other = build(name), build(name, seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    with torch.no_grad():
        assert torch.equal(logits(first, name, ids), logits(second, name, ids))
        assert (logits(first, name, ids) - logits(other, name, ids)).abs().max() > 0.5


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_next", "zamba", "mixtral", "inkling2"])
def test_other_dtypes_hold_the_same_weights(name: str) -> None:
    """bfloat16 weights are the rounded float32 ones; what a family keeps in float32 stays so."""
    single, half = build(name), dict(build(name, torch.bfloat16).named_parameters())
    for path, parameter in single.named_parameters():
        assert torch.equal(parameter.to(half[path].dtype), half[path]), path
    kept = {path for path, parameter in half.items() if parameter.dtype == torch.float32}
    assert bool(kept) == (name in ("inkling2", "zamba"))


def test_eager_and_sdpa_share_the_weights() -> None:
    """Where a class has both, they agree on the same draw; `needs_eager` tells the others."""
    ids = FAMILIES["qwen3"].prompt(LENGTH)
    with torch.no_grad():
        eager = logits(build("qwen3", attn_implementation="eager"), "qwen3", ids)
        sdpa = logits(build("qwen3", attn_implementation="sdpa"), "qwen3", ids)
    assert (eager - sdpa).abs().max() < 2e-5
    assert FAMILIES["gemma2"].needs_eager
    assert not FAMILIES["qwen3"].needs_eager


def test_rows() -> None:
    """Every row of the table has its families; a refused one is not among those to be served."""
    assert {row(name) for name in NAMES} == set(range(14))
    assert "doge_moe" in NAMES
    assert "doge_moe" not in names(0)
    assert {"mamba", "falcon_mamba", "jamba", "zamba"} == set(names(6))
