"""Cold or warm, a text's logits are the plain model's: every kind of cache, hits of every kind.

One small model of each kind of rows and states. A text is asked for whose beginning was computed for others; what it is
then told is compared with the plain model's forward without a cache, as is what the first one was told.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import regraft
from regraft import face
from regraft.rewriter.artifact import Artifact
from regraft.runtime.runner import Runner
from tests.families.models import FAMILIES, build
from tests.families.served import LOGITS, forward, wrap
from tests.runtime.engines import assert_idle

SETTINGS = {"prefix_cache": True, "page_size": 4, "chunk_size": 8, "max_batch_tokens": 96}
SHARED = 40
"""Tokens that the texts have in common: a multiple of page and chunk, beyond every window."""

KINDS = {
    "llama": "attention",
    "gemma2": "sliding windows and softcap",
    "llama4": "chunks",
    "gpt_oss": "sinks",
    "falcon_alibi": "distances",
    "deepseek_v3": "latent rows",
    "deepseek_v32": "latent rows and an indexer",
    "qwen3_next": "gated delta rule",
    "kimi_linear": "KDA and latent rows",
    "bamba": "SSD",
    "mamba2": "states alone",
    "lfm2": "short convolutions",
    "qwen4_exp": "gated delta rule and an indexer",
    "deepseek_v4": "compressed rows",
    "rwkv": "a recurrence of its own",
}

QUICK = ("llama", "gemma2", "deepseek_v3", "qwen3_next", "bamba", "mamba2", "deepseek_v4")


class Asker:
    """Asks for one text at a time, and compares all logits that were made for it."""

    def __init__(self, name: str, **settings: object) -> None:
        self.family = FAMILIES[name]
        self.model: PreTrainedModel = build(name)
        # Its own, since some models change their buffers as they run, and with them the version of the weights.
        self.reference: PreTrainedModel = build(name)
        self.engine: regraft.Engine = wrap(self.model, **SETTINGS, **settings)
        self.logits: list[Tensor] = []
        serve = self.engine.model.forward

        def keep(inputs: Mapping[str, Tensor]) -> Tensor:
            result = serve(inputs)
            self.logits.append(result.clone())
            return result

        self.engine.model.forward = keep  # type: ignore[method-assign]

    def text(self, length: int, seed: int = 0) -> list[int]:
        return self.family.prompt(length, seed).tolist()

    def ask(self, prompt: list[int], count: int = 3) -> int:
        """How many tokens of it were not computed."""
        self.logits.clear()
        before = self.engine.stats.prefix_hit_tokens
        (output,) = self.engine.generate([prompt], max_new_tokens=count)
        made = output.token_ids
        assert len(made) == count
        # Of a step that ends in the middle of a prompt nobody wants logits: those of the last steps are told.
        for told, known in zip(self.logits[-count:], range(count), strict=True):
            expected = forward(self.reference, [*prompt, *made[:known]])[-1:]
            assert (told - expected).abs().max() <= LOGITS
        assert_idle(self.engine)
        return self.engine.stats.prefix_hit_tokens - before


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in KINDS]
)
def test_cold_and_warm_logits_are_the_models(name: str) -> None:
    asker = Asker(name)
    has_states = bool(asker.engine.model.states)
    story = asker.text(SHARED + 30)
    beginning = story[:SHARED]
    assert asker.ask(beginning + asker.text(15, seed=1)) == 0
    # A recurrent model learns where texts part, and has a checkpoint there from then on.
    assert asker.ask(beginning + asker.text(15, seed=2)) == (0 if has_states else SHARED)
    assert asker.ask(beginning + asker.text(15, seed=3)) == SHARED
    assert asker.ask([*beginning, story[-1]]) == SHARED  # one token is computed
    # A boundary exactly: up to the one before it, where a recurrent model has no checkpoint yet.
    assert asker.ask(beginning) == (0 if has_states else SHARED - 4)
    assert asker.ask(beginning) == SHARED - (8 if has_states else 4)
    assert asker.ask(story, count=9) == SHARED
    assert asker.ask(story, count=9) in range(SHARED + 24, SHARED + 30)


# The engine's own scans, for which batch invariance has a form of its own; and attention of two kinds.
@pytest.mark.parametrize("name", ["gemma2", pytest.param("bamba", marks=pytest.mark.slow)])
def test_warm_is_cold_to_the_last_bit_where_batches_are_invariant(name: str) -> None:
    asker = Asker(name, batch_invariant=True)
    texts = [asker.text(SHARED) + asker.text(9, seed) for seed in (1, 2, 3)]
    results = []
    for salt in ("cold", "warm", "warm"):
        asker.engine.generate(texts[:2], max_new_tokens=1, cache_salt="warm")
        before = asker.engine.stats.prefix_hit_tokens
        asker.logits.clear()
        asker.engine.generate(texts[2:], max_new_tokens=4, cache_salt=salt)
        results.append(torch.cat(asker.logits[-4:]))
        assert (asker.engine.stats.prefix_hit_tokens > before) == (salt == "warm")
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_rows_of_a_replayed_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(face, "pipeline", tuple)
    for name in ("gemma2", "bamba"):
        asker = Asker(name)
        assert {layer.served for layer in asker.engine.report.layers} == {"replayed"}
        beginning = asker.text(SHARED)
        assert asker.ask(beginning + asker.text(7, seed=1)) == 0
        assert asker.ask(beginning + asker.text(7, seed=2)) == SHARED
        assert asker.ask(beginning) == SHARED - 4


def test_rows_that_depend_on_the_length() -> None:
    """longrope: the rotary embedding of every row is another one once the text is longer than 64 tokens."""
    asker = Asker("phi3_longrope")
    (switch,) = asker.engine.model.switch_lengths
    story = asker.text(switch + 10)
    assert asker.ask(story[:switch]) == 0  # grows beyond the switch, and starts over
    assert asker.ask(story, count=2) == switch  # rows of a long text
    assert asker.ask(story[: switch - 8], count=2) == switch - 12  # rows of a short one
    assert asker.ask(story[: switch + 1], count=2) == switch


def test_weights_changed_in_place() -> None:
    asker = Asker("bamba")
    story = asker.text(SHARED)
    asker.ask(story)
    assert asker.ask(story) == SHARED - 8
    with torch.no_grad():
        for model in (asker.model, asker.reference):
            for weight in model.parameters():
                weight.mul_(1.01)
    assert asker.ask(story) == 0
    assert asker.ask(story) == SHARED - 8


@pytest.mark.parametrize("fault", ["no states", "no position"])
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that are not there, and tokens that take themselves for the first of their text."""
    if fault == "no states":
        monkeypatch.setattr(Runner, "copy_states", lambda self, sources: None)
        name = "mamba2"
    else:
        serve = Artifact.forward

        def mutant(self: Artifact, inputs: Mapping[str, Tensor]) -> Tensor:
            first = inputs["position_ids"] - inputs["position_ids"][0, 0]
            return serve(self, {**inputs, "position_ids": first})

        monkeypatch.setattr(Artifact, "forward", mutant)
        name = "llama"
    with pytest.raises(AssertionError):
        test_cold_and_warm_logits_are_the_models(name)
