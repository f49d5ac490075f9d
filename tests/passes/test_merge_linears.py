from __future__ import annotations

import re

import pytest
import torch
from torch import fx, nn

from regraft.passes.merge_linears import merge, pattern
from regraft.rewriter.artifact import LiveWeights
from regraft.rewriter.graph import TOKENS, CapturedGraph
from tests.tolerance import assert_close

aten = torch.ops.aten


class Projections(nn.Module):
    """Three projections of one row, and one of the first's result."""

    def __init__(self, *, bias: bool = False, widths=(16, 8, 24), dtypes=(torch.float32,) * 3):
        super().__init__()
        for name, width, dtype in zip("qkv", widths, dtypes):
            self.add_module(name, nn.Linear(8, width, bias=bias, dtype=dtype))
        self.out = nn.Linear(widths[0], 8, bias=bias)


def captured(model: Projections) -> CapturedGraph:
    """`[q(x), k(x), v(x), out(q(x))]` as a captured graph over the model's own parameters."""
    graph, root, weights, names = fx.Graph(), nn.Module(), {}, {}
    values = {"x": graph.placeholder("x")}
    values["x"].meta.update(shape=(1, TOKENS, 8), dtype=torch.float32, path="", source="")
    for name, source in (("q", "x"), ("k", "x"), ("v", "x"), ("out", "q")):
        layer = model.get_submodule(name)
        operands = []
        for part, tensor in layer.named_parameters():
            attribute = f"w_{name}_{part}"
            root.register_parameter(attribute, tensor)
            operands.append(graph.get_attr(attribute))
            operands[-1].meta.update(shape=tuple(tensor.shape), dtype=tensor.dtype)
            weights[attribute], names[attribute] = tensor, f"{name}.{part}"
        node = graph.call_function(aten.linear.default, (values[source], *operands))
        meta = {"dtype": torch.float32, "path": name, "source": ""}
        node.meta.update(shape=(1, TOKENS, layer.out_features), **meta)
        values[name] = node
    graph.output(tuple(values[name] for name in ("q", "k", "v", "out")))
    return CapturedGraph(fx.GraphModule(root, graph), weights, names)


def linears(graph: CapturedGraph) -> int:
    return sum(node.target == aten.linear.default for node in graph.graph.nodes)


@pytest.mark.parametrize("bias", [False, True])
def test_three_projections_become_one_with_the_same_results(bias):
    model = Projections(bias=bias)
    graph = captured(model)
    x = torch.randn(1, 5, 8)
    expected = graph.module(x)
    merged = merge(graph)
    assert [len(m.parts) for m in merged] == [3] * (1 + bias)
    assert linears(graph) == 2
    for actual, wanted in zip(graph.module(x), expected):
        assert_close(actual, wanted)
    assert pattern(graph) == []


def test_the_models_parameters_are_the_same_objects_and_views_of_one_storage():
    model = Projections()
    before = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in before.items()}
    graph = captured(model)
    (merged,) = merge(graph)
    whole = getattr(graph.module, merged.attribute)
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
        assert torch.equal(parameter, values[name])
        shared = parameter.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert shared == (name != "out.weight")


def test_a_training_step_and_a_replaced_weight_reach_the_graph():
    model = Projections()
    graph = captured(model)
    merged = merge(graph)
    weights = LiveWeights.of(model, graph.weight_names, merged)
    x = torch.randn(1, 5, 8)
    version = weights.refresh(graph.module)
    assert weights.refresh(graph.module) == version
    with torch.no_grad():
        model.k.weight.add_(1.0)
    assert weights.refresh(graph.module) > version
    assert_close(graph.module(x)[1], model.k(x))
    changes = (
        lambda: setattr(model.k, "weight", nn.Parameter(torch.randn(8, 8))),
        lambda: setattr(model.q.weight, "data", torch.randn(16, 8)),  # same object, other memory
    )
    for change in changes:
        version = weights.refresh(graph.module)
        change()
        assert weights.refresh(graph.module) > version
        for name, actual in zip("qkv", graph.module(x)):
            assert_close(actual, model.get_submodule(name)(x), name=name)


def test_a_second_call_of_the_same_block_shares_the_merged_weight():
    model = Projections()
    graph = captured(model)
    nodes = [n for n in graph.graph.nodes if n.target == aten.linear.default]
    outputs = list(graph.graph.output_node().args[0])
    with graph.graph.inserting_before(graph.graph.output_node()):
        for node in nodes[:3]:
            again = graph.graph.call_function(aten.linear.default, (nodes[3], *node.args[1:]))
            again.meta.update(node.meta)
            outputs.append(again)
    graph.graph.output_node().args = (tuple(outputs),)
    graph.module.recompile()
    x = torch.randn(1, 5, 8)
    expected = graph.module(x)
    assert len(merge(graph)) == 1
    assert linears(graph) == 3
    for actual, wanted in zip(graph.module(x), expected):
        assert_close(actual, wanted)


def spoil_tie(model: Projections) -> None:
    model.k.weight = model.v.weight = nn.Parameter(torch.randn(8, 8))


def spoil_layout(model: Projections) -> None:
    for name in "kv":
        layer = model.get_submodule(name)
        layer.weight = nn.Parameter(torch.randn(8, layer.out_features).T)


def spoil_bias(model: Projections) -> None:
    """Of eight rows in place of one."""
    for name in "qkv":
        layer = model.get_submodule(name)
        layer.bias = nn.Parameter(torch.randn(8, layer.out_features))


def spoil_bias_to_a_number(model: Projections) -> None:
    for name in "qkv":
        model.get_submodule(name).bias = nn.Parameter(torch.tensor(0.5))


@pytest.mark.parametrize(
    ("options", "spoil"),
    [
        ({"widths": (4, 2, 24)}, None),  # rows that fill no whole vector
        ({"dtypes": (torch.float32, torch.bfloat16, torch.float16)}, None),
        ({"widths": (8, 8, 8)}, spoil_tie),
        ({}, spoil_layout),
        ({"bias": True}, spoil_bias),
        ({"bias": True}, spoil_bias_to_a_number),
    ],
    ids=["odd rows", "dtypes", "tied", "not contiguous", "rows of bias", "a number for bias"],
)
def test_what_cannot_be_merged_is_left_alone(options, spoil):
    model = Projections(**options)
    if spoil is not None:
        spoil(model)
    graph = captured(model)
    code = re.sub(r"\s", "", graph.module.code)
    assert merge(graph) == ()
    assert re.sub(r"\s", "", graph.module.code) == code
