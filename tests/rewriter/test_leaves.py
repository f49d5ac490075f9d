"""Leaf functions stay whole while a model is traced, keep all their arguments, and are themselves otherwise."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations import use_kernel_func_from_hub_with_fallback
from transformers.models.mamba import modeling_mamba
from transformers.models.qwen3_next import modeling_qwen3_next

from regraft.rewriter.capture import capture
from regraft.rewriter.leaves import LEAVES, is_leaf, kernel_name, leaf_arguments, leaves_in_place
from regraft.rewriter.module_leaf import is_module_leaf
from tests.families.models import build
from tests.rewriter.remote_code import HIDDEN, Model, row
from tests.tolerance import assert_close


def leaf_nodes(graph: torch.fx.Graph, name: str) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if is_leaf(node, name)]


EXPECTED = {
    "qwen3_next": {"causal_conv1d_fn": 3, "chunk_gated_delta_rule": 3},
    "kimi_linear": {"causal_conv1d_fn": 3, "chunk_kda": 3},
    "mamba2": {"causal_conv1d_fn": 3, "mamba_chunk_scan_combined": 3},
    "mamba": {"causal_conv1d_fn": 3, "selective_scan_fn": 3},
    "zamba": {"causal_conv1d_fn": 5, "selective_scan_fn": 10},
    "granitemoehybrid": {"causal_conv1d_fn": 2, "mamba_chunk_scan_combined": 2},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_each_call_is_one_node(name: str) -> None:
    graph = capture(build(name)).graph
    found = {leaf: len(leaf_nodes(graph, leaf)) for leaf in LEAVES}
    assert {leaf: count for leaf, count in found.items() if count} == EXPECTED[name]
    assert not any(is_module_leaf(node) for node in graph.nodes)


def test_arguments_are_there_by_name() -> None:
    graph = capture(build("mamba2")).graph
    scan = leaf_nodes(graph, "mamba_chunk_scan_combined")[0]
    arguments = leaf_arguments(scan)
    assert list(arguments) == [
        "hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states", "dt_softplus",
        "dt_limit", "return_final_states", "function",
    ]  # fmt: skip
    assert arguments["D"].op == "get_attr" and arguments["initial_states"] is None
    assert arguments["dt_softplus"] is True and list(arguments["dt_limit"]) == [0.0, float("inf")]
    assert arguments["function"] == "transformers.models.mamba2.modeling_mamba2:mamba2_chunk_scan"
    conv = leaf_nodes(graph, "causal_conv1d_fn")[0]
    assert leaf_arguments(conv)["activation"] == "silu"
    assert scan.meta["path"] == "backbone.layers.0.mixer"


def test_functions_are_replaced_during_a_trace_only() -> None:
    model = build("mamba")
    before = dict(vars(modeling_mamba))
    with leaves_in_place(model):
        assert modeling_mamba.mamba_selective_scan is not before["mamba_selective_scan"]
        assert modeling_mamba.causal_conv1d_fn is not before["causal_conv1d_fn"]
        assert modeling_mamba.causal_conv1d_update is before["causal_conv1d_update"]
    assert all(vars(modeling_mamba)[name] is value for name, value in before.items())
    with pytest.raises(KeyError), leaves_in_place(model):
        raise KeyError
    assert all(vars(modeling_mamba)[name] is value for name, value in before.items())


def test_other_marked_functions_are_no_leaves() -> None:
    assert kernel_name(modeling_mamba.mamba_selective_scan) == "selective_scan_fn"
    assert kernel_name(modeling_mamba.causal_conv1d_update) not in LEAVES
    assert kernel_name(torch.nn.functional.silu) is None
    assert kernel_name(nn.Linear(1, 1)) is None


def test_the_mark_is_found_under_the_kernels_package() -> None:
    """With that package a marked function is a module around it (`kernels.layer._create_func_module`)."""
    func = modeling_qwen3_next.torch_chunk_gated_delta_rule

    class Func(nn.Module):
        kernel_layer_name = "chunk_gated_delta_rule"

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs)

    assert kernel_name(Func()) == "chunk_gated_delta_rule"
    model = build("qwen3_next")
    ids = torch.arange(3, 13)[None]
    try:
        modeling_qwen3_next.torch_chunk_gated_delta_rule = Func()
        captured = capture(model)
    finally:
        modeling_qwen3_next.torch_chunk_gated_delta_rule = func
    assert len(leaf_nodes(captured.graph, "chunk_gated_delta_rule")) == 3
    with torch.no_grad():
        assert_close(captured.module(ids, ids - 3)[0], model(input_ids=ids).logits, scale=5)


# ---------------------------------------------------------------------- remote code


def loop(
    hidden_states: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **kwargs: Any
) -> Tensor:
    """A causal convolution as a loop over time; would fix T if it were traced."""
    width = weight.shape[-1]
    out = []
    for t in range(hidden_states.shape[-1]):
        window = hidden_states[..., max(0, t + 1 - width) : t + 1]
        out.append((window * weight[:, -window.shape[-1] :]).sum(-1))
    return torch.stack(out, dim=-1)


def remote_module(monkeypatch: pytest.MonkeyPatch, call: str) -> ModuleType:
    """A file of remote code that knows the marked function under a name of its own."""
    module = ModuleType("remote_code_of_somebody")
    module.somebodys_conv = use_kernel_func_from_hub_with_fallback(
        "causal_conv1d_fn", "no_such_package"
    )(loop)
    module.torch, module.nn = torch, nn
    source = f"""
