"""Rows that no rule sees come back, and a run does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regraft.rewriter.errors import RewriteError
from regraft.rewriter.pipeline import rewrite
from regraft.rewriter.returned_rows import mark_returned_rows
from regraft.rewriter.token_axis.analysis import RETURNED

from . import toys
from .serving import serves
from .toys import Mix, captured, indices


def roll_without_the_first(m: Any, x: Tensor, p: Tensor) -> Tensor:
    rolled = torch.roll(F.linear(x, m.square), 1, dims=1)
    return x + rolled * (indices(x) > 0)[None, :, None]


def roll_and_join(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return x + torch.cat([m.vector[None], torch.roll(x, 1, dims=1)[:, 1:]], 1)


def total_less_what_follows(m: Any, x: Tensor, p: Tensor) -> Tensor:
    following = x.flip(1).cumsum(1).flip(1)
    return (x.sum(1, keepdim=True) - following) / (indices(x) + 1)[None, :, None]


def roll_left(m: Any, x: Tensor, p: Tensor) -> Tensor:
    """The next token's row, but for the last."""
    return x + torch.roll(x, -1, dims=1) * (indices(x) < x.shape[1] - 1)[None, :, None]


@pytest.mark.parametrize("mix", [roll_without_the_first, roll_and_join, total_less_what_follows])
def test_causal_mixing_of_unknown_order_is_replayed(mix: Mix) -> None:
    graph = captured(mix)
    assert mark_returned_rows(graph) == 1
    state = rewrite(graph, ())
    assert [served.served for served in state.served].count("replayed") >= 1
    serves(state, mix)


def test_what_reads_later_tokens_is_not_marked() -> None:
    graph = captured(roll_left)
    assert mark_returned_rows(graph) == 0
    with pytest.raises(RewriteError, match="roll over tokens"):
        rewrite(graph, ())


@pytest.mark.parametrize("mix", [toys.rows_only, toys.attention, toys.shift_right])
def test_nothing_is_run_where_the_rules_suffice(mix: Mix, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured(mix)
    monkeypatch.setattr(torch.fx.Interpreter, "run", None)
    assert mark_returned_rows(graph) == 0
    assert not any(node.meta.get(RETURNED) for node in graph.graph.nodes)


def test_nothing_is_marked_without_weights() -> None:
    """On the meta device there is nothing to run: refused, as without the measurement."""
    graph = captured(roll_without_the_first)
    graph.weights.update({name: tensor.to("meta") for name, tensor in graph.weights.items()})
    assert mark_returned_rows(graph) == 0
