"""Tokens that are drawn: all ways to draw them agree, and on a GPU requests share a draw that nobody waits for."""

from __future__ import annotations

import pytest
import torch

from regraft.kernels.sampling import draw
from regraft.runtime import sampler
from tests.kernels.sampling_draw import waiting_is_an_error
from tests.runtime.test_sampler import VOCAB, make_request
from tests.tolerance import assert_close

COMMON = [
    {},
    {"top_k": 0},
    {"top_k": 0, "temperature": 0.6},
    {"top_k": 0, "temperature": 9.0, "top_p": 0.95},
    {"top_k": 0, "top_p": 0.3},
    {"top_k": 0, "top_p": 0.0},
    {"top_k": 3, "temperature": 1e-20},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 10**30, "top_p": 0.999, "min_p": 0.01},
    {"top_k": 1100, "min_p": 0.2},
]


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The sampler goes the ways it goes on a GPU. What it gave `draw`, in rows."""
    drawn = []

    def counted(scores, **settings):
        drawn.append(len(scores))
        return draw(scores, **settings)

    monkeypatch.setattr(sampler, "_has_operators", lambda logits: True)
    monkeypatch.setattr(sampler, "draw", counted)
    return drawn


@pytest.mark.parametrize("fields", COMMON, ids=str)
@pytest.mark.parametrize("vocab", [50, 3000])
def test_every_way_draws_the_same_tokens(fields, vocab):
    """Without the vocabulary sorted, with it, and the operator: of rows full of equal scores as well."""
    warp = make_request([1], vocab=vocab, do_sample=True, **fields).params.warp
    rows = torch.cat(
        [
            4 * torch.randn(20, vocab).bfloat16().float(),
            torch.randint(0, 3, (20, vocab)).float(),
            torch.randint(0, 12, (20, vocab)).float(),
        ]
    )
    uniforms = torch.rand(len(rows), dtype=torch.float64)
    tokens, logprobs = sampler._draw(rows, warp, uniforms)
    settings = sampler._settings([warp] * len(rows), vocab)
    given = {name: torch.from_numpy(array) for name, array in settings.items()}
    expected, expected_logprobs = draw(rows, **given, uniforms=uniforms)
    assert tokens.tolist() == expected.tolist()
    assert_close(logprobs, expected_logprobs, scale=10)  # there the sum of probabilities is float32
    tokens, logprobs = sampler._invert(sampler._shape(rows, warp), uniforms)
    assert tokens.tolist() == expected.tolist()
    assert_close(logprobs, expected_logprobs, scale=10)


@pytest.mark.parametrize("top_k", [0, 4])
def test_of_equal_scores_top_p_keeps_the_last(top_k):
    warp = make_request([1], do_sample=True, top_k=top_k, top_p=0.5).params.warp
    rows = torch.tensor([5.0, 1.0, 5.0, 5.0, 1.0, 5.0]).repeat(2, 1)
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    # A little is left below 5, so that half of it all is less than two of four.
    tokens, logprobs = sampler._draw(rows, warp, ends)
    assert tokens.tolist() == ([2, 5] if top_k == 0 else [3, 5])
    assert_close(logprobs.exp(), torch.full((2,), 1 / 3 if top_k == 0 else 1 / 2))


def mixed_requests():
    """Of every kind, and how many of them `draw` draws."""
    warps = [{"do_sample": True, **fields} for fields in COMMON]
    kinds = [
        *warps,
        {},
        {"logprobs": False},
        {"do_sample": True, "typical_p": 0.7},
        {"do_sample": True, "repetition_penalty": 1.4, "top_p": 0.9},
        {"do_sample": True, "eta_cutoff": 0.01},
        {"repetition_penalty": 1.2},
        {"do_sample": True, "top_logprobs": 3},
    ]
    requests = [make_request([1, 2], arrival=i, **fields) for i, fields in enumerate(kinds)]
    return requests, len(warps) + 2


def test_what_shares_a_draw(on_a_gpu):
    """All that are shaped by common warpers alone, in one launch; and each is chosen as it is on the CPU."""
    requests, num_drawn = mixed_requests()
    logits = 2 * torch.randn(5, len(requests), VOCAB)
    made = [sampler.sample(step.bfloat16(), requests) for step in logits]
    assert on_a_gpu == [num_drawn] * 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_has_operators", lambda logits: False)
        again, _ = mixed_requests()
        expected = [sampler.sample(step.bfloat16(), again) for step in logits]
    assert on_a_gpu == [num_drawn] * 5
    for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(made, expected):
        assert tokens == expected_tokens
        wanted = [i for i, request in enumerate(requests) if request.params.logprobs]
        assert_close(torch.tensor(logprobs)[wanted], torch.tensor(expected_logprobs)[wanted])
    assert requests[-1].top_logprobs == again[-1].top_logprobs


def test_steady_rows_are_chosen_together(on_a_gpu, monkeypatch):
    """One by one are those with processors, other warpers or top_logprobs; the tokens are `choose`'s."""
    requests, num_drawn = mixed_requests()
    logits = torch.randn(len(requests), VOCAB)
    seen, choose = [], sampler.choose

    def counted(logits, requests, **options):
        seen.append(len(logits))
        return choose(logits, requests, **options)

    monkeypatch.setattr(sampler, "choose", counted)
    tokens, logprobs = sampler.choose_each(logits, requests)
    assert seen == [len(COMMON) + 2, 1, 1, 1, 1, 1]
    assert sorted(on_a_gpu) == [1, 1, num_drawn - 2]
    expected, expected_logprobs = choose(logits, mixed_requests()[0])
    assert tokens.tolist() == expected.tolist()
    assert_close(logprobs, expected_logprobs)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_what_is_not_cut_has_the_log_probability_that_training_computes(on_a_gpu, temperature):
    """Greedy, and drawn from everything; another warper, or a cut, is not what log_softmax knows of."""
    fields = [{}, *({"do_sample": True, "temperature": temperature, "top_k": k} for k in (0, 5))]
    requests = [make_request([1], arrival=i, **each) for i, each in enumerate(fields)]
    logits = 3 * torch.randn(3, VOCAB)
    tokens, logprobs = sampler.choose_each(logits, requests)
    scale = torch.tensor([1.0, temperature, temperature])[:, None]
    expected = (logits / scale).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert (logprobs == expected).tolist() == [True, True, False]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_ends_alone_in_a_draw(on_a_gpu, bad):
    logits = torch.randn(4, VOCAB)
    logits[2, 7] = bad
    requests = [make_request([1], do_sample=True, arrival=i, top_p=0.9) for i in range(4)]
    logprobs = torch.tensor(sampler.sample(logits, requests)[1])
    assert logprobs.isnan().tolist() == [False, False, True, False]


