"""Each rule of the normal form removes what changes nothing, keeps what does, and leaves the values alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regraft.rewriter.capture import capture
from regraft.rewriter.graph import TOKENS, CapturedGraph
from regraft.rewriter.normal_form import normalize
from tests.tolerance import assert_close

WIDTH = 4


class Function(nn.Module):
    """logits = function(rows [1, T, 4] float32)."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.table = nn.Parameter(torch.randn(9, WIDTH))
        self.eval()

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.function(F.embedding(input_ids, self.table)))


def names(captured: CapturedGraph) -> list[str]:
    calls = [node.target for node in captured.graph.nodes if node.op == "call_function"]
    return [getattr(call, "_opname", getattr(call, "__name__", "")) for call in calls]


def operations(function: Callable[[Tensor], Tensor]) -> list[str]:
    """Names of the graph's operations but for the embedding, after the graph was found to compute `function`."""
    model = Function(function)
    captured = capture(model)
    for length in (2, 7, 40):
        ids = torch.arange(length)[None] % 9
        with torch.no_grad():
            expected = model(ids, ids).logits
            assert_close(captured.module(ids, ids)[0], expected)
    found = names(captured)
    found.remove("embedding")
    return [name for name in found if name != "sym_size"]


GONE = {
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous().detach(),
    "cast to itself": lambda x: x.to(torch.float32).float().type_as(x),
    "slice of all": lambda x: x[:, :, :][..., 0:WIDTH],
    "slice to T": lambda x: x[:, : x.shape[1]],
    "expand to itself": lambda x: x.expand(1, -1, WIDTH),
    "view to itself": lambda x: x.view(1, x.shape[1], WIDTH),
    "repeat once": lambda x: x.repeat(1, 1, 1),
    "permute none": lambda x: x.permute(0, 1, 2),
    "transpose with itself": lambda x: x.transpose(-1, 2),
    "dropout of zero": lambda x: F.dropout(x, 0.0, training=True),
    "dropout outside training": lambda x: F.dropout(x, 0.5, training=False),
    "times one": lambda x: x * 1.0,
    "by one": lambda x: x / 1,
    "cat of one": lambda x: torch.cat([x], dim=1),
    "pad by nothing": lambda x: F.pad(x, (0, 0, 0, 0)),
    "split into one": lambda x: x.split(WIDTH, dim=-1)[0],
    "dead code": lambda x: (x.exp() + x.cumsum(1), x)[1],
}

KEPT = {
    "strided slice": (lambda x: x[:, :, ::2].repeat(1, 1, 2), ["slice", "repeat"]),
    "shorter slice": (lambda x: F.pad(x[:, 1:], (0, 0, 1, 0)), ["slice", "pad"]),
    "other cast": (lambda x: x.to(torch.float64).to(torch.float32), ["_to_copy", "_to_copy"]),
    "real permutation": (lambda x: x.permute(0, 2, 1).transpose(1, 2), ["permute", "transpose"]),
    "real repeat": (lambda x: x.repeat(1, 1, 2), ["repeat"]),
    "real pad": (lambda x: F.pad(x, (0, 1)), ["pad"]),
    "times two": (lambda x: x * 2, ["mul"]),
    "float plus zero": (lambda x: x + 0.0, ["add"]),
    "cat of two": (lambda x: torch.cat([x, x], dim=-1), ["cat"]),
    "split into two": (lambda x: x.split(2, dim=-1)[0], ["split", "getitem"]),
}


@pytest.mark.parametrize("case", GONE)
def test_what_changes_nothing_is_gone(case: str) -> None:
    assert operations(GONE[case]) == []


@pytest.mark.parametrize("case", KEPT)
def test_what_changes_something_stays(case: str) -> None:
    function, expected = KEPT[case]
    assert operations(function) == expected


def test_every_reshaping_has_one_spelling() -> None:
    assert (
        operations(lambda x: x.view(-1, 2).reshape(1, -1, WIDTH).unflatten(-1, (2, 2)).flatten(-2))
        == ["reshape"] * 4
    )
    assert operations(lambda x: x.transpose(1, 2).reshape(WIDTH, -1).t()[None]) == [
        "transpose",
        "reshape",
        "transpose",
        "unsqueeze",
    ]


def test_a_reshaping_does_not_depend_on_strides() -> None:
    """`view` is right for the strides it was traced with; rows gathered anew have others."""
    captured = capture(Function(lambda x: x.view(1, -1, 2, 2).flatten(2)))
    other = torch.randn(9, 2 * WIDTH)[:, ::2]
    captured.module.w_table = nn.Parameter(other)
    ids = torch.arange(5)[None]
    assert_close(captured.module(ids, ids)[0], F.embedding(ids, other).detach())


def test_sizes_are_one_node_each() -> None:
    def function(x: Tensor) -> Tensor:
        doubled = x.repeat(1, 2, 1).view(1, 2 * x.shape[1], WIDTH)
        index = torch.arange(x.shape[1] + 0, device=x.device)
        again = torch.arange(2 * x.size(1), device=x.device)
        return doubled[:, : index.shape[0]] + again[: x.shape[1], None] * index[:, None]

    model = Function(function)
    captured = capture(model)
    sizes = [
        n.meta["size"] for n in captured.graph.nodes if "size" in n.meta and n.op == "call_function"
    ]
    assert sorted(map(str, sizes)) == ["2*T", "T"]
    ids = torch.arange(7)[None]
    with torch.no_grad():
        assert_close(captured.module(ids, ids)[0], model(ids, ids).logits)
    assert all(node.meta["shape"] is None for node in captured.graph.nodes if "size" in node.meta)


def test_a_size_that_does_not_depend_on_the_length_is_a_number() -> None:
    """512 - max(0, 512 - T) is T up to 512 tokens, and nothing else may stay of it."""
    table = torch.randn(512)

    def function(x: Tensor) -> Tensor:
        return x + table[max(0, 512 - x.shape[1]) :][None, :, None]

    captured = capture(Function(function))
    assert (captured.min_tokens, captured.max_tokens) == (2, 512)
    (piece,) = (node for node in captured.graph.nodes if "slice" in str(node.target))
    assert piece.meta["shape"] == (TOKENS,)


def test_assertions_are_gone() -> None:
    def function(x: Tensor) -> Tensor:
        torch._assert_async((x.sum() == x.sum()).all())
        return x.to(torch.float32) * 2

    assert operations(function) == ["mul"]


def test_fills_take_no_operand() -> None:
    captured = capture(Function(lambda x: x + x.new_ones(1, x.shape[1], 1) + torch.zeros_like(x)))
    fills = [node for node in captured.graph.nodes if "full" in str(node.target)]
    assert len(fills) == 2
    assert all(
        not isinstance(a, torch.fx.Node) or "size" in a.meta
        for n in fills
        for a in n.all_input_nodes
    )


def test_normal_form_is_reached_at_once() -> None:
    captured = capture(
        Function(lambda x: F.pad(x.clone().view(1, -1, WIDTH)[:, 1:], (0, 0, 1, 0)) * 1)
    )
    before = [node.format_node() for node in captured.graph.nodes]
    normalize(captured.module)
    assert [node.format_node().split(" : ")[-1] for node in captured.graph.nodes] == [
        line.split(" : ")[-1] for line in before
    ]
