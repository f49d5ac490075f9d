"""An engine answers from the weights that the wrapped model has now, and the model stays the user's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import regraft
from tests.families.models import FAMILIES, build
from tests.families.served import LOGITS, continue_greedily, forward, run_to_end, worst, wrap

# A recurrent hybrid with experts, and a model whose head and embedding are one tensor.
MODELS = [
    pytest.param(name, marks=pytest.mark.xdist_group(f"live_weights_{name}"))
    for name in ("qwen3_next", "gemma2")
]
every_model = pytest.mark.parametrize("name", MODELS)


def served(name: str) -> tuple[PreTrainedModel, regraft.Engine]:
    model = build(name)
    return model, wrap(model, max_batch_tokens=64, chunk_size=8)


def text(name: str, length: int = 13, seed: int = 0) -> list[int]:
    return FAMILIES[name].prompt(length, seed).tolist()


def loss_of(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    return nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]))


def train(model: PreTrainedModel, name: str, steps: int = 1) -> None:
    """Optimizer steps that are large enough to change what the model says."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(steps):
        loss_of(model, text(name, 24, seed=100 + step)).backward()
        optimizer.step()
        optimizer.zero_grad()


@every_model
def test_an_optimizer_step_is_seen_at_once(name: str) -> None:
    model, engine = served(name)
    prompt = text(name)
    before = engine.score([prompt])
    train(model, name)
    expected = forward(model, prompt)
    assert worst(before, [expected]) > 0.1
    assert worst(engine.score([prompt]), [expected]) <= LOGITS
    (output,) = engine.generate([prompt], max_new_tokens=4)
    assert output.token_ids == continue_greedily(model, prompt, 4)


@every_model
def test_nothing_cached_from_old_weights_is_used(name: str) -> None:
    """A step of the optimizer between any two steps of the engine: decoding, and half-way through a prompt."""
    model, engine = served(name)
    prompts = {engine.add_request(p, max_new_tokens=8): p for p in (text(name), text(name, 5, 1))}
    made: dict[str, list[int]] = {name: [] for name in prompts}
    for _ in range(3):
        for event in engine.step():
            assert event.token_id is not None
            made[event.request_id].append(event.token_id)
    stale = {
        request: continue_greedily(model, prompts[request] + made[request], 8 - len(made[request]))
        for request in prompts
    }
    train(model, name)
    expected = {
        request: continue_greedily(model, prompts[request] + made[request], 8 - len(made[request]))
        for request in prompts
    }
    outputs = run_to_end(engine)
    assert stale != expected
    for request in prompts:
        assert outputs[request].token_ids == made[request] + expected[request]


@every_model
def test_weights_change_between_the_chunks_of_a_prompt(name: str) -> None:
    """Two long prompts do not fit into one step, so that one of them is half done when the weights change."""
    model, engine = served(name)
    prompts = {
        engine.add_request(p, max_new_tokens=3): p for p in (text(name, 40), text(name, 50, 1))
    }
    engine.step()
    running = engine._loop.scheduler.running
    assert any(0 < request.num_cached < request.num_prompt for request in running)
    made = {request.request_id: request.tokens[request.num_prompt :] for request in running}
    train(model, name)
    outputs = run_to_end(engine)
    for request, prompt in prompts.items():
        kept = made[request]
        rest = continue_greedily(model, prompt + kept, 3 - len(kept))
        assert outputs[request].token_ids == kept + rest


@every_model
def test_replaced_parameter(name: str) -> None:
    """Another Parameter object in the place of the one that was captured."""
    model, engine = served(name)
    prompt = text(name)
    layer = model.model.layers[-1].self_attn.o_proj
    layer.weight = nn.Parameter(torch.randn_like(layer.weight) / 8)
    before = engine.score([prompt])
    layer.weight = nn.Parameter(layer.weight.detach().flip(0))
    expected = forward(model, prompt)
    assert worst(before, [expected]) > 0.1
    assert worst(engine.score([prompt]), [expected]) <= LOGITS


@every_model
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(name: str, assign: bool) -> None:
    model, engine = served(name)
    prompt = text(name)
    other = build(name, seed=1 + assign)
    before = engine.score([prompt])
    model.load_state_dict(other.state_dict(), assign=assign)
    expected = forward(other, prompt)
    assert worst(before, [expected]) > 0.1
    assert worst(engine.score([prompt]), [expected]) <= LOGITS


