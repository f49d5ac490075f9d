"""The operators without caches: the same as their stateful twins on fresh sequences, and differentiable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

import regraft.kernels.causal_conv
import regraft.kernels.compressed_attention
import regraft.kernels.decayed_linear
import regraft.kernels.delta_rule
import regraft.kernels.indexed_attention
import regraft.kernels.kda
import regraft.kernels.paged_attention
import regraft.kernels.selective_scan
import regraft.kernels.ssd  # noqa: F401 (all of these register their operators)
from regraft.kernels.experts import expert_linear
from regraft.kernels.experts.naive import expert_linear_naive
from regraft.kernels.varlen import STATELESS, stop_gradient
from regraft.kernels.varlen.differentiable import define
from tests.tolerance import assert_close

N, R = 41, 5
BOUNDS = torch.tensor([0, 17, 18, 20, 38, N], dtype=torch.int32)
CACHES = {
    "k_cache": "k",
    "v_cache": "v",
    "cache": "rows",
    "value_cache": "values",
    "gate_cache": "gates",
    "row_cache": "rows",
    "entry_cache": "entries",
}
"""Caches, and what is kept in them."""


@dataclass(frozen=True)
class Case:
    """One operator: its rows and weights and settings by name, and the shape of its state (None: pages)."""

    name: str
    given: dict[str, Any]
    state: tuple[str, tuple[int, ...]] | None = None


def attention(**extra: Any) -> Case:
    rows = {"q": torch.randn(N, 4, 6), "k": torch.randn(N, 2, 6), "v": torch.randn(N, 2, 5)}
    plain = {"scale": 0.4, "window": 0, "chunk": 0, "softcap": 0.0}
    none = {"sinks": None, "alibi_slopes": None, "rel_bias": None}
    return Case("paged_attention", {**rows, **plain, **none, **extra})


def selected_windows(rate: int, topk: int = 3) -> Tensor:
    """[N, topk] a few windows of `rate` tokens that are whole at each token, then -1."""
    selected = torch.full((N, topk), -1, dtype=torch.int32)
    for start, end in pairwise(BOUNDS.tolist()):
        for pos in range(end - start):
            chosen = torch.randperm((pos + 1) // rate)[:topk]
            selected[start + pos, : len(chosen)] = chosen
    return selected


def selection(topk: int = 6) -> Tensor:
    """[N, topk] a few positions of each token's own past, its own among them, then -1."""
    selected = torch.full((N, topk), -1, dtype=torch.int32)
    for start, end in pairwise(BOUNDS.tolist()):
        for pos in range(end - start):
            chosen = torch.randperm(pos)[: topk - 1].sort().values
            selected[start + pos, : len(chosen) + 1] = torch.cat([chosen, torch.tensor([pos])])
    return selected


def indexed(**extra: Any) -> Case:
    rows = {"q": torch.randn(N, 4, 6), "k": torch.randn(N, 2, 6), "v": torch.randn(N, 2, 5)}
    plain = {"scale": 0.4, "window": 0, "chunk": 0, "softcap": 0.0, "sinks": None}
    return Case("indexed_attention", {**rows, "selected": selection(), **plain, **extra})


def indexed_latent() -> Case:
    rows = {"q": torch.randn(N, 4, 7), "rows": torch.randn(N, 8), "selected": selection()}
    weights = {"w_k": torch.randn(4, 4, 5), "w_v": torch.randn(4, 6, 5)}
    plain = {"scale": 0.4, "window": 0, "chunk": 0, "softcap": 0.0, "sinks": None}
    starts = {"latent_start": 3, "shared_start": 0}
    return Case("indexed_latent_attention", {**rows, **weights, **starts, **plain})


def compressed(**extra: Any) -> Case:
    """To entries of windows of three tokens."""
    rows = {"q": torch.randn(N, 4, 6), "rows": torch.randn(N, 6), "entries": torch.randn(N, 6)}
    plain = {"selected": None, "rate": 3, "scale": 0.4, "window": 0, "sinks": None}
    return Case("compressed_attention", {**rows, **plain, **extra})


def windows(spans: int) -> Case:
    width = 4 * spans
    rows = {"values": torch.randn(N, width), "gates": torch.randn(N, width)}
    return Case("pool_windows", {**rows, "bias": torch.randn(3, width), "spans": spans})