class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn({HIDDEN}, 3))
    def forward(self, hidden, position_ids, **_):
        x = hidden.transpose(1, 2)
        return {call}.transpose(1, 2)
"""
    exec(compile(source, "remote_code_of_somebody.py", "exec"), vars(module))
    module.Mixer.__module__ = module.__name__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def assert_runs_like(model: nn.Module, captured: Any) -> None:
    for length in (5, 40):
        with torch.no_grad():
            assert_close(captured.module(*row(length))[0], model(*row(length)).logits)


def test_remote_code_is_found_under_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = remote_module(monkeypatch, "somebodys_conv(x, self.weight)")
    model = Model(module.Mixer)
    captured = capture(model)
    assert len(leaf_nodes(captured.graph, "causal_conv1d_fn")) == 2
    assert_runs_like(model, captured)


@pytest.mark.parametrize(
    "call",
    [
        "somebodys_conv(x, self.weight, mask=position_ids)",
        "somebodys_conv(x, self.weight, activation=['silu'])",
    ],
)
def test_a_call_that_the_operator_cannot_express_makes_its_module_opaque(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    model = Model(remote_module(monkeypatch, call).Mixer)
    captured = capture(model)
    assert not leaf_nodes(captured.graph, "causal_conv1d_fn")
    assert [n.meta["leaf"].path for n in captured.graph.nodes if is_module_leaf(n)] == [
        "layers.0.mixer",
        "layers.1.mixer",
    ]
    assert_runs_like(model, captured)


def test_the_operators_have_sound_fakes() -> None:
    x, weight = torch.randn(1, 6, 9), torch.randn(6, 4)
    key = "transformers.models.mamba.modeling_mamba:causal_conv1d_fn"
    torch.library.opcheck(LEAVES["causal_conv1d_fn"].operator, (x, weight, None, "silu", key))
    q, v = torch.randn(1, 9, 2, 4), torch.randn(1, 9, 4, 3)
    g = beta = torch.rand(1, 9, 4)
    key = "transformers.models.qwen3_next.modeling_qwen3_next:torch_chunk_gated_delta_rule"
    arguments = (q, q, v, -g, beta, 64, None, False, True, key)
    torch.library.opcheck(LEAVES["chunk_gated_delta_rule"].operator, arguments)
    dt = torch.rand(1, 9, 2)
    key = "transformers.models.mamba2.modeling_mamba2:mamba2_chunk_scan"
    a = -torch.rand(2)
    arguments = (
        q,
        dt,
        a,
        q[:, :, :1],
        q[:, :, :1],
        8,
        None,
        None,
        None,
        True,
        [0.0, 1.0],
        False,
        key,
    )
    torch.library.opcheck(LEAVES["mamba_chunk_scan_combined"].operator, arguments)


def test_nothing_is_known_by_the_name_of_a_family() -> None:
    assert SimpleNamespace(**LEAVES).__dict__.keys() == {
        "causal_conv1d_fn",
        "chunk_gated_delta_rule",
        "chunk_kda",
        "mamba_chunk_scan_combined",
        "selective_scan_fn",
    }
