"""A captured graph says what the model says, for every number of tokens, and the model does not notice."""

from __future__ import annotations

import copy
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from regraft.rewriter.capture import capture
from regraft.rewriter.errors import RewriteError
from regraft.rewriter.graph import TOKENS, CapturedGraph, describe
from regraft.rewriter.untouched import borrowed, configs_of
from tests.families.models import FAMILIES, build
from tests.rewriter.remote_code import Model, TimeLoop
from tests.tolerance import assert_close

LENGTHS = (5, 16, 37, 64)

PLAIN = ["llama", "gpt2", "bloom", "mpt", "falcon_alibi", "gpt_oss", "mixtral", "llama4"]
LEAVES = ["qwen3_next", "kimi_linear", "mamba", "mamba2", "lfm2"]
OPAQUE = ["minimax", "recurrent_gemma", "rwkv", "longcat_flash"]
LONG = [
    "phi3_longrope",
    "deepseek_v3",
    "deepseek_v4",
    "qwen4_exp",
    "xlstm",
    "zaya",
    "glm5_next",
    "blt",
]


def reference(model: nn.Module, ids: Tensor) -> Tensor:
    """The model's own forward without a cache, which leaves no trace in it."""
    with torch.no_grad(), borrowed(model):
        return model(input_ids=ids, use_cache=False).logits


