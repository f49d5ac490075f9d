"""What the attention pass reads off whole models: every layer's mask, and how many key heads its cache keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import regraft.kernels.paged_attention  # noqa: F401  (registers the operator)
from regraft.passes import attention, positions
from regraft.passes.attention import Plan
from regraft.rewriter.capture import capture
from regraft.rewriter.graph import CapturedGraph, is_aten
from regraft.rewriter.pattern import Declined, Region
from regraft.rewriter.pipeline import rewrite
from tests.families.models import FAMILIES, build
from tests.passes.serve import serve
from tests.tolerance import assert_close

CAUSAL = "k <= q"
WINDOW = "k <= q & q - k < 8"
ALIBI = "k <= q; + slope[h]*k"

PLAIN = (
    "llama qwen2 qwen3 olmo2 smollm3 granite stablelm gpt_neox gpt2 opt arcee qwen2_moe qwen3_moe olmoe glm4_moe "
    "minimax_m2 ernie4_5_moe glm4 ministral3 apertus seed_oss nanochat granitemoe hunyuan_v1_moe phi3_longrope falcon "
    "falcon_new deepseek_v2 deepseek_v2_lite deepseek_v3 kimi_k25 glm4_moe_lite longcat_flash minicpm3 mistral4 youtu "
    "axk1"
)
MASKS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(PLAIN.split(), (CAUSAL,)),
    **dict.fromkeys(("mistral", "phi3", "starcoder2", "mixtral"), (WINDOW,)),
    **dict.fromkeys(
        ("gemma3_text", "olmo3", "cohere2", "dots1", "afmoe", "exaone4", "ministral"),
        (CAUSAL, WINDOW),
    ),
    "gemma2": (WINDOW + "; softcap 50", CAUSAL + "; softcap 50"),
    "gpt_oss": (WINDOW + "; sink[h]", CAUSAL + "; sink[h]"),
    "mimo_v2_flash": (CAUSAL, "k <= q & q - k < 12; sink[h]"),
    "llama4": ("k <= q & floor(k/8) == floor(q/8)", CAUSAL),
    **dict.fromkeys(("bloom", "mpt", "falcon_alibi"), (ALIBI,)),
    "inkling": ("k <= q & q - k < 12; + bias[q, h, q - k]", "k <= q; + bias[q, h, q - k]"),
    "inkling2": (
        "k <= q & q - k < 12; + bias[q, h, q - k]; sink[q, h]",
        "k <= q; + bias[q, h, q - k]; sink[q, h]",
    ),
    "gpt_neo": (CAUSAL, WINDOW),
}
SELECTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "mistral_large4", "hy_v4", "axk2"), ()),
    "dots3_note": (WINDOW,),
}
"""Families whose full attention selects keys by content, with the masks of their other layers."""
EXECUTED = ("llama4", "gemma2", "gpt_oss", "falcon_new", "mpt", "mimo_v2_flash")
KEY_HEADS = {"llama": 2, "falcon": 1, "falcon_new": 2, "bloom": 4, "gpt_neox": 4}
"""Those that share heads keep one each, also where they are repeated before their rotary embedding (falcon_new)."""
QUICK = {"gemma2", "gpt_oss", "llama4", "bloom", "mpt", "falcon_new"}


def plans(graph: CapturedGraph) -> list[Plan | Declined]:
    """What the pass makes of every place in the graph that is an attention."""
    found = []
    for node in graph.graph.nodes:
        if not is_aten(node, "scaled_dot_product_attention", "matmul", "bmm", "einsum"):
            continue
        core = attention.PASS.pattern(Region(node, (), (), "attention", node.meta["path"]))
        if not isinstance(core, Declined):
            found.append(attention.PASS.check(core))
    return found


def slow_unless_quick(names: object) -> list[object]:
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in names]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", slow_unless_quick(MASKS))
def test_every_layer_is_read_and_the_grafted_model_is_the_model(name: str) -> None:
    model = build(name)
    graph = capture(model)
    found = plans(graph)
    refused = [str(plan) for plan in found if isinstance(plan, Declined)]
    assert not refused
    assert {str(plan.score) for plan in found} == set(MASKS[name])  # type: ignore[union-attr]
    assert len(found) == FAMILIES[name].text_config.num_hidden_layers
    if name in KEY_HEADS:
        assert {(plan.key.heads, plan.value.heads) for plan in found} == {(KEY_HEADS[name],) * 2}  # type: ignore[union-attr]
    if name in EXECUTED:
        check_served(model, graph)


def check_served(model: nn.Module, graph: CapturedGraph) -> None:
    """Two requests in one packed row, cut in the middle, against the model alone."""
    rewriting = rewrite(graph, (positions.PASS, attention.PASS), fallback="refuse")
    sequences = [torch.arange(n) * 7 % 200 + 3 for n in (21, 4)]
    with torch.no_grad():
        expected = [model(ids[None], use_cache=False).logits[0] for ids in sequences]
    steps = [[(0, 0, 11), (1, 0, 3)], [(1, 3, 4), (0, 11, 21)]]
    for result, reference in zip(serve(rewriting, sequences, steps), expected, strict=True):
        # Logits of three or four layers of unnormalised random weights.
        assert_close(result, reference, scale=5.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", SELECTED)
def test_keys_selected_by_their_content_are_declined(name: str) -> None:
    found = plans(capture(build(name)))
    refused = [plan for plan in found if isinstance(plan, Declined)]
    assert refused
    for plan in refused:
        assert is_aten(plan.node, "scatter")
        selected = f"Eq({plan.node.name}[0, q, k], 0)"  # type: ignore[union-attr]
        assert plan.reason.startswith(f"the mask is no relation of positions: {selected}")
    assert {str(plan.score) for plan in found if isinstance(plan, Plan)} == set(SELECTED[name])
