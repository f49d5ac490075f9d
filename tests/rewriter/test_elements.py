"""Formulas of elements are compared with what the graph computes, for one request and for a packed row."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import sympy
import torch
from torch import Tensor, fx

from regraft.rewriter.elements import Elements
from regraft.rewriter.formulas import (
    Cell,
    Choose,
    Value,
    cases,
    condition,
    in_one_request,
    number,
    pos,
    seg,
)
from regraft.rewriter.graph import TOKENS, CapturedGraph, is_aten
from regraft.rewriter.indexing import broadcast, sizes_of
from regraft.rewriter.integers import Index

from .traced import captured, values

Q, K = Index("q", TOKENS), Index("k", TOKENS)
LOWEST = torch.finfo(torch.float32).min


def indices(positions: Tensor) -> tuple[Tensor, Tensor]:
    index = torch.arange(positions.shape[1])
    return index[:, None], index[None, :]


def segments(positions: Tensor) -> Tensor:
    return (positions.diff(prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def packed(positions: Tensor) -> Tensor:
    """By indexing, as a mask function under vmap does."""
    q, k = indices(positions)
    batch = torch.zeros(1, 1, dtype=torch.long)
    number = segments(positions)
    same = number[batch, q] == number[batch, k]
    return same & (positions[batch, k] <= positions[batch, q])


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "causal by index": lambda p: indices(p)[1] <= indices(p)[0],
    "causal by position": lambda p: p[0][None, :] <= p[0][:, None],
    "tril": lambda p: torch.ones(p.shape[1], p.shape[1]).tril(),
    "triu of a filled mask": lambda p: torch.full((p.shape[1], p.shape[1]), LOWEST).triu(1),
    "packed": packed,
    "window": lambda p: packed(p) & (indices(p)[1] > indices(p)[0] - 3),
    "chunk": lambda p: (p[0] // 4)[:, None] == torch.div(p[0], 4, rounding_mode="floor")[None],
    "chunk by true division": lambda p: (p[0] / 4).floor()[:, None] == (p[0] / 4).floor()[None],
    "remainder": lambda p: (p[0] % 3)[:, None] == 1,
    "additive": lambda p: torch.where(packed(p), 0.0, LOWEST) + 1.5,
    "one minus mask": lambda p: (1.0 - packed(p).float()) * LOWEST,
    "masked twice": lambda p: (
        torch.zeros(p.shape[1], p.shape[1])
        .masked_fill(~packed(p), LOWEST)
        .masked_fill(indices(p)[0] == indices(p)[1], 2.0)
    ),
    "float as a mask": lambda p: torch.where(packed(p), 0.0, LOWEST).bool(),
    "xor, or, not": lambda p: (packed(p) ^ (indices(p)[0] == 1)) | ~(indices(p)[1] < 2),
    "distance": lambda p: (indices(p)[0] - indices(p)[1]).abs().clamp(max=2) ** 2,
    "alibi": lambda p: 0.5 ** torch.arange(1, 4)[:, None, None] * (p - p[0, 0])[:, None],
    "gathered": lambda p: (
        torch.arange(10, 20)[(indices(p)[0] - indices(p)[1]).clamp(0, 9)]
        + torch.arange(7).expand(p.shape[1], 7).gather(1, indices(p)[0].clamp(max=6))
    ),
    "concatenated": lambda p: torch.cat([packed(p).float(), indices(p)[0] * 1.0], 1),
    "padded": lambda p: torch.nn.functional.pad(indices(p)[0] + indices(p)[1], (1, 0), value=-7.0),
    "two maxima": lambda p: torch.max(indices(p)[0], indices(p)[1]) - torch.minimum(*indices(p)),
    "arange with a step": lambda p: torch.arange(3, 3 + 2 * p.shape[1], 2)[:, None] * indices(p)[1],
    "running count": lambda p: (torch.full_like(p, 2).cumsum(-1) - p)[..., None],
    "softcap": lambda p: 5.0 * torch.tanh((indices(p)[0] - indices(p)[1]) / 5.0),
    "size": lambda p: indices(p)[1] - (p.shape[1] - 1),
    "logical on numbers": lambda p: torch.logical_and(indices(p)[0], indices(p)[1] - 2),
}


@pytest.fixture(scope="module")
def graph() -> tuple[CapturedGraph, dict[str, fx.Node]]:
    def everything(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return sum(f(position_ids).double().sum() for f in FORMULAS.values())  # type: ignore[return-value]

    found = captured(everything)
    sums = [n for n in found.graph.nodes if is_aten(n, "sum") and n.args[0].meta["shape"]]
    return found, dict(zip(FORMULAS, (node.args[0] for node in sums), strict=True))


def evaluate(value: Value, positions: list[int], known: dict[sympy.Basic, int]) -> float:
    """A formula without cells as a number, for given position ids."""
    jumps = list(
        itertools.accumulate(
            b - a != 1 for a, b in itertools.pairwise([positions[0] - 1, *positions])
        )
    )
    value = number(value).xreplace({symbol: sympy.Integer(v) for symbol, v in known.items()})
    while found := value.atoms(pos, seg):
        tables = {f: positions if isinstance(f, pos) else jumps for f in found}
        value = value.xreplace({f: sympy.Integer(t[int(f.args[0])]) for f, t in tables.items()})
    assert not value.atoms(Cell), value
    return float(value)


@pytest.mark.parametrize("positions", [[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 0, 1, 0, 1, 2, 3]])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_is_what_the_graph_computes(
    name: str, positions: list[int], graph: tuple[CapturedGraph, dict[str, fx.Node]]
) -> None:
    found, nodes = graph
    node, length = nodes[name], len(positions)
    ids = torch.zeros(1, length, dtype=torch.long)
    result = values(found, ids, torch.tensor([positions]))[node]
    place = tuple(Index(f"i{dim}", size) for dim, size in enumerate(sizes_of(node)))
    formula = Elements(found.graph).at(node, place)
    for at in itertools.product(*(range(0, size, 2) for size in result.shape)):
        known = dict(zip((*place, TOKENS), (*at, length)))
        assert evaluate(formula, positions, known) == pytest.approx(float(result[at])), (
            at,
            formula,
        )
    alone = in_one_request(formula)
    assert not alone.atoms(pos, seg)


def test_the_packed_mask_reads_as_it_would_be_written(
    graph: tuple[CapturedGraph, dict[str, fx.Node]],
) -> None:
    found, nodes = graph
    read = Elements(found.graph)
    mask = read.at(nodes["packed"].args[0], (Q, K))
    assert mask == sympy.And(sympy.Eq(seg(Q), seg(K)), sympy.Le(pos(K), pos(Q)))
    assert in_one_request(mask) == sympy.Le(K, Q)


def test_what_is_not_known_stays_a_cell() -> None:
    def unknown(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = torch.outer(input_ids[0] * 1.0, position_ids[0] + 0.5)
        top = x.topk(2)[1]
        chosen = torch.zeros_like(x, dtype=torch.bool).scatter(-1, top, True)
        return x.softmax(-1).sum() + x.masked_fill(chosen, 0.0).sum() + x.cumsum(-1).sum()

    graph = captured(unknown).graph
    read = Elements(graph)
    nodes = {
        node.target._opname: node
        for node in graph.nodes
        if is_aten(node, "softmax", "scatter", "cumsum")
    }
    assert read.at(nodes["softmax"], (Q, K)) == Cell(sympy.Symbol(nodes["softmax"].name), Q, K)
    chosen = read.at(nodes["scatter"], (Q, K))
    assert isinstance(chosen, sympy.Ne)
    assert str(chosen) == f"Ne({nodes['scatter'].name}[q, k], 0)"
    assert isinstance(read.at(nodes["cumsum"], (Q, K)), Cell)
    filled = next(node for node in graph.nodes if is_aten(node, "masked_fill"))
    assert read.at(filled, (Q, K)).args[0] == chosen


def test_an_index_that_may_count_from_the_end_is_not_followed() -> None:
    def wrapping(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        index = torch.arange(position_ids.shape[1])
        return (index * 2)[index - 1].sum() + (index * 3)[input_ids[0]].sum()

    graph = captured(wrapping).graph
    for node in graph.nodes:
        if is_aten(node, "index"):
            assert isinstance(Elements(graph).at(node, (Q,)), Cell)


def test_stored_constants_are_read_and_weights_are_not() -> None:
    size = 16
    rows, columns = torch.arange(size)[:, None], torch.arange(size)[None]
    band = (columns <= rows) & (rows - columns < 3)
    scattered = band.clone()
    scattered[5, 1] = True

    def stored(
        input_ids: Tensor, position_ids: Tensor, band: Tensor, odd: Tensor, lowest: Tensor
    ) -> Tensor:
        n = position_ids.shape[1]
        kept = torch.where(band[None, None, :n, :n], 1.0, lowest)
        return kept.sum() + odd[:n, :n].sum()

    graph = captured(stored, band=band, odd=scattered, lowest=torch.tensor(-5.0)).graph
    read = Elements(graph)
    kept = next(node for node in graph.nodes if is_aten(node, "where"))
    zero = sympy.Integer(0)
    value = read.at(kept, (zero, zero, Q, K))
    assert value == Choose(sympy.And(Q - K >= 0, Q - K <= 2), 1, -5) or {
        tuple(sorted(map(str, (leaf,)))) for _, leaf in cases(value)
    } == {("1",), ("-5",)}
    odd = next(node for node in graph.nodes if node.op == "get_attr" and "odd" in node.target)
    assert read.at(odd, (Q, K)).atoms(Cell)


def test_cases_split_on_each_condition_once() -> None:
    causal, near = sympy.Le(K, Q), sympy.Lt(Q - K, 3)
    value = Choose(causal, 1, 2) + Choose(near, Choose(causal, 10, 20), 30)
    found = {leaf: when for when, leaf in cases(value)}
    assert set(found) == {11, 31, 22, 32}
    assert found[11] == sympy.And(causal, near)


def test_numbers_and_conditions() -> None:
    causal = sympy.Le(K, Q)
    assert number(causal) == Choose(causal, 1, 0)
    assert condition(number(causal)) == causal
    assert condition(Choose(causal, 0, -3)) == sympy.Not(causal)
    assert number(K) == K
    assert condition(K) == sympy.Ne(K, 0)
    assert broadcast((Q, K), (TOKENS,)) == (K,)