def delta(name: str, decay: Tensor) -> Case:
    heads = decay.shape[1]
    rows = {"q": torch.randn(N, 2, 6), "k": torch.randn(N, 2, 6), "v": torch.randn(N, heads, 5)}
    rest = {"g": -softplus(decay), "beta": torch.rand(N, heads), "scale": 0.4, "qk_l2norm": True}
    return Case(name, rows | rest, ("state", (heads, 6, 5)))


def cases() -> dict[str, Callable[[], Case]]:
    """Made anew for each test, from its seed."""
    return {
        "attention": attention,
        "attention, one width": lambda: attention(v=torch.randn(N, 2, 6)),
        "attention, window": lambda: attention(window=5),
        "attention, chunks": lambda: attention(chunk=7),
        "attention, sinks and softcap": lambda: attention(softcap=2.0, sinks=torch.randn(4)),
        "attention, slopes": lambda: attention(alibi_slopes=torch.rand(4)),
        "attention, bias by distance": lambda: attention(rel_bias=torch.randn(N, 4, 3)),
        "convolution": lambda: Case(
            "causal_conv",
            {
                "x": torch.randn(N, 3),
                "weight": torch.randn(3, 4),
                "bias": torch.randn(3),
                "activation": "silu",
                "dilation": 2,
            },
            ("conv_state", (3, 6)),
        ),
        "windows": lambda: Case(
            "causal_window",
            {"x": torch.randn(N, 3), "width": 4, "dilation": 1},
            ("conv_state", (3, 3)),
        ),
        "windows weighed": lambda: windows(1),
        "windows weighed with those before": lambda: windows(2),
        "entries": compressed,
        "entries, window and sinks": lambda: compressed(window=5, sinks=torch.randn(4)),
        "some entries": lambda: compressed(selected=selected_windows(3)),
        "gated delta rule": lambda: delta("gated_delta_rule", torch.randn(N, 4)),
        "KDA": lambda: delta("kda", torch.randn(N, 2, 6)),
        "SSD": lambda: Case(
            "ssd",
            {
                "x": torch.randn(N, 4, 5),
                "dt": torch.randn(N, 4),
                "A": -torch.rand(4),
                "B": torch.randn(N, 2, 6),
                "C": torch.randn(N, 2, 6),
                "D": torch.randn(4),
                "dt_bias": torch.randn(4),
                "dt_softplus": True,
                "dt_min": 0.0,
                "dt_max": 10.0,
            },
            ("state", (4, 5, 6)),
        ),
        "selective scan": lambda: Case(
            "selective_scan",
            {
                "x": torch.randn(N, 3),
                "dt": torch.randn(N, 3),
                "A": -torch.rand(3, 4),
                "B": torch.randn(N, 4),
                "C": torch.randn(N, 4),
                "D": torch.randn(3),
                "z": torch.randn(N, 3),
                "dt_bias": torch.randn(3),
                "dt_softplus": True,
            },
            ("state", (3, 4)),
        ),
        "selected keys": indexed,
        "selected keys, window": lambda: indexed(window=5),
        "selected keys, sinks and softcap": lambda: indexed(softcap=2.0, sinks=torch.randn(4)),
        "selected latent rows": indexed_latent,
        "decayed linear": lambda: Case(
            "decayed_linear",
            {
                "q": torch.randn(N, 2, 6),
                "k": torch.randn(N, 2, 6),
                "v": torch.randn(N, 2, 5),
                "decay": -torch.rand(2),
            },
            ("state", (2, 6, 5)),
        ),
    }


@pytest.fixture(params=cases())
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(1)
    return cases()[request.param]()


def twin(case: Case, **changed: Tensor) -> Tensor:
    operator = STATELESS[f"regraft::{case.name}"].operator
    given = {**case.given, **changed, "cu_seqlens": changed.get("cu_seqlens", BOUNDS)}
    return operator(*(given[a.name] for a in operator._schema.arguments))


def stateful(case: Case) -> Tensor:
    """The same by the operator with a cache: fresh sequences, pools full of NaN."""
    given = dict(case.given)
    given |= {"cu_seqlens": BOUNDS, "context_lens": torch.zeros(R, dtype=torch.int32)}
    if case.state is not None:
        name, shape = case.state
        given[name] = torch.full((R + 1, *shape), torch.nan)
        given["state_slots"] = torch.arange(1, R + 1)
    else:
        pages = torch.arange(1, R * N + 1).view(R, N)  # of one row each
        given["block_table"] = pages.int()
        lengths = BOUNDS.diff().tolist()
        given["slot_mapping"] = torch.cat([pages[r, :n] for r, n in enumerate(lengths)])
        given["entry_table"] = given["block_table"]
        for pool, rows in CACHES.items():
            if rows in given:
                given[pool] = torch.full((R * N + 1, 1, *given[rows].shape[1:]), torch.nan)
    operator = getattr(torch.ops.regraft, case.name).default
    return operator(*(given[a.name] for a in operator._schema.arguments))