def run(captured: CapturedGraph, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return captured.module(ids, torch.arange(ids.shape[1])[None])[0]


def assert_same_as_model(captured: CapturedGraph, model: PreTrainedModel, name: str) -> None:
    for length in LENGTHS:
        if captured.min_tokens <= length:
            ids = FAMILIES[name].prompt(length, seed=length)[None]
            # Experts are summed in another order, and rounding grows with depth.
            assert_close(
                run(captured, ids), reference(model, ids), scale=5, name=f"{name} T={length}"
            )


@pytest.mark.parametrize(
    "name", [*PLAIN, *LEAVES, *OPAQUE, *(pytest.param(n, marks=pytest.mark.slow) for n in LONG)]
)
def test_the_graph_computes_what_the_model_computes(name: str) -> None:
    model = build(name)
    captured = capture(model)
    assert captured.min_tokens <= 16
    assert_same_as_model(captured, model, name)


@pytest.fixture(scope="module")
def llama() -> tuple[PreTrainedModel, CapturedGraph]:
    model = build("llama")
    return model, capture(model)


def test_inputs_are_ids_and_positions_and_weights_are_attributes(
    llama: tuple[PreTrainedModel, CapturedGraph],
) -> None:
    model, captured = llama
    assert [n.target for n in captured.graph.find_nodes(op="placeholder")] == [
        "input_ids",
        "position_ids",
    ]
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    assert captured.weights.keys() == captured.weight_names.keys()
    for attribute, tensor in captured.weights.items():
        assert getattr(captured.module, attribute) is tensor
        assert own[captured.weight_names[attribute]] is tensor
    attributes = {node.target for node in captured.graph.find_nodes(op="get_attr")}
    assert attributes <= captured.weights.keys()
    assert captured.logits.meta["shape"] == (1, TOKENS, model.config.vocab_size)


def test_every_node_carries_its_facts(llama: tuple[PreTrainedModel, CapturedGraph]) -> None:
    model, captured = llama
    paths = dict(model.named_modules()).keys()
    for node in captured.graph.nodes:
        if node.op == "output":
            continue
        shape, dtype = node.meta["shape"], node.meta["dtype"]
        assert node.meta["path"] in paths
        if shape is None:
            assert dtype is None
            continue
        assert isinstance(dtype, torch.dtype)
        assert [len(shape), dtype] == [node.meta["val"].dim(), node.meta["val"].dtype]
        assert all(isinstance(s, int) or s.free_symbols == {TOKENS} for s in shape)
    linears = [n for n in captured.graph.nodes if "q_proj" in n.meta["path"]]
    assert linears[0].meta["path"] == "model.layers.0.self_attn.q_proj"
    attention = next(n for n in captured.graph.nodes if "scaled_dot_product" in str(n.target))
    assert attention.meta["path"] == "model.layers.0.self_attn"
    assert attention.meta["source"].startswith("modeling_llama.py:")
    assert "attention_interface" in describe(attention)


def test_shapes_are_those_of_a_run(llama: tuple[PreTrainedModel, CapturedGraph]) -> None:
    _, captured = llama

    class Shapes(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, Tensor):
                want = tuple(int(sympy.sympify(s).subs(TOKENS, 11)) for s in n.meta["shape"])
                assert tuple(value.shape) == want, n.format_node()
            return value

    ids = torch.arange(11)[None]
    Shapes(captured.module).run(ids, ids)


def test_weights_stay_live(llama: tuple[PreTrainedModel, CapturedGraph]) -> None:
    model, captured = llama
    ids = FAMILIES["llama"].prompt(9)[None]
    before = run(captured, ids)
    weight = model.model.layers[1].mlp.down_proj.weight
    saved = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(1.5)
    assert not torch.allclose(run(captured, ids), before)
    assert_close(run(captured, ids), reference(model, ids))
    with torch.no_grad():
        weight.copy_(saved)
    assert_close(run(captured, ids), before)


def test_positions_are_an_input_even_where_they_are_not_used() -> None:
    captured = capture(build("bloom"))
    ids, positions = captured.graph.find_nodes(op="placeholder")
    assert (ids.target, positions.target, positions.users) == ("input_ids", "position_ids", {})
    assert positions.meta["shape"] == (1, TOKENS)


def test_a_table_bounds_the_number_of_tokens_and_its_sizes_come_out_plain() -> None:
    captured = capture(build("mpt"))
    assert (captured.min_tokens, captured.max_tokens) == (2, 512)
    for node in captured.graph.nodes:
        for size in node.meta.get("shape") or ():
            assert isinstance(size, int) or sympy.Poly(size, TOKENS).degree() == 1, (
                node.format_node()
            )


class Blocks(nn.Module):
    """Adds to each token of a whole block the block's sum."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[1] // self.size
        if count == 0:
            return x
        whole = x[:, : count * self.size].view(1, count, self.size, -1)
        whole = whole + whole.sum(2, keepdim=True)
        return torch.cat([whole.flatten(1, 2), x[:, count * self.size :]], 1)


class OfBlocks(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.blocks = Blocks(size)
        self.eval()

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.blocks(self.embed(input_ids))))


@pytest.mark.parametrize(("size", "least"), [(4, 4), (100, 100)])
def test_blocks_longer_than_the_traced_row(size: int, least: int) -> None:
    """A longer row is traced, and no module is kept whole."""
    model = OfBlocks(size)
    captured = capture(model)
    assert (captured.min_tokens, captured.max_tokens) == (least, None)
    assert "module_leaf" not in str(captured.graph)
    for length in (size, size + 1, 3 * size - 1):
        ids = torch.arange(length)[None] % 64
        assert_close(run(captured, ids), model(ids).logits)


def test_blocks_too_long_to_trace_are_kept_whole() -> None:
    assert "module_leaf" in str(capture(OfBlocks(5000)).graph)


# ---------------------------------------------------------------------- the model comes out untouched


def everything_of(model: nn.Module) -> dict[str, Any]:
    """All that can be compared of a model: attributes by identity, tensors also by storage and contents."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            held = value.items() if isinstance(value, dict) else [("", value)]
            for key, item in held:
                found[f"{path}.{name}.{key}"] = (
                    item if not isinstance(item, (list, set)) else copy.copy(item)
                )
                if isinstance(item, Tensor):
                    found[f"{path}.{name}.{key}:bits"] = item.detach().clone()
                    found[f"{path}.{name}.{key}:place"] = item.data_ptr()
    for index, config in enumerate(configs_of(model)):
        found[f"config {index}"] = copy.deepcopy(vars(config))
    return found


def assert_untouched(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        if name.endswith(":bits"):
            assert torch.equal(value, after[name]) and value.dtype == after[name].dtype, name
        elif isinstance(value, (dict, list, set)):
            assert value == after[name], name
        else:
            assert value is after[name] or value == after[name], name


TOUCHY = ["llama", "mixtral", "phi3_longrope", "rwkv", "recurrent_gemma", "qwen3_next"]


@pytest.mark.parametrize("name", TOUCHY)
def test_the_model_comes_out_untouched(name: str) -> None:
    model = build(name)
    module = __import__(type(model).__module__, fromlist=["x"])
    functions = dict(vars(module))
    before = everything_of(model)
    random_state = torch.get_rng_state()
    capture(model)
    assert_untouched(before, everything_of(model))
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(vars(module)[key] is value for key, value in functions.items())
    ids = FAMILIES[name].prompt(24)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, build(name)(input_ids=ids).logits)


class Broken(TimeLoop):
    def forward(self, hidden: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        self.last = hidden
        self.seen.append(1)
        raise KeyError("no such thing")


def test_the_model_comes_out_untouched_on_an_error() -> None:
    model = Model(Broken)
    model.layers[0].register_forward_hook(lambda *_: None)
    before = everything_of(model)
    with pytest.raises(KeyError, match="no such thing"):
        capture(model)
    assert_untouched(before, everything_of(model))
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


@pytest.mark.parametrize(
    "loaded_with", ["flex_attention", "flash_attention_2", "flash_attention_3", "eager"]
)
def test_any_attention_implementation_is_captured_and_given_back(loaded_with: str) -> None:
    model = build("llama")
    for config in configs_of(model):
        config._attn_implementation_internal = loaded_with
    captured = capture(model)
    assert {config._attn_implementation for config in configs_of(model)} == {loaded_with}
    assert any("scaled_dot_product_attention" in str(node.target) for node in captured.graph.nodes)
    ids = FAMILIES["llama"].prompt(12)[None]
    assert_close(run(captured, ids), reference(build("llama"), ids))


def test_a_class_without_sdpa_is_captured_eager() -> None:
    captured = capture(build("gpt_oss"))
    names = {str(node.target) for node in captured.graph.nodes}
    assert not any("scaled_dot_product_attention" in name for name in names)
    assert any("softmax" in name for name in names)
    assert not any("grouped_mm" in name for name in names)


def test_an_adapter_takes_part() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        build("llama"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    model.eval()
    captured = capture(model)
    ids = FAMILIES["llama"].prompt(12)[None]
    assert_close(run(captured, ids), reference(model, ids))
    assert not torch.allclose(run(captured, ids), reference(build("llama"), ids))
    attention = next(n for n in captured.graph.nodes if "scaled_dot_product" in str(n.target))
    assert attention.meta["path"] == "base_model.model.model.layers.0.self_attn"


def test_the_meta_device_is_enough() -> None:
    real = build("llama")
    captured = capture(build("llama").to("meta"))
    assert [str(n.target) for n in captured.graph.nodes] == [
        str(n.target) for n in capture(real).graph.nodes
    ]
    assert all(weight.device.type == "meta" for weight in captured.weights.values())


def test_a_captured_model_can_be_freed() -> None:
    model = Model(TimeLoop)
    captured = capture(model)
    alive = [weakref_of(model.layers[0].mixer), weakref_of(model)]
    del model
    gc.collect()
    assert alive[0]() is not None, "the graph runs this module"
    del captured
    gc.collect()
    assert alive[0]() is None and alive[1]() is None


def weakref_of(value: object) -> Any:
    import weakref

    return weakref.ref(value)


# ---------------------------------------------------------------------- what is refused


def test_an_encoder_decoder_is_refused() -> None:
    config = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(RewriteError, match="encoder-decoder"):
        capture(T5ForConditionalGeneration(config).eval())


def test_an_encoder_is_refused() -> None:
    config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(RewriteError, match="no language-modelling head"):
        capture(BertForMaskedLM(config).eval())


def test_dropout_is_refused_in_training_only() -> None:
    model = build("gpt2")
    model.train()
    with pytest.raises(RewriteError, match=r"(?s)training mode with dropout.*model\.eval"):
        capture(model)
    plain = build("llama").train()
    capture(plain)
    assert plain.training and all(module.training for module in plain.modules())


@pytest.mark.parametrize(
    "places", [{"": "cpu", "lm_head": "disk"}, {"model": 0, "lm_head": 1}, {"": "disk"}]
)
def test_a_model_spread_by_accelerate_is_refused(places: dict[str, Any]) -> None:
    model = build("llama")
    model.hf_device_map = places
    with pytest.raises(RewriteError, match=r"(?s)spread over.*what to do: load it on one device"):
        capture(model)


def test_offloaded_weights_are_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(build("llama"), execution_device=torch.device("cpu"))
    with pytest.raises(RewriteError, match="accelerate"):
        capture(model)


class LastRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model(TimeLoop)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        output = self.model(input_ids, position_ids)
        output.logits = output.logits[:, -1:]
        return output


def test_logits_of_the_last_row_only_are_refused() -> None:
    with pytest.raises(RewriteError, match="logits of shape"):
        capture(LastRow())


class FixedOutside(Model):
    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False) -> Any:
        output = super().forward(input_ids, position_ids)
        output.logits = torch.stack([output.logits[:, t] for t in range(input_ids.shape[1])], dim=1)
        return output


def test_a_guard_outside_any_module_is_refused_with_its_line() -> None:
    with pytest.raises(RewriteError) as caught:
        capture(FixedOutside(TimeLoop))
    assert "Eq(" in caught.value.problem and "test_capture.py" in caught.value.source


def test_what_says_cannot_be_traced_says_where() -> None:
    error = RewriteError(
        "no", operation="aten.topk", path="model.mlp", source="x.py:3: y", fix="do z"
    )
    assert str(error).splitlines() == [
        "no",
        "  operation: aten.topk",
        "  module: model.mlp",
        "  source: x.py:3: y",
        "  what to do: do z",
    ]
