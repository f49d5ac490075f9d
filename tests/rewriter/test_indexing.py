"""An element traced back is compared with the tensor that the graph really computes, element by element."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from regraft.rewriter.graph import TOKENS, CapturedGraph, is_aten
from regraft.rewriter.indexing import (
    branches,
    broadcast,
    dimension_groups,
    reindex,
    sizes_of,
    step_back,
    trace,
)
from regraft.rewriter.integers import Index, Quotient

from .traced import captured, values

LENGTH = 5


def rows(x: Tensor) -> Tensor:
    """[1, T, 24] numbers that all differ, computed and not moved."""
    return x[..., None] * 24 + torch.arange(24)


def heads(x: Tensor) -> Tensor:
    """[1, 4, T, 6]"""
    return rows(x).view(1, x.shape[1], 4, 6).transpose(1, 2)


def kv_heads(x: Tensor) -> Tensor:
    """[1, 2, T, 12]"""
    return rows(x).view(1, x.shape[1], 2, 12).transpose(1, 2)


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": heads,
    "permute": lambda x: heads(x).permute(2, 0, 3, 1),
    "merged with the batch": lambda x: heads(x).reshape(4, -1, 6).transpose(-1, -2),
    "expanded and flattened": lambda x: (
        kv_heads(x)[:, :, None].expand(1, 2, 3, x.shape[1], 12).reshape(1, 6, -1, 12)
    ),
    "repeat_interleave": lambda x: kv_heads(x).repeat_interleave(3, dim=1),
    "repeat": lambda x: kv_heads(x).repeat(1, 3, 1, 1),
    "one head, many": lambda x: rows(x)[:, None].expand(1, 4, -1, 24),
    "fused, interleaved": lambda x: rows(x).view(1, -1, 4, 3, 2)[..., 1, :].transpose(1, 2),
    "fused, grouped": lambda x: rows(x).view(1, -1, 2, 4, 3)[:, :, :, :-2].flatten(2, 3),
    "split": lambda x: rows(x).split([8, 4, 12], dim=-1)[2],
    "chunk": lambda x: rows(x).chunk(3, dim=-1)[1].unsqueeze(-1),
    "even split": lambda x: heads(x).split(2, dim=-1)[2],
    "unbind": lambda x: heads(x).unbind(1)[3],
    "narrow, negative slice, step": lambda x: rows(x).narrow(-1, 4, 16)[..., -12:][..., ::3],
    "flip": lambda x: heads(x).flip(-1),
    "squeeze and select": lambda x: rows(x).squeeze(0)[:, None, -3],
    "wider dtype": lambda x: (heads(x) * 1.5).double(),
    "part of a concatenation": lambda x: torch.cat([heads(x) * 2, heads(x)], -1)[..., 6:],
    "tokens in the middle": lambda x: rows(x).reshape(1, -1, 2, 2, 6).permute(0, 2, 1, 4, 3),
}


@pytest.fixture(scope="module")
def moves() -> tuple[CapturedGraph, dict[str, fx.Node]]:
    def everything(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return sum(move(input_ids).sum() for move in MOVES.values())  # type: ignore[return-value]

    graph = captured(everything)
    sums = [n for n in graph.graph.nodes if is_aten(n, "sum") and n.args[0].meta["shape"]]
    return graph, dict(zip(MOVES, (node.args[0] for node in sums), strict=True))


def coordinates(node: fx.Node) -> tuple[Index, ...]:
    return tuple(Index(f"i{dim}", size) for dim, size in enumerate(sizes_of(node)))


@pytest.mark.parametrize("name", MOVES)
def test_an_element_is_found_where_it_came_from(
    name: str, moves: tuple[CapturedGraph, dict[str, fx.Node]]
) -> None:
    graph, nodes = moves
    ids = torch.tensor([[3, 1, 4, 0, 2]])
    results = values(graph, ids, torch.arange(LENGTH)[None])
    node, indices = nodes[name], coordinates(nodes[name])
    source, place = trace(node, indices)[-1]
    assert is_aten(source, "add", "mul"), f"stopped at {source.format_node()}"
    assert source is not node
    moved, origin = results[node], results[source]
    for at in itertools.product(*(range(size) for size in moved.shape)):
        known = dict(zip((*indices, TOKENS), map(sympy.Integer, (*at, LENGTH))))
        assert origin[tuple(int(c.xreplace(known)) for c in place)] == moved[at], (at, place)


def test_repeated_heads_show_as_floor(moves: tuple[CapturedGraph, dict[str, fx.Node]]) -> None:
    _, nodes = moves
    h, t, d = Index("h", 6), Index("t", TOKENS), Index("d", 12)
    for name in ("expanded and flattened", "repeat_interleave"):
        _, place = trace(nodes[name], (sympy.Integer(0), h, t, d))[-1]
        assert place == (0, t, d + 12 * Quotient(h, 3)), name


def test_what_computes_is_not_undone() -> None:
    def narrowing(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = rows(input_ids).double()
        return x.float() + x.abs() + x.cumsum(1) + x.sort(-1)[0] + x.roll(1, 1)

    graph = captured(narrowing)
    for node in graph.graph.nodes:
        if is_aten(node, "abs", "cumsum", "sort", "roll") or node.meta["dtype"] == torch.float32:
            place = tuple(Index(f"i{dim}", 1) for dim in range(3))
            assert step_back(node, place) is None, node.format_node()


def test_parts_of_a_concatenation_and_of_an_overwritten_tensor() -> None:
    def parts(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = rows(input_ids)
        joined = torch.cat([x, x * 2], dim=1)
        written = torch.slice_scatter(x, x[..., :4] * 3, 2, 8, 12)
        row = torch.select_scatter(x, x[..., 0] * 5, 2, 7)
        return joined.sum() + written.sum() + row.sum() + torch.stack([x, x + 1], 1).sum()

    graph = captured(parts)
    results = values(graph, torch.arange(LENGTH)[None], torch.arange(LENGTH)[None])
    seen = set()
    for node in graph.graph.nodes:
        indices = coordinates(node) if node.meta["shape"] else ()
        found = branches(node, indices) if indices else []
        if not found:
            continue
        seen.add(node.target._opname)
        for at in itertools.product(*(range(size) for size in results[node].shape)):
            known = dict(zip((*indices, TOKENS), map(sympy.Integer, (*at, LENGTH))))
            taken = [(n, p) for when, n, p in found if when.xreplace(known) == sympy.true]
            ((source, place),) = taken
            got = results[source][tuple(int(c.xreplace(known)) for c in place)]
            assert got == results[node][at]
    assert seen == {"cat", "slice_scatter", "select_scatter", "stack"}


@given(st.permutations([TOKENS, 2, 3, 4, 1, 6]), st.data())
def test_a_reshape_keeps_the_row_major_offset(sizes: list[sympy.Expr], data: st.DataObject) -> None:
    """Any grouping of neighbours on either side: the flat offset is the same."""

    def merged(cuts: set[int]) -> tuple[sympy.Expr, ...]:
        found: list[sympy.Expr] = []
        for i, size in enumerate(sizes):
            if i and i in cuts:
                found[-1] = found[-1] * size
            else:
                found.append(sympy.sympify(size))
        return tuple(found)

    cuts = st.sets(st.integers(1, len(sizes) - 1))
    before, after = merged(data.draw(cuts)), merged(data.draw(cuts))
    indices = tuple(Index(f"i{dim}", size) for dim, size in enumerate(before))
    place = reindex(indices, before, after)
    assert place is not None
    known = {TOKENS: sympy.Integer(LENGTH)}
    x = torch.arange(144 * LENGTH).view([int(s.xreplace(known)) for s in before])
    y = x.view([int(s.xreplace(known)) for s in after])
    for _ in range(20):
        at = [data.draw(st.integers(0, size - 1)) for size in x.shape]
        here = known | dict(zip(indices, map(sympy.Integer, at)))
        assert y[tuple(int(c.xreplace(here)) for c in place)] == x[tuple(at)]


def test_dimensions_that_a_reshape_keeps_apart() -> None:
    four, sixteen = sympy.Integer(4), sympy.Integer(16)
    assert dimension_groups((sympy.Integer(1), four, TOKENS, sixteen), (TOKENS * 64,)) == [
        ([1, 2, 3], [0])
    ]
    assert dimension_groups((TOKENS, four * 16), (TOKENS, four, sixteen)) == [
        ([0], [0]),
        ([1], [1, 2]),
    ]
    assert dimension_groups((TOKENS, four), (TOKENS, sixteen)) is None


def test_dimensions_of_a_size_that_only_a_run_tells() -> None:
    found = sympy.Symbol("u0", integer=True, nonnegative=True)
    some = sympy.Min(4, found)
    assert dimension_groups((TOKENS, 4 * some), (TOKENS, some, sympy.Integer(4))) == [
        ([0], [0]),
        ([1], [1, 2]),
    ]


def test_broadcasting_reads_the_only_element() -> None:
    q, k = Index("q", TOKENS), Index("k", TOKENS)
    assert broadcast((q, k), (TOKENS, sympy.Integer(1))) == (q, 0)
    assert broadcast((sympy.Integer(0), q, k), (TOKENS,)) == (k,)