def floats(case: Case) -> dict[str, Tensor]:
    return {n: x for n, x in case.given.items() if isinstance(x, Tensor) and x.is_floating_point()}


def test_equals_its_stateful_twin(case: Case) -> None:
    assert_close(twin(case), stateful(case))


def test_every_operator_has_a_case() -> None:
    """Selections, which have no gradient, are tested in test_varlen_indexed.py."""
    names = ("topk", "pool_topk", "block_topk", "entries")
    selections = {f"regraft::index_{name}" for name in names}
    assert {f"regraft::{make().name}" for make in cases().values()} == set(STATELESS) - selections


def test_a_twin_takes_everything_but_caches() -> None:
    """An argument that a twin lacks would be dropped in silence."""
    caches = {*CACHES, "paged", "conv_state", "state"}
    caches |= {"context_lens", "block_table", "entry_table", "slot_mapping", "state_slots"}
    for name, stateless in STATELESS.items():
        operator = getattr(torch.ops.regraft, name.removeprefix("regraft::")).default
        missing = {a.name for a in operator._schema.arguments} - set(stateless.names)
        assert missing <= caches, name


def test_sequences_do_not_see_each_other(case: Case) -> None:
    """A gradient from one sequence's rows reaches that sequence's rows only, and their own past."""
    rows = {n: x.requires_grad_() for n, x in floats(case).items() if x.shape[0] == N}
    out = twin(case, **rows)
    found = torch.autograd.grad(out[22:24].square().sum(), list(rows.values()))
    for gradient in found:
        assert not gradient[:20].any()
        assert not gradient[24:].any()
        assert gradient[20:24].any()


def test_gradients_by_differences(case: Case) -> None:
    """Along a random direction in every tensor of floats, against two evaluations beside the point."""
    given = {n: x.requires_grad_() for n, x in floats(case).items()}
    weight = torch.randn_like(twin(case)).detach()
    found = torch.autograd.grad((twin(case, **given) * weight).sum(), list(given.values()))
    step = 3e-3
    for (name, x), gradient in zip(given.items(), found):
        direction = torch.randn_like(x)
        with torch.no_grad():
            up, down = (
                (twin(case, **{name: x + sign * step * direction}) * weight).double().sum()
                for sign in (1, -1)
            )
        slope = float((up - down) / (2 * step))
        expected = float((gradient * direction).double().sum())
        assert abs(slope - expected) <= 2e-2 * (1 + abs(expected)), name


def test_rows_of_no_sequence_are_zero(case: Case) -> None:
    out = twin(case, cu_seqlens=BOUNDS[:-1])
    assert not out[38:].any()
    assert_close(out[:38], twin(case)[:38])


def test_schema_fake_and_autograd_agree(case: Case) -> None:
    operator = STATELESS[f"regraft::{case.name}"].operator
    given = {**case.given, "cu_seqlens": BOUNDS}
    arguments = tuple(
        x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in (given[a.name] for a in operator._schema.arguments)
    )
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("transposed", [False, True])
def test_expert_gradients(transposed: bool) -> None:
    x, ids = torch.randn(9, 4, requires_grad=True), torch.tensor([2, 0, 2, 2, 5, 0, 1, 1, 2])
    weight = torch.randn(6, *((4, 3) if transposed else (3, 4)), requires_grad=True)
    given = torch.randn(9, 3)
    expected = torch.autograd.grad(
        expert_linear_naive(x, weight, ids, transposed), (x, weight), given
    )
    found = torch.autograd.grad(expert_linear(x, weight, ids, transposed), (x, weight), given)
    for one, two in zip(found, expected, strict=True):
        assert_close(one, two)


def test_a_stopped_gradient() -> None:
    x = torch.randn(3, requires_grad=True)
    (gradient,) = torch.autograd.grad((x * stop_gradient(x)).sum(), x)
    assert_close(gradient, x)


def test_a_function_without_a_gradient_says_so() -> None:
    rounded = define(
        "varlen_test_only",
        "(Tensor x) -> Tensor",
        lambda x: x.detach() * 2,
        lambda x: torch.empty_like(x),
    )
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="this operator has no backward"):
        rounded(x).sum().backward()
