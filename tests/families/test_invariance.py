"""With batch_invariant=True a request has the same bits whatever else is computed: one model of each kind of mixing.

And the mode is no empty word: without it bits differ, an operation that is not known is refused, and a mutant of each
part, or a planted error, is found by the checks that users have.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel

import regraft
from regraft.__main__ import main
from regraft.kernels.invariant import attention, products, reductions, tokens
from regraft.passes import PIPELINE
from regraft.passes.invariant import make_invariant
from regraft.rewriter.capture import capture
from regraft.rewriter.check import SIZES, Haystack, bits, check
from regraft.rewriter.divergence import first_divergence
from regraft.rewriter.graph import CapturedGraph
from regraft.rewriter.pipeline import rewrite
from tests.families.models import FAMILIES, build
from tests.families.served import wrap

KINDS = {
    "llama": "attention",
    "gemma2": "windows and softcaps",
    "mixtral": "experts",
    "deepseek_v3": "latent attention",
    "qwen3_next": "gated delta rule",
    "kimi_linear": "KDA",
    "mamba2": "SSD",
    "mamba": "selective scan",
    "minimax": "lightning attention",
    "lfm2": "short convolution",
}
FEW = (3, 17)
ROOM = {"cache_tokens": 8192, "max_requests": 300}


def kinds(*names: str) -> pytest.MarkDecorator:
    """A test for each; the models in bfloat16 take as long again."""
    return pytest.mark.parametrize(
        ("name", "dtype"),
        [
            pytest.param(
                name,
                dtype,
                id=f"{KINDS[name]}, {str(dtype)[6:]}".replace(" ", "_"),
                marks=[pytest.mark.xdist_group(f"invariance_{name}")]
                + ([pytest.mark.slow] if dtype == torch.bfloat16 else []),
            )
            for dtype in (torch.float32, torch.bfloat16)
            for name in names
        ],
    )


@functools.cache
def served(name: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, regraft.Engine]:
    model = build(name, dtype)
    return model, wrap(model, batch_invariant=True, **ROOM)


def text(name: str, length: int, seed: int = 0) -> list[int]:
    return FAMILIES[name].prompt(length, seed).tolist()


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


@kinds(*KINDS)
def test_a_needle_has_the_same_bits_in_any_batch(name: str, dtype: torch.dtype) -> None:
    """And so have its continuations, greedy and sampled, whose log-probabilities are those of `score`."""
    model, engine = served(name, dtype)
    haystack = Haystack(engine, model)
    every = name == "llama" or (name == "qwen3_next" and dtype == torch.bfloat16)
    assert [run for run in haystack.runs(SIZES if every else FEW) if run.differing] == []
    assert haystack.generations() == []
    assert haystack.divergence() is None


@kinds(*KINDS)
def test_all_cuts_of_a_text_have_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """Across a tile of keys and a chunk of the plain operators (64)."""
    _, engine = served(name, dtype)
    tokens = text(name, 70)
    (expected,) = engine.score([tokens])
    for schedule in ("decode", 1, 7, 64, [[1, 2, 3, 63, 65]]):
        assert same(engine.score([tokens], schedule=schedule)[0], expected)


def outcome(engine: regraft.Engine, prompts: list[list[int]], **fields: Any) -> list[Any]:
    outputs = engine.generate(prompts, max_new_tokens=12, logprobs=True, **fields)
    return [(output.token_ids, output.logprobs, output.finish_reason) for output in outputs]


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_preempted_or_not(name: str) -> None:
    """What is computed again after a preemption is what was there before it."""
    _, engine = served(name)
    prompts = [text(name, 9 + i, seed=i) for i in range(8)]
    sampled = {"do_sample": True, "temperature": 0.9, "top_p": 0.9, "seed": list(range(8))}
    sizes = {"cache_tokens": 64, "page_size": 4, "max_requests": 8, "validate": "off"}
    config = regraft.EngineConfig(batch_invariant=True, **sizes)
    small = regraft.Engine(engine.model, config)
    for fields in ({"do_sample": False}, sampled):
        expected = outcome(engine, prompts, **fields)
        assert outcome(small, prompts, **fields) == expected
        alone = [
            outcome(engine, [prompt], **{k: v[i] if k == "seed" else v for k, v in fields.items()})
            for i, prompt in enumerate(prompts)
        ]
        assert [one for (one,) in alone] == expected
    if engine.model.rows:  # states have one size: nothing runs short of them
        assert small._loop.scheduler.num_preemptions > 0


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_cold_or_warm_prefix(name: str) -> None:
    _, engine = served(name)
    sizes = {"cache_tokens": 512, "page_size": 4, "chunk_size": 8, "max_requests": 8}
    config = regraft.EngineConfig(batch_invariant=True, prefix_cache=True, **sizes)
    warm = regraft.Engine(engine.model, config)
    prompts = [text(name, 40) + text(name, n, seed=n) for n in (1, 5, 9)]
    expected = outcome(engine, prompts, do_sample=False)
    for _ in range(2):
        for prompt, one in zip(prompts, expected):
            assert outcome(warm, [prompt], do_sample=False) == [one]
    assert warm.stats.prefix_hit_tokens > 3 * 32


def test_the_normal_mode_has_other_bits_which_are_noise() -> None:
    """So the tests above see something, and the mode changes nothing but rounding."""
    model, engine = served("llama")
    normal = wrap(model, **ROOM)
    report = check(normal, model, sizes=(3, 17))
    assert report.passed
    assert any(run.differing for run in report.runs)
    assert report.divergence is not None
    assert report.divergence.path == "model.layers.0.self_attn.q_proj"
    texts = [text("llama", n, seed=n) for n in (33, 64)]
    compared = regraft.compare(normal.score(texts), engine.score(texts), texts)
    assert compared.acceptable and 0 < compared.max_abs < 1e-4


# Mutants: each makes one part depend on what is beside a row. The user's own check must turn red.


def divided_by_rows(x: Tensor, weight: Tensor) -> Tensor:
    half = weight.shape[1] // 2 if len(x) > 2 else weight.shape[1]
    return x[:, :half] @ weight[:, :half].t() + x[:, half:] @ weight[:, half:].t()


def divided_by_tokens(x: Tensor, dim: int) -> Tensor:
    half = x.shape[dim] // 2 if x.numel() > 2 * x.shape[dim] else x.shape[dim]
    return summed_in_parts(x, dim, half)


def divided_by_sequences(x: Tensor, dim: int) -> Tensor:
    return summed_in_parts(x, dim, x.shape[dim] // 2 if len(x) > 1 else x.shape[dim])


def summed_in_parts(x: Tensor, dim: int, half: int) -> Tensor:
    parts = x.narrow(dim, 0, half), x.narrow(dim, half, x.shape[dim] - half)
    return sum(part.sum(dim, keepdim=True) for part in parts)


ordered = reductions.ordered


def chosen_by_rows(x: Tensor, count: int, dim: int, descending: bool) -> tuple[Tensor, Tensor]:
    values, indices = ordered(x, count, dim, descending)
    return (values, indices) if len(x) <= 2 else (values + 2**-12, indices)


@pytest.mark.parametrize(
    ("name", "module", "attribute", "mutant"),
    [
        ("llama", products, "tiled_product", divided_by_rows),
        ("llama", reductions, "tree_sum", divided_by_tokens),
        ("mixtral", reductions, "ordered", chosen_by_rows),
        ("qwen3_next", tokens, "tree_sum", divided_by_sequences),
        ("mamba", tokens, "tree_sum", divided_by_sequences),
    ],
    ids=["products", "sums", "top-k", "delta_rule", "selective_scan"],
)
def test_a_mutant_is_found(
    name: str, module: Any, attribute: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine = served(name)
    monkeypatch.setattr(module, attribute, mutant)
    haystack = Haystack(engine, model)
    assert any(run.differing for run in haystack.runs((3, 17)))
    assert haystack.divergence() is not None


def test_the_first_operation_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant in the attention of the second layer alone."""
    model, engine = served("llama")
    plain, calls = attention._divided, []

    def in_the_second_layer(mixed: Tensor, *rest: Any) -> Tensor:
        calls.append(mixed)
        factor = 1 + 2**-20 if len(calls) % 3 == 2 and len(mixed) == 1 else 1.0
        return plain(mixed, *rest) * factor

    monkeypatch.setattr(attention, "_divided", in_the_second_layer)
    assert len(model.model.layers) == 3
    needle = text("llama", 8)
    found = first_divergence(
        engine,
        needle,
        lambda: engine.score([needle]),
        lambda: engine.score([needle], schedule=[[4]]),
    )
    assert found is not None
    assert found.operation == "regraft.invariant_paged_attention.default"
    assert found.path == "model.layers.1.self_attn"
    assert "modeling_llama.py" in found.source


