"""Toy models with one recurrent mixer, and the checks that every pass over one must stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, fx, nn

from regraft.rewriter.capture import capture
from regraft.rewriter.declare import StateSpec
from regraft.rewriter.graph import CapturedGraph, is_aten
from regraft.rewriter.pattern import Declined, Pass, Region
from regraft.rewriter.pipeline import Rewriting, Served, rewrite
from regraft.rewriter.token_axis import analyse, find_regions
from tests.tolerance import assert_close

Piece = tuple[int, int, int]
"""(sequence, start, end)"""

LENGTHS = (9, 1, 6, 40)
WHOLE: list[list[Piece]] = [[(r, 0, n) for r, n in enumerate(LENGTHS)]]
CHUNKED: list[list[Piece]] = [
    [(0, 0, 1), (2, 0, 5)],
    [(0, 1, 4), (3, 0, 33), (2, 5, 6)],
    [(1, 0, 1), (0, 4, 5), (3, 33, 34)],
    [(3, 34, 40), (0, 5, 9)],
]


class MixerLM(nn.Module):
    """Embedding, `mix(x [1, T, C])`, head. A subclass is a mixer; it calls the functions that its
    file imports.
    """

    def __init__(self, channels: int, vocab: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, channels)
        self.head = nn.Linear(channels, vocab)
        self.eval()

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = False
    ) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.mix(self.embed(input_ids))))


@torch.no_grad()
def enliven(model: MixerLM) -> None:
    """Weights under which logits depend on the mixer at least as much as on the token itself."""
    for parameter in model.parameters():
        fan_in = parameter.shape[-1] if parameter.dim() > 1 else 4
        parameter.copy_(torch.randn(parameter.shape) * fan_in**-0.5)
    model.embed.weight.copy_(torch.randn(model.embed.weight.shape))


def graft(model: nn.Module, step: Pass, fallback: str = "refuse") -> Rewriting:
    return rewrite(capture(model), [step], fallback=fallback)


def region_at(captured: CapturedGraph, operation: str, kind: str) -> Region:
    """The region that ends at this operation and reads a padded row, whatever the analysis finds."""
    closer = next(node for node in captured.graph.nodes if is_aten(node, operation))
    padded = closer.args[0]
    assert is_aten(padded, "pad")
    return Region(closer, (padded, closer), (padded.args[0],), kind, "")


def graft_at(model: nn.Module, step: Pass, operation: str) -> Rewriting:
    """The pass, offered the region of `region_at`."""
    captured = capture(model)
    region = region_at(captured, operation, step.kind)
    placeholders = [node for node in captured.graph.nodes if node.op == "placeholder"]
    state = Rewriting(captured, {str(node.target): node for node in placeholders})
    grafting = state.grafting(region)
    step.rewrite(step.check(step.pattern(region)), grafting)
    specs = grafting.state_specs
    state.served.append(Served(region, step.kind, "grafted", step.operator, states=specs))
    captured.graph.eliminate_dead_code()
    return state


@torch.no_grad()
def serve(
    state: Rewriting, sequences: Sequence[Tensor], steps: Sequence[Sequence[Piece]]
) -> list[Tensor]:
    """Logits of each sequence, computed in `steps`; state slots hold NaN (integers: 12345) before a sequence starts."""
    specs = [spec for served in state.served for spec in served.states]
    slots = len(sequences) + 2
    poison = {s.name: torch.nan if s.dtype.is_floating_point else 12345 for s in specs}
    pools = {s.name: torch.full((slots, *s.shape), poison[s.name], dtype=s.dtype) for s in specs}
    names = {node: name for name, node in state.inputs.items()}
    placeholders = [node for node in state.graph.nodes if node.op == "placeholder"]
    results: list[list[Tensor]] = [[] for _ in sequences]
    for pieces in steps:
        sizes = [end - start for _, start, end in pieces]
        tensors = {
            "input_ids": torch.cat([sequences[r][start:end] for r, start, end in pieces])[None],
            "position_ids": torch.cat([torch.arange(s, e) for _, s, e in pieces])[None],
            "cu_seqlens": torch.tensor([0, *sizes]).cumsum(0).int(),
            "context_lens": torch.tensor([start for _, start, _ in pieces]).int(),
            "state_slots": torch.tensor([len(sequences) - r for r, _, _ in pieces]),
            **pools,
        }
        inputs = (tensors[names[node]] for node in placeholders)
        (logits,) = fx.Interpreter(state.captured.module).run(*inputs)
        for (r, _, _), part in zip(pieces, logits[0].split(sizes)):
            results[r].append(part)
    return [torch.cat(parts) for parts in results]


def check_grafted(
    model: MixerLM, step: Pass, states: list[StateSpec], *, at: str | None = None
) -> None:
    """Grafted as often as there are states, declared as said, and the same logits however prefill
    is cut. `at`: see `graft_at`.
    """
    enliven(model)
    rewriting = graft(model, step) if at is None else graft_at(model, step, at)
    assert [served.operator for served in rewriting.served] == [step.operator] * len(states)
    assert [spec for served in rewriting.served for spec in served.states] == states
    vocab = model.embed.num_embeddings
    sequences = [torch.randint(vocab, (length,)) for length in LENGTHS]
    with torch.no_grad():
        expected = [model(ids[None]).logits[0] for ids in sequences]
    decode = [[(3, t, t + 1)] for t in range(LENGTHS[3])]
    for steps in (WHOLE, CHUNKED):
        for logits, reference in zip(serve(rewriting, sequences, steps), expected):
            assert_close(logits, reference)
    assert_close(
        serve(rewriting, sequences[3:], [[(0, s, e)] for ((_, s, e),) in decode])[0], expected[3]
    )
    again = rewrite(rewriting.captured, [step], fallback="refuse")
    assert not again.served, "a second run found something to graft"


def check_declined(model: nn.Module, step: Pass, reason: str) -> None:
    """No match, for this reason, the graph left as it was, and the model served by replay all the
    same.
    """
    captured = capture(model)
    before = str(captured.graph)
    outcomes = [_offer(step, region) for region in find_regions(analyse(captured.graph))]
    assert all(isinstance(outcome, Declined) for outcome in outcomes)
    assert str(captured.graph) == before
    assert any(reason in str(outcome) for outcome in outcomes), [str(o) for o in outcomes]
    replayed = rewrite(captured, [step]).served
    assert [served.served for served in replayed] == ["replayed"] * len(outcomes)
    assert any(reason in served.reason for served in replayed)


def check_declined_at(model: nn.Module, step: Pass, operation: str, reason: str) -> None:
    """No match in the region of `region_at`, for this reason."""
    outcome = _offer(step, region_at(capture(model), operation, step.kind))
    assert isinstance(outcome, Declined)
    assert reason in str(outcome)


def _offer(step: Pass, region: object) -> object:
    captures = step.pattern(region)  # type: ignore[arg-type]
    return captures if isinstance(captures, Declined) else step.check(captures)


def check_mutant_is_caught(
    model: MixerLM,
    step: Pass,
    states: list[StateSpec],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    mutant: Callable[..., object],
    *,
    at: str | None = None,
) -> None:
    """With `where` replaced by `mutant`, the comparison must be red."""
    monkeypatch.setattr(where, mutant)
    with pytest.raises(AssertionError):
        check_grafted(model, step, states, at=at)
