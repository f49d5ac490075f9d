"""Keys and values linear in one row are served from that row; the rest is declined and served as before."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regraft.kernels.latent_attention import absorbed
from regraft.passes import attention, latent_attention, positions
from regraft.rewriter.capture import capture
from regraft.rewriter.pattern import Declined
from regraft.rewriter.pipeline import Rewriting, rewrite
from regraft.rewriter.token_axis import analyse, find_regions
from tests.passes.serve import one_by_one, serve
from tests.passes.toy_attention import causal

HEADS, WIDTH, V_WIDTH, SHARED, RANK, HIDDEN, VOCAB = 6, 8, 10, 4, 12, 24, 32
PASSES = (latent_attention.PASS, attention.PASS, positions.PASS)
EXACT = 1e-10
STEPS = [[(0, 0, 5)], [(0, 5, 6), (1, 0, 3)], [(1, 3, 7), (0, 6, 17)]]


class Latents(nn.Module):
    """Attention whose keys and values come from a row of RANK values, and a key part that all heads share.

    `heads_of(self, x) -> (q, k, v)`, each [1, H, T, ...], is what the tests vary.
    """

    def __init__(
        self, heads_of: Callable[[Latents, Tensor], tuple[Tensor, Tensor, Tensor]]
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads_of = heads_of
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.query = nn.Linear(HIDDEN, HEADS * (WIDTH + SHARED), bias=False)
        self.down, self.other_down = (nn.Linear(HIDDEN, RANK, bias=False) for _ in range(2))
        self.wide_down = nn.Linear(HIDDEN, 80, bias=False)
        self.wide_up = nn.Linear(80, HEADS * (WIDTH + V_WIDTH), bias=False)
        self.rotary = nn.Linear(HIDDEN, SHARED, bias=False)
        self.rotary_by_head = nn.Linear(HIDDEN, HEADS * SHARED, bias=False)
        self.up_k = nn.Linear(RANK, HEADS * WIDTH, bias=False)
        self.up_v = nn.Linear(RANK, HEADS * V_WIDTH, bias=False)
        self.up = nn.Linear(RANK, HEADS * (WIDTH + V_WIDTH), bias=False)
        self.biased_k = nn.Linear(RANK, HEADS * WIDTH)
        self.biased_v = nn.Linear(RANK, HEADS * V_WIDTH)
        self.out = nn.Linear(HEADS * V_WIDTH, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.double().eval()

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = False
    ) -> SimpleNamespace:
        x = self.embed(input_ids)
        q, k, v = self.heads_of(self, x)
        mask = causal(x.shape[1])
        mixed = F.scaled_dot_product_attention(q, k, v, mask, scale=0.4)
        return SimpleNamespace(logits=self.head(x + self.out(mixed.transpose(1, 2).flatten(2))))

    def latent(self, x: Tensor) -> Tensor:
        return F.rms_norm(self.down(x), (RANK,))

    def shared(self, x: Tensor) -> Tensor:
        return torch.tanh(self.rotary(x))[:, None].expand(-1, HEADS, -1, -1)

    def queries(self, x: Tensor) -> Tensor:
        return heads(self.query(x))


def heads(rows: Tensor) -> Tensor:
    """[1, T, H * W] -> [1, H, T, W]"""
    return rows.unflatten(-1, (HEADS, -1)).transpose(1, 2)


Found = tuple[Tensor, Tensor, Tensor]


def two_maps(m: Latents, x: Tensor) -> Found:
    c = m.latent(x)
    return m.queries(x), torch.cat([heads(m.up_k(c)), m.shared(x)], -1), heads(m.up_v(c))


def one_map(m: Latents, x: Tensor) -> Found:
    """Keys and values side by side in one projection, the shared part first."""
    k, v = heads(m.up(m.latent(x))).split([WIDTH, V_WIDTH], -1)
    return m.queries(x), torch.cat([m.shared(x), k], -1), v


def written_in_place(m: Latents, x: Tensor) -> Found:
    q, k, v = one_map(m, x)
    whole = k.new_empty(k.shape)
    whole[..., :SHARED].copy_(k[..., :SHARED])
    whole[..., SHARED:].copy_(k[..., SHARED:])
    return q, whole, v


def no_shared_part(m: Latents, x: Tensor) -> Found:
    c = m.latent(x)
    return m.queries(x)[..., :WIDTH], heads(m.up_k(c)), heads(m.up_v(c))


def shared_part_is_linear(m: Latents, x: Tensor) -> Found:
    """Without a rotary embedding: two linear maps make a key, one of them the same for all heads."""
    q, k, v = two_maps(m, x)
    shared = m.rotary(x)[:, None].expand(-1, HEADS, -1, -1)
    return q, torch.cat([k[..., :WIDTH], shared], -1), v


SPELLINGS = {
    f.__name__: f
    for f in (two_maps, one_map, written_in_place, no_shared_part, shared_part_is_linear)
}


def grafted(model: nn.Module) -> Rewriting:
    return rewrite(capture(model), PASSES, fallback="refuse")


def check_served(model: nn.Module, rewriting: Rewriting) -> None:
    """Two requests cut into pieces in one row, and one token by token, in float64."""
    sequences = [torch.arange(17) * 7 % VOCAB, torch.arange(7) * 5 % VOCAB]
    with torch.no_grad():
        expected = [model(ids[None]).logits[0] for ids in sequences]
    results = [*serve(rewriting, sequences, STEPS), *serve(rewriting, sequences[1:], one_by_one(7))]
    for result, reference in zip(results, [*expected, expected[1]], strict=True):
        error = float((result - reference).abs().nan_to_num(nan=torch.inf).max())
        assert error <= EXACT, f"off by {error:.1e}"


@pytest.mark.parametrize("name", SPELLINGS)
def test_one_row_a_token(name: str) -> None:
    model = Latents(SPELLINGS[name])
    rewriting = grafted(model)
    (served,) = rewriting.served
    assert served.operator == "regraft::latent_attention"
    width = RANK if name == "no_shared_part" else RANK + SHARED
    assert [spec.shape for spec in served.rows] == [(width,)]
    full = HEADS * (WIDTH + V_WIDTH + width - RANK)
    assert f"{width} values a token in place of {full}" in served.notes[0]
    check_served(model, rewriting)


def test_layers_that_read_one_row_share_its_cache() -> None:
    """Two attentions, each with maps of its own, over one latent."""

    def twice(m: Latents, x: Tensor) -> Found:
        q, c, shared = m.queries(x), m.latent(x), m.shared(x)
        k, v = torch.cat([heads(m.up_k(c)), shared], -1), heads(m.up_v(c))
        first = F.scaled_dot_product_attention(q, k, v, causal(x.shape[1]), scale=0.4)
        k, v = heads(m.up(c)).split([WIDTH, V_WIDTH], -1)
        return torch.cat([first[..., :WIDTH], q[..., WIDTH:]], -1), torch.cat([k, shared], -1), v

    model = Latents(twice)
    one, two = grafted(model).served
    assert ([spec.shape for spec in one.rows], two.rows) == ([(RANK + SHARED,)], [])
    check_served(model, grafted(model))


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "keys of another head": lambda patch: patch.setattr(
        absorbed, "absorb", lambda q, w: original_absorb(q, w.roll(1, 0))
    ),
    "values of another head": lambda patch: patch.setattr(
        absorbed, "project", lambda x, w: original_project(x, w.roll(1, 0))
    ),
    "no key map": lambda patch: patch.setattr(
        absorbed, "absorb", lambda q, w: original_absorb(q, torch.ones_like(w))
    ),
}
original_absorb, original_project = absorbed.absorb, absorbed.project


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Latents(two_maps)
    rewriting = grafted(model)
    MUTANTS[name](monkeypatch)
    with pytest.raises(AssertionError, match="off by"):
        check_served(model, rewriting)


# ---- near misses


def different_latents(m: Latents, x: Tensor) -> Found:
    q, k, _ = two_maps(m, x)
    return q, k, heads(m.up_v(F.rms_norm(m.other_down(x), (RANK,))))


def latents_alike_but_not_the_same(m: Latents, x: Tensor) -> Found:
    """Values from the row before its norm."""
    q, k, _ = two_maps(m, x)
    return q, k, heads(m.up_v(m.down(x)))


def activated_keys(m: Latents, x: Tensor) -> Found:
    c = m.latent(x)
    return m.queries(x), torch.cat([F.silu(heads(m.up_k(c))), m.shared(x)], -1), heads(m.up_v(c))


def activated_latent(m: Latents, x: Tensor) -> Found:
    c = m.latent(x)
    k = torch.cat([heads(m.up_k(F.silu(c))), m.shared(x)], -1)
    return m.queries(x), k, heads(m.up_v(c))


def key_bias(m: Latents, x: Tensor) -> Found:
    c = m.latent(x)
    return m.queries(x), torch.cat([heads(m.biased_k(c)), m.shared(x)], -1), heads(m.up_v(c))


def value_bias(m: Latents, x: Tensor) -> Found:
    c = m.latent(x)
    return m.queries(x), torch.cat([heads(m.up_k(c)), m.shared(x)], -1), heads(m.biased_v(c))


def activated_values(m: Latents, x: Tensor) -> Found:
    q, k, v = two_maps(m, x)
    return q, k, torch.tanh(v)


def shared_part_by_head(m: Latents, x: Tensor) -> Found:
    q, k, v = two_maps(m, x)
    return q, torch.cat([k[..., :WIDTH], heads(torch.tanh(m.rotary_by_head(x)))], -1), v


def wide_row(m: Latents, x: Tensor) -> Found:
    k, v = heads(m.wide_up(m.wide_down(x))).split([WIDTH, V_WIDTH], -1)
    return m.queries(x)[..., :WIDTH], k, v


def two_key_maps(m: Latents, x: Tensor) -> Found:
    """Halves of the key from two rows."""
    other = F.rms_norm(m.other_down(x), (RANK,))
    c = m.latent(x)
    k = torch.cat([heads(m.up_k(c))[..., :6], heads(m.up_k(other))[..., :6]], -1)
    return m.queries(x), k, heads(m.up_v(c))


def linear_part_in_the_middle(m: Latents, x: Tensor) -> Found:
    q, k, v = two_maps(m, x)
    return q, torch.cat([k[..., WIDTH : WIDTH + 2], k[..., :WIDTH], k[..., WIDTH + 2 :]], -1), v


NEAR_MISSES: dict[Callable[[Latents, Tensor], Found], str] = {
    different_latents: "keys and values come from different rows",
    latents_alike_but_not_the_same: "keys and values come from different rows",
    activated_keys: "no part of the key is a linear map of a row: something else than a linear map",
    activated_latent: "keys and values come from different rows",
    key_bias: "no part of the key is a linear map of a row: the linear map has a bias",
    value_bias: "values are no linear map of a row: the linear map has a bias",
    activated_values: "values are no linear map of a row: something else than a linear map",
    shared_part_by_head: "the part of the key beside the linear map differs by head",
    wide_row: "a row of 80 values is no smaller than half of 108",
    two_key_maps: "keys come from several linear maps",
    linear_part_in_the_middle: "the linear part of the key lies between two others",
}


@pytest.mark.parametrize("heads_of", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses(heads_of: Callable[[Latents, Tensor], Found]) -> None:
    """Declined with the reason, the graph as it was, and served with keys and values kept."""
    model = Latents(heads_of)
    captured = capture(model)
    before = str(captured.graph)
    outcomes = []
    for region in find_regions(analyse(captured.graph)):
        core = latent_attention.PASS.pattern(region)
        outcomes.append(core if isinstance(core, Declined) else latent_attention.PASS.check(core))
    assert all(isinstance(outcome, Declined) for outcome in outcomes)
    assert any(NEAR_MISSES[heads_of] in outcome.reason for outcome in outcomes), outcomes
    assert str(captured.graph) == before
    rewriting = rewrite(captured, PASSES, fallback="refuse")
    (served,) = rewriting.served
    assert served.operator == "regraft::paged_attention"
    check_served(model, rewriting)