# Planted errors: what is wrong in every mode, not only in its bits.


def test_a_wrong_mask_row_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """One query in four attends to the token behind it."""
    model, engine = served("llama")
    plain = attention._scored

    def shifted(scores: Tensor, tiles: Any, *rest: Any) -> Tensor:
        positions = tiles.positions + (tiles.positions % 4 == 2).long()
        return plain(scores, type(tiles)(**{**vars(tiles), "positions": positions}), *rest)

    assert check(engine, model, sizes=(3,)).passed
    monkeypatch.setattr(attention, "_scored", shifted)
    report = check(engine, model, sizes=(3,))
    assert not report.passed and not report.validation.passed
    assert "FAILED" in str(report)


def test_a_state_that_is_not_reset_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = served("mamba")
    monkeypatch.setattr(
        tokens, "initial_states", lambda pool, slots, _: pool.index_select(0, slots)
    )
    report = check(engine, model, sizes=(3,))
    assert not report.passed and report.failures


class Odd(nn.Module):
    """An activation that no rule knows."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.atan(x)


class Running(nn.Module):
    """Mixes tokens as no pass does."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.cumsum(1)


class OfHeads(nn.Module):
    """A linear map with a bias of its own for each of four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width // 4, width // 4))
        self.bias = nn.Parameter(torch.randn(4, width // 4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.unflatten(-1, (4, -1)), self.weight, self.bias).flatten(-2)


def captured_with(activation: nn.Module) -> CapturedGraph:
    model = build("llama")
    model.model.layers[1].mlp.act_fn = activation
    return rewrite(capture(model), PIPELINE).captured


def test_an_operation_that_is_not_known_is_refused() -> None:
    captured = captured_with(Odd())
    for allowed in ((), ("model.layers.0", "model.layers.1.self_attn", "aten.tan.default")):
        with pytest.raises(regraft.RewriteError, match=r"not known to be invariant") as refused:
            make_invariant(captured, allowed)
        assert refused.value.operation == "aten.atan.default"
        assert refused.value.path == "model.layers.1.mlp.act_fn"
        assert "test_invariance.py" in refused.value.source
    for name in ("aten.atan.default", "model.layers.1.mlp", "model.layers.1"):
        make_invariant(captured, (name,))


def test_a_replayed_region_is_refused() -> None:
    """It is computed over the whole text, so its bits depend on how much of it there is."""
    captured = captured_with(Running())
    with pytest.raises(regraft.RewriteError, match="a replayed region") as refused:
        make_invariant(captured)
    assert refused.value.path.startswith("model.layers.1.mlp")
    make_invariant(captured, ("replay",))


def test_a_product_that_cannot_be_trusted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where BLAS does not do as it was measured to do."""
    captured = captured_with(nn.SiLU())
    monkeypatch.setattr("regraft.passes.invariant.steady_product", lambda weight: False)
    with pytest.raises(regraft.RewriteError, match="rounds a row by its place in a tile"):
        make_invariant(captured)