@pytest.mark.xdist_group("live_weights_gemma2")
def test_tied_tensors_that_come_apart() -> None:
    """The graph reads one tensor for both: once they are two, nothing is served until they are one again."""
    model, engine = served("gemma2")
    prompt, shared = text("gemma2"), model.model.embed_tokens.weight
    model.lm_head.weight = shared
    engine.score([prompt])
    try:
        model.lm_head.weight = nn.Parameter(shared.detach().flip(0))
        with pytest.raises(
            regraft.RewriteError, match="one tensor when the model was wrapped"
        ) as caught:
            engine.score([prompt])
        assert "lm_head.weight" in caught.value.problem
        assert "embed_tokens.weight" in caught.value.problem
        assert "wrap the model again" in caught.value.fix
    finally:
        model.lm_head.weight = shared
    assert worst(engine.score([prompt]), [forward(model, prompt)]) <= LOGITS
    both = nn.Parameter(shared.detach().flip(0))
    model.lm_head.weight = model.model.embed_tokens.weight = both
    assert worst(engine.score([prompt]), [forward(model, prompt)]) <= LOGITS


@every_model
def test_training_goes_on_as_if_there_were_no_engine(name: str) -> None:
    """Same loss and same gradients, to the bit, as a model that was never wrapped; before and after serving."""
    model, engine = served(name)
    fresh = build(name)
    model.load_state_dict(fresh.state_dict())
    loss_of(fresh, text(name)).backward()
    for _ in range(2):
        engine.generate([text(name), text(name, 3)], max_new_tokens=3)
        model.zero_grad()
        loss = loss_of(model, text(name))
        loss.backward()
        assert torch.equal(loss, loss_of(fresh, text(name)))
        gradients = {path: p.grad for path, p in model.named_parameters()}
        for path, parameter in fresh.named_parameters():
            assert torch.equal(gradients[path], parameter.grad), path


@pytest.mark.xdist_group("live_weights_qwen3_next")
def test_wrapping_and_serving_leave_the_model_as_it_was() -> None:
    """Nothing of it is another object or was written to, and it keeps its implementations."""
    name = "qwen3_next"
    model = build(name, attn_implementation="eager")
    model.set_experts_implementation("eager")
    config = copy.deepcopy(model.config.to_dict())
    tensors = {
        path: (t, t.data_ptr(), t._version) for path, t in model.state_dict(keep_vars=True).items()
    }
    attributes = {path: dict(vars(module)) for path, module in model.named_modules()}
    engine = wrap(model)
    engine.generate([text(name)], max_new_tokens=2)
    engine.close()
    assert model.config._attn_implementation == "eager"
    assert model.config._experts_implementation == "eager"
    assert model.config.to_dict() == config
    after = model.state_dict(keep_vars=True)
    assert {
        path: (t, t.data_ptr(), t._version) for path, t in after.items()
    }.keys() == tensors.keys()
    for path, (tensor, address, version) in tensors.items():
        assert after[path] is tensor
        assert (tensor.data_ptr(), tensor._version) == (address, version)
    for path, module in model.named_modules():
        assert vars(module).keys() == attributes[path].keys()
        assert all(vars(module)[key] is value for key, value in attributes[path].items())
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


@pytest.mark.xdist_group("live_weights_qwen3_next")
def test_two_engines_on_one_model() -> None:
    """Each keeps its own requests; both follow the weights."""
    name = "qwen3_next"
    model, first = served(name)
    second = wrap(model, page_size=7)
    prompts = [text(name, 9, seed) for seed in (3, 4)]
    one = first.add_request(prompts[0], max_new_tokens=6)
    two = second.add_request(prompts[1], max_new_tokens=6)
    starts = [continue_greedily(model, prompt, 2) for prompt in prompts]
    for _ in range(2):
        first.step()
        second.step()
    train(model, name)
    for engine, request, prompt, start in zip((first, second), (one, two), prompts, starts):
        rest = continue_greedily(model, prompt + start, 4)
        assert run_to_end(engine)[request].token_ids == start + rest


LLAMA = pytest.mark.xdist_group("live_weights_llama")


