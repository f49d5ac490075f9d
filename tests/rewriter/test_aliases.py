"""Second names and composites of ATen: what is row-local by another name is proven, not replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regraft.rewriter.aliases import ALIASES, COMPOSITES, first_name, taken_apart
from regraft.rewriter.pipeline import rewrite
from regraft.rewriter.token_axis import analyse, find_regions

from . import toys
from .serving import serves
from .toys import HIDDEN, captured

aten = torch.ops.aten
OnRows = Callable[[Any, Tensor], Tensor]

ROW_LOCAL: dict[str, OnRows] = {
    "second names": lambda m, x: torch.multiply(torch.subtract(x, 0.1), torch.negative(torch.absolute(x)))
    + torch.where(torch.greater(x, 0), torch.true_divide(x, 2), torch.clip(x, -1, 1)) + torch.special.softmax(x, -1),
    "prelu": lambda m, x: F.prelu(x, m.vector[0, :1]),
    "cosine similarity": lambda m, x: x * F.cosine_similarity(x, x.tanh(), dim=-1)[..., None],
    "tensordot and inner": lambda m, x: torch.tensordot(x, m.square, dims=1) + torch.inner(x, m.other),
    "norms": lambda m, x: x / (torch.linalg.norm(x, dim=-1, keepdim=True) + 1) + F.normalize(x, dim=-1),
    "group norm": lambda m, x: F.group_norm(x[0], 4)[None],
    "instance norm": lambda m, x: F.instance_norm(x[0].view(-1, 2, HIDDEN // 2)).reshape(x.shape),
    "batch norm": lambda m, x: F.batch_norm(x[0], m.vector[0], m.vector[0].abs() + 1, training=False)[None],
    "gru cell": lambda m, x: torch.gru_cell(x[0], x[0], m.square.repeat(3, 1), m.other.repeat(3, 1))[None],
    "cross": lambda m, x: torch.cat([torch.linalg.cross(x[..., :3], x[..., 3:6]), x[..., 3:]], -1),
    "rare functions": lambda m, x: x.asinh() + (x.tanh() / 2).atanh() + (x.abs() + 1).lgamma() + torch.fmax(x, -x)
    + torch.copysign(x, x) + torch.logaddexp2(x, x) + torch.heaviside(x, x) + x.deg2rad(),
    "pooling": lambda m, x: F.avg_pool1d(x, 2).repeat_interleave(2, -1) + F.max_pool1d(x, 2).repeat_interleave(2, -1),
    "interpolation": lambda m, x: F.interpolate(x, scale_factor=2)[..., :HIDDEN],
    "fourier": lambda m, x: torch.fft.irfft(torch.fft.rfft(x, dim=-1) * 2, n=HIDDEN, dim=-1),
    "quarter turn": lambda m, x: torch.rot90(x[0].view(-1, 2, HIDDEN // 2), 1, (1, 2)).reshape(x.shape),
    "intervals": lambda m, x: x * torch.bucketize(x, m.vector[0].sort().values) + torch.isclose(x, x),
    "diagonals": lambda m, x: torch.diagonal(torch.diag_embed(x), dim1=-2, dim2=-1) + torch.diag_embed(x).sum(-1),
}  # fmt: skip

ALONG_TOKENS: dict[str, OnRows] = {
    "group norm": lambda m, x: F.group_norm(x.transpose(1, 2), 4).transpose(1, 2),
    "batch norm in training": lambda m, x: F.batch_norm(x[0], None, None, training=True)[None],
    "pooling": lambda m, x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "fourier": lambda m, x: torch.fft.fft(x, dim=1).real,
    "cross": lambda m, x: torch.linalg.cross(x[:, :3], x[:, 3:6], dim=1).sum() + x,
}


def mix_of(rows: OnRows) -> toys.Mix:
    return lambda m, x, p: x + rows(m, x)


@pytest.mark.parametrize("name", ROW_LOCAL)
def test_row_local_operations_are_proven(name: str) -> None:
    mix = mix_of(ROW_LOCAL[name])
    state = rewrite(captured(mix), ())
    assert state.served == [] and state.proof is not None and state.proof.proven
    serves(state, mix)


@pytest.mark.parametrize("name", ALONG_TOKENS)
def test_the_same_operations_along_the_tokens_mix(name: str) -> None:
    analysis = analyse(captured(mix_of(ALONG_TOKENS[name])).graph)
    assert find_regions(analysis) or any(map(analysis.is_wide, analysis.graph.nodes))


@pytest.mark.parametrize("name", ALIASES)
def test_both_names_take_the_same_arguments(name: str) -> None:
    packet = getattr(aten, name)
    for overload in packet.overloads():
        operator = getattr(packet, overload)
        twin = first_name(operator)
        assert twin is not operator and twin._opname == ALIASES[name]
        for one, two in zip(operator._schema.arguments, twin._schema.arguments, strict=True):
            assert (str(one.type), one.default_value) == (str(two.type), two.default_value)


def test_every_composite_is_taken_apart() -> None:
    assert {operator._opname for operator in taken_apart()} == set(COMPOSITES)
