"""Models that must not be served, each with the reason, the place and what to do; and the engine they never get."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    PretrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_outputs import CausalLMOutput

import regraft
from tests.families.models import build
from tests.families.served import LOGITS, forward, worst, wrap

TINY = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


class ToyConfig(PretrainedConfig):
    model_type = "made_up_here"

    def __init__(self, vocab_size: int = 64, hidden_size: int = 16, **options: object) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        super().__init__(**options)


class ToyLM(PreTrainedModel):
    """A causal LM around one mixer, as somebody's remote code might have it: no base class of a known family."""

    config_class = ToyConfig
    _supports_sdpa = True

    def __init__(self, config: ToyConfig, mixer: Callable[[int], nn.Module]) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size)
        self.mixer = mixer(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def can_generate(self) -> bool:
        return True

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(
        self, input_ids: Tensor, use_cache: bool = False, **unused: object
    ) -> CausalLMOutput:
        hidden = self.embed(input_ids)
        return CausalLMOutput(logits=self.head(hidden + self.mixer(self.norm(hidden))))


class TimeLoop(nn.Module):
    """A recurrence of nobody's: a Python loop over the tokens, with a gate, a square root and a memory of two."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.write = nn.Linear(size, size)
        self.forget = nn.Linear(size, size)
        self.read = nn.Linear(2 * size, size)

    def forward(self, hidden: Tensor) -> Tensor:
        state = torch.zeros_like(hidden[:, 0])
        before = torch.zeros_like(state)
        outputs = []
        for t in range(hidden.shape[1]):
            keep = torch.sigmoid(self.forget(hidden[:, t]))
            state, before = (
                keep * state + (1 - keep * keep).sqrt() * self.write(hidden[:, t]),
                state,
            )
            outputs.append(self.read(torch.cat([state.tanh(), before], dim=-1)))
        return torch.stack(outputs, dim=1)


class TopTokens(nn.Module):
    """Experts that choose their tokens: the four of the whole text that they like best."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.router = nn.Linear(size, 2)
        self.experts = nn.ModuleList(nn.Linear(size, size) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        scores = self.router(hidden).softmax(-1)
        result = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            best, rows = scores[..., number].topk(4, dim=-1)
            rows = rows[..., None].expand(-1, -1, hidden.shape[-1])
            chosen = expert(hidden.gather(1, rows)) * best[..., None]
            result = result.scatter_add(1, rows, chosen)
        return result


class MeanOfAll(nn.Module):
    """Every token sees the mean of the whole text."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.out = nn.Linear(size, size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(hidden.mean(1, keepdim=True)).expand_as(hidden)


class LooksAhead(nn.Module):
    """A loop over the tokens, backwards: no operator's algebra can tell, only the test on prefixes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.write = nn.Linear(size, size)

    def forward(self, hidden: Tensor) -> Tensor:
        state = torch.zeros_like(hidden[:, 0])
        outputs = []
        for t in reversed(range(hidden.shape[1])):
            state = 0.5 * state + self.write(hidden[:, t])
            outputs.append(state)
        return torch.stack(outputs[::-1], dim=1)


def toy(mixer: Callable[[int], nn.Module]) -> ToyLM:
    return ToyLM(ToyConfig(), mixer).eval()


def refusal(model: nn.Module, **settings: object) -> regraft.RewriteError:
    with pytest.raises(regraft.RewriteError) as caught:
        wrap(model, **settings)
    return caught.value


def test_doges_experts_choose_among_all_tokens() -> None:
    error = refusal(build("doge_moe"))
    assert "rows are reordered by a view" in error.problem
    assert error.operation == "aten.reshape.default"
    assert error.path.startswith("model.layers.0.mlp")
    assert error.source.startswith("modeling_doge.py:")
    assert "would mix" in error.fix


@pytest.mark.parametrize("mixer", [TopTokens, MeanOfAll, LooksAhead])
def test_tokens_that_depend_on_later_ones(mixer: type[nn.Module]) -> None:
    error = refusal(toy(mixer))
    assert "not causal" in error.problem
    assert error.operation
    assert error.path in (
        "mixer",
        "",
    )  # a mean becomes rows again where it is added, outside the mixer
    assert error.source.startswith("test_refusals.py:")
    assert "later ones cannot generate" in error.fix


@pytest.mark.parametrize("mixer", [MeanOfAll, LooksAhead])
def test_what_is_still_zero_hides_nothing(mixer: type[nn.Module]) -> None:
    """As an adapter is that was just added: no token depends on a later one yet."""
    model = toy(mixer)
    nn.init.zeros_(list(model.mixer.parameters())[-2])
    nn.init.zeros_(list(model.mixer.parameters())[-1])
    text = torch.randint(64, (9,)).tolist()
    assert worst([forward(model, text)[:5]], [forward(model, text[:5])]) <= LOGITS
    error = refusal(model)
    assert "is causal with its present weights only: with others, drawn at random" in error.problem
    assert error.path in ("mixer", "")
    assert error.source.startswith("test_refusals.py:")
    assert "until it is trained" in error.fix


def test_what_is_still_zero_and_causal_is_served_once_it_is_trained() -> None:
    model = toy(TimeLoop)
    nn.init.zeros_(model.mixer.read.weight)
    engine = wrap(model)
    text = torch.randint(64, (9,)).tolist()
    first = engine.score([text])
    assert worst(first, [forward(model, text)]) <= LOGITS
    nn.init.normal_(model.mixer.read.weight)
    assert worst(engine.score([text], schedule=4), [forward(model, text)]) <= LOGITS
    assert worst(engine.score([text]), first) > 0.1


def test_a_loop_that_no_list_could_know() -> None:
    """Replayed, with the model's own logits; an error for who prefers that."""
    model = toy(TimeLoop)
    engine = wrap(model)
    (layer,) = engine.report.layers
    assert (layer.path, layer.served) == ("mixer", "replayed")
    texts = [torch.randint(64, (n,)).tolist() for n in (21, 1, 2, 9)]
    expected = [forward(model, tokens) for tokens in texts]
    for schedule in ("prefill", "decode", 5):
        assert worst(engine.score(texts, schedule=schedule), expected) <= LOGITS
    error = refusal(model, fallback="refuse")
    assert "no pass takes this" in error.problem
    assert error.path == "mixer"
    assert "replay" in error.fix


def test_refused_rather_than_replayed() -> None:
    error = refusal(build("rwkv"), fallback="refuse")
    assert "no pass takes this" in error.problem
    assert error.operation
    assert error.path
    assert 'fallback="replay"' in error.fix


def test_models_that_are_no_causal_language_models() -> None:
    encoder = BertForMaskedLM(BertConfig(**TINY, intermediate_size=32)).eval()
    error = refusal(encoder)
    assert "BertForMaskedLM" in error.problem
    assert "encoder-only" in error.fix
    both = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    ).eval()
    error = refusal(both)
    assert "encoder-decoder" in error.problem
    assert "decoder-only" in error.fix


def test_a_model_without_weights() -> None:
    with torch.device("meta"):
        model = toy(TimeLoop)
    error = refusal(model)
    assert "no weights" in error.problem
    assert "regraft.inspect" in error.fix


def test_training_mode_with_dropout() -> None:
    """Refused where something would be dropped; without dropout training mode is as good as any, and stays."""
    model = toy(lambda size: nn.Sequential(nn.Linear(size, size), nn.Dropout(0.25)))
    model.train()
    error = refusal(model)
    assert "dropout: mixer.1 (p=0.25)" in error.problem
    assert "model.eval()" in error.fix
    assert model.training
    assert model.mixer[1].training