@LLAMA
def test_another_model_is_not_served() -> None:
    """Adapters that are switched off or merged, a module in the place of another, a hook: until that is undone."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build("llama"), config).eval()
    engine, prompt = wrap(model), text("llama")
    expected = forward(model, prompt)

    def refused(match: str) -> None:
        for call in (lambda: engine.score([prompt]), lambda: engine.generate([prompt])):
            with pytest.raises(regraft.RewriteError, match=match):
                call()

    def serves() -> None:
        assert worst(engine.score([prompt]), [expected]) <= LOGITS

    serves()
    with model.disable_adapter():
        refused(r"_disable_adapters of .*q_proj was False and is True")
    serves()
    model.merge_adapter()
    refused(r"merged_adapters of .*q_proj was \[\] and is \['default'\]")
    model.unmerge_adapter()
    serves()
    mlp = model.base_model.model.model.layers[1].mlp
    mlp.act_fn, before = nn.ReLU(), mlp.act_fn
    refused(r"act_fn of .*layers.1.mlp is another module \(ReLU in place of SiLUActivation\)")
    mlp.act_fn = before
    hook = mlp.register_forward_hook(lambda module, given, output: 2 * output)
    refused(r"layers.1.mlp has 1 forward hooks, and had 0")
    hook.remove()
    serves()


@LLAMA
def test_what_training_does_to_a_model_leaves_it_the_same() -> None:
    """Modes, checkpointing (which hooks to the embeddings), compilation, generation by the model itself."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    engine, prompt = wrap(model.eval()), text("llama")
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    train(model, "llama")
    model.compile(backend="eager")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(input_ids=torch.tensor([prompt]), use_cache=False)
    model.eval()
    model.gradient_checkpointing_disable()
    model.generate(torch.tensor([prompt]), max_new_tokens=2, do_sample=False)
    assert worst(engine.score([prompt]), [forward(model, prompt)]) <= LOGITS


@LLAMA
def test_weights_of_another_kind_are_not_served() -> None:
    model = build("llama")
    engine, prompt = wrap(model), text("llama")
    before = engine.score([prompt])
    model.to(torch.bfloat16)
    with pytest.raises(regraft.RewriteError) as raised:
        engine.score([prompt])
    name, shape = "model.embed_tokens.weight", [*model.model.embed_tokens.weight.shape]
    assert raised.value.problem == (
        f"{name} was torch.float32 {shape} on cpu when the model was wrapped, and is torch.bfloat16 {shape} on cpu"
    )
    assert "bring it back: model.to('cpu', torch.float32)" in raised.value.fix
    model.to(torch.float32)
    assert worst(engine.score([prompt]), [forward(model, prompt)]) <= LOGITS
    assert 0 < worst(engine.score([prompt]), before) < 1, "rounded on the way"
    narrow = nn.Parameter(model.model.layers[0].mlp.up_proj.weight[:-1])
    model.model.layers[0].mlp.up_proj.weight = narrow
    with pytest.raises(
        regraft.RewriteError, match=r"layers.0.mlp.up_proj.weight was .* when the model"
    ):
        engine.score([prompt])


@pytest.mark.xdist_group("live_weights_xglm")
def test_a_table_that_the_model_makes_longer_is_read_anew() -> None:
    model = build("xglm")
    engine, prompt = wrap(model), text("xglm")
    engine.score([prompt])
    table, count = model.model.embed_positions, len(model.model.embed_positions.weights)
    table.make_weights(2 * count, table.embedding_dim, table.padding_idx)
    assert len(table.weights) == 2 * count
    assert worst(engine.score([prompt]), [forward(model, prompt)]) <= LOGITS


@LLAMA
def test_autocast_is_refused_and_harms_nothing() -> None:
    model = build("llama")
    engine, prompt = wrap(model), text("llama")
    waiting = engine.add_request(prompt, max_new_tokens=3)
    engine.step()
    with torch.autocast("cpu", torch.bfloat16):
        for call in (engine.step, lambda: engine.score([prompt])):
            with pytest.raises(
                regraft.RequestError,
                match=r"under torch.autocast\('cpu'\).*call the engine outside",
            ):
                call()
        with pytest.raises(regraft.RewriteError, match=r"called under torch\.autocast"):
            wrap(model)
    made = run_to_end(engine)[waiting].token_ids
    assert made == continue_greedily(model, prompt, 3)