def test_a_bias_of_several_rows_is_refused() -> None:
    """The card's product adds one row to all."""
    width = build("llama").config.intermediate_size
    with pytest.raises(regraft.RewriteError, match="a bias of several rows"):
        make_invariant(captured_with(OfHeads(width)))


def test_wrap_refuses_and_allows() -> None:
    model = build("llama")
    model.model.layers[1].mlp.act_fn = Odd()
    with pytest.raises(regraft.RewriteError, match=r"allow_variant=\(\"aten.atan.default\",\)"):
        wrap(model, batch_invariant=True)
    engine = wrap(model, batch_invariant=True, allow_variant=("aten.atan.default",))
    assert any("batch invariant" in note for note in engine.report.notes)


def test_other_devices_are_refused() -> None:
    captured = CapturedGraph(fx.GraphModule({}, fx.Graph()), {"w": torch.empty(1, device="meta")})
    with pytest.raises(
        regraft.RewriteError, match="only the CPU and CUDA have invariant operators"
    ):
        make_invariant(captured)


def test_the_command_line(tmp_path: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    build("llama").save_pretrained(tmp_path)
    arguments = ["check", str(tmp_path), "--batch-invariant", "--sizes", "1", "3"]
    assert main(arguments) == 0
    assert "first divergence   none" in capsys.readouterr().out
    monkeypatch.setattr(products, "tiled_product", divided_by_rows)
    assert main(arguments) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed and "regraft.invariant_linear.default in model.layers.0" in printed
