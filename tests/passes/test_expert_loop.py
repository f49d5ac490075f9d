from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from regraft.passes import expert_loop
from regraft.passes.expert_loop import PASS
from regraft.passes.expert_program import Program
from tests.passes.recurrent import CHUNKED, LENGTHS, WHOLE, MixerLM, check_declined, graft, serve
from tests.tolerance import assert_close

CHANNELS, INNER, CHOICES = 8, 6, 2
PRODUCTS, IDENTITIES = 5, 3
EXPERTS = PRODUCTS + IDENTITIES


class Experts(nn.Module):
    """Each expert is asked for its tokens; those from number PRODUCTS on give them back."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, CHANNELS) / CHANNELS**0.5)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER))
        self.down = nn.Parameter(torch.randn(PRODUCTS, CHANNELS, INNER) / INNER**0.5)

    def expert(self, e: int, rows: Tensor) -> Tensor:
        if e >= PRODUCTS:
            return rows
        gate, up = functional.linear(rows, self.up[e], self.bias[e]).chunk(2, dim=-1)
        return functional.linear(self.activation(e, gate) * up, self.down[e])

    def activation(self, e: int, gate: Tensor) -> Tensor:
        return functional.silu(gate)

    def weigh(self, rows: Tensor, weights: Tensor) -> Tensor:
        return rows * weights

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        chosen = functional.one_hot(ids, EXPERTS).permute(2, 1, 0)
        for number in chosen.sum((-1, -2)).nonzero():
            e = int(number.item())
            choice, token = torch.where(chosen[e])
            rows = self.weigh(self.expert(e, x[token]), weights[token, choice, None])
            total.index_add_(0, token, rows.to(total.dtype))
        return total


class Transposed(Experts):
    """Rows times matrices [in, out], and no matrix for an identity."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(PRODUCTS, CHANNELS, INNER))

    def expert(self, e: int, rows: Tensor) -> Tensor:
        if e >= PRODUCTS:
            return rows
        return functional.linear(torch.matmul(rows, self.up[e]).relu(), self.down[e])


class ExpertsLM(MixerLM):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__(CHANNELS)
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, CHANNELS)
        self.router, self.experts = nn.Linear(CHANNELS, EXPERTS), experts

    def choose(self, scores: Tensor) -> Tensor:
        return scores.topk(CHOICES, dim=-1).indices

    def mix(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores = self.router(rows).softmax(-1)
        ids = self.choose(scores)
        return x + self.experts(rows, ids, scores.gather(1, ids)).view(x.shape)


class Sorted(ExpertsLM):
    def choose(self, scores: Tensor) -> Tensor:
        return scores.argsort(dim=-1, descending=True)[:, :CHOICES]


@pytest.mark.parametrize("kind", [Experts, Transposed])
def test_grafts_the_loop(kind: type[Experts]) -> None:
    check_served(ExpertsLM(kind()))


@torch.no_grad()
def check_served(model: ExpertsLM) -> None:
    state = graft(model, PASS)
    assert [served.operator for served in state.served] == ["regraft::expert_linear"]
    notes = state.served[0].notes
    assert notes == ["experts 0 to 4: 2 products each", "experts 5 to 7: no product"]
    texts = [torch.randint(16, (length,)) for length in LENGTHS]
    for steps in (WHOLE, CHUNKED):
        for logits, ids in zip(serve(state, texts, steps), texts):
            assert_close(logits, model(ids[None]).logits[0], scale=4)  # 40 terms a sum


def test_without_weights() -> None:
    with torch.device("meta"):
        model = ExpertsLM(Experts())
    notes = graft(model, PASS).served[0].notes
    assert notes[-1] == "without weights, not compared with the module"


class OneDiffers(Experts):
    """Only an expert that is not looked at does something else."""

    def activation(self, e: int, gate: Tensor) -> Tensor:
        return gate.relu() if e == 1 else functional.silu(gate)


class LastDiffers(Experts):
    def activation(self, e: int, gate: Tensor) -> Tensor:
        return gate.relu() if e == PRODUCTS - 1 else functional.silu(gate)


class Balanced(Experts):
    """A row is changed by the others of its expert."""

    def weigh(self, rows: Tensor, weights: Tensor) -> Tensor:
        return (rows - rows.mean(0)) * weights


class Crowded(Experts):
    def weigh(self, rows: Tensor, weights: Tensor) -> Tensor:
        return rows * weights / rows.shape[0]


class InPlace(Experts):
    def weigh(self, rows: Tensor, weights: Tensor) -> Tensor:
        return rows.clone().mul_(weights)


class ForNeighbours(Experts):
    """What one token chose is added to the next."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, ids, weights).roll(1, 0)


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (OneDiffers, "the module is no sum over chosen experts"),
        (LastDiffers, "experts 0 to 4 do not all do the same"),
        (Balanced, "the module is no sum over chosen experts"),
        (Crowded, "computes with the number of tokens"),
        (InPlace, "writes with mul_"),
        (ForNeighbours, "does not return the sum of what its experts give"),
    ],
)
def test_declines(experts: type[Experts], reason: str) -> None:
    check_declined(ExpertsLM(experts()), PASS, reason)


def test_declines_experts_that_no_topk_chose() -> None:
    check_declined(Sorted(Experts()), PASS, "the experts are not chosen by a top-k")


def test_mutant_weights_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison refuses it, and without the comparison the logits tell."""
    run = Program.run

    def unweighed(self, module, rows, experts, weights):
        return run(self, module, rows, experts, torch.ones_like(weights))

    monkeypatch.setattr(Program, "run", unweighed)
    check_declined(ExpertsLM(Experts()), PASS, "the module is no sum over chosen experts")
    monkeypatch.setattr(expert_loop, "difference", lambda plan: 0.0)
    with pytest.raises(AssertionError):
        check_served(ExpertsLM(Experts()))