@pytest.mark.gpu
def test_the_host_waits_for_nothing_on_a_gpu():
    device = torch.device("cuda")
    fields = [{}, {"logprobs": False}, *({"do_sample": True, **common} for common in COMMON)]
    requests = [make_request([1], arrival=i, **each) for i, each in enumerate(fields)]
    logits = torch.randn(len(requests), VOCAB, device=device).bfloat16()
    for choose in (sampler.choose, sampler.choose_each):
        choose(logits, requests)  # compiled, and pinned memory is at hand
        with waiting_is_an_error():
            tokens, _ = choose(logits, requests)
        assert ((tokens >= 0) & (tokens < VOCAB)).all()


@pytest.mark.gpu
def test_a_seed_means_the_same_on_a_gpu():
    fields = [{"do_sample": True, "seed": i, **common} for i, common in enumerate(COMMON)]
    here, there = ([make_request([1], **each) for each in fields] for _ in range(2))
    for _ in range(20):
        logits = 2 * torch.randn(len(fields), VOCAB).bfloat16()
        tokens, logprobs = sampler.sample(logits.cuda(), there)
        expected, expected_logprobs = sampler.sample(logits, here)
        assert tokens == expected
        assert_close(torch.tensor(logprobs), torch.tensor(expected_logprobs))
