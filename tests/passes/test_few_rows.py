from __future__ import annotations

import pytest
import torch
from torch import nn

from regraft.kernels.linear import linear
from regraft.passes import few_rows
from regraft.passes.few_rows import take_few_rows
from tests.passes.test_merge_linears import Projections, captured


def half(*, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> Projections:
    return Projections(bias=bias).to(dtype)


def graph_of(model: Projections, dtype: torch.dtype = torch.bfloat16):
    graph = captured(model)
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.meta["dtype"] = dtype
    return graph


@pytest.mark.parametrize("bias", [False, True])
def test_projections_are_replaced_with_the_same_results(bias):
    graph = graph_of(half(bias=bias))
    x = torch.randn(1, 5, 8).bfloat16()
    expected = graph.module(x)
    assert take_few_rows(graph) == 4
    assert sum(node.target is linear for node in graph.graph.nodes) == 4
    for found, wanted in zip(graph.module(x), expected):
        assert torch.equal(found, wanted)


def test_weights_of_full_precision_are_left(monkeypatch):
    assert take_few_rows(graph_of(half(dtype=torch.float32), torch.float32)) == 0


def test_other_cards_are_left(monkeypatch):
    monkeypatch.setattr(few_rows, "fetches_tiles", lambda device: False)
    assert take_few_rows(graph_of(half())) == 0


def test_a_weight_that_is_computed_is_left():
    graph = graph_of(half())
    for node in graph.graph.nodes:
        if node.op == "call_function":
            weight = node.args[1]
            with graph.graph.inserting_before(node):
                twice = graph.graph.call_function(torch.ops.aten.mul.Tensor, (weight, 2))
            node.args = (node.args[0], twice)
    assert take_few_rows(graph) == 0


def test_a_bias_of_several_rows_is_left():
    graph = graph_of(half(bias=True))
    for node in graph.graph.nodes:
        if node.op == "get_attr" and "bias" in str(node.target):
            node.meta["shape"] = (5, *node.meta["shape"])
    assert take_few_rows(graph) == 0


def test_a_weight_of_a_class_of_its_own_is_left():
    class Own(torch.Tensor):
        """As quantised weights are."""

    graph = graph_of(half())
    for name in list(graph.module._parameters):
        tensor = graph.module._parameters.pop(name)
        graph.module.register_buffer(name, tensor.detach().as_subclass(Own))
    assert isinstance(graph.module, nn.Module) and take_few_rows(graph) == 0
