"""Random weights that leave nothing in a tiny model without effect.

transformers' own initialisation is made for training: zero biases, unit norms, logits that hardly
depend on the prompt. Here every tensor is drawn again by the first rule that fits it, each from a
generator of its own, keyed by the seed and the tensor's name: neither dtype nor the order of
creation changes a draw.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Gains:
    """Standard deviations, relative to 1/sqrt(fan in) where there is a fan in."""

    gain: float = 1.2
    head_gain: float = 2.0
    tied_std: float = 0.25
    """Of an embedding that is also the head."""
    embed_std: float | None = None
    """Of the input embedding, tied or not, where given."""
    position_std: float = 0.3
    final_norm: float | None = None
    """The last norm's weight, where given (to bring small logits up)."""


@dataclass(frozen=True)
class Slot:
    """One tensor of a model to be drawn."""

    name: str
    tensor: Tensor
    module: nn.Module
    model: PreTrainedModel
    gains: Gains
    generator: torch.Generator

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def kind(self) -> str:
        return type(self.module).__name__.lower()

    @property
    def constructed(self) -> Tensor:
        return self.tensor.detach().float()

    def normal(self, std: float, mean: float = 0.0) -> Tensor:
        return torch.randn(self.tensor.shape, generator=self.generator) * std + mean

    def uniform(self, low: float, high: float) -> Tensor:
        return torch.rand(self.tensor.shape, generator=self.generator) * (high - low) + low

    def jitter(self, std: float = 0.1) -> Tensor:
        """Around what the family starts from: one, or zero for norms that add one."""
        return self.constructed + self.normal(std)

    def fan(self, size: int, gain: float | None = None) -> Tensor:
        return self.normal((self.gains.gain if gain is None else gain) / math.sqrt(max(1, size)))


Draw = Callable[[Slot], "Tensor | None"]


@torch.no_grad()
def randomise(model: PreTrainedModel, gains: Gains, seed: int) -> None:
    """Draw every parameter of `model` again, and the buffers that are weights in all but name."""
    for name, tensor, module in _tensors(model):
        slot = Slot(name, tensor, module, model, gains, _generator(seed, name))
        value = _first_rule(slot)
        if value is not None:
            tensor.copy_(value.to(tensor.dtype))


def keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Do what `from_pretrained` does and `_from_config` does not, for modules kept in float32."""
    kept: set[str] = set()
    for module in model.modules():
        kept.update(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
        if dtype == torch.float16:
            kept.update(getattr(module, "_keep_in_fp32_modules", None) or ())
    if not kept:
        return
    pattern = re.compile("|".join(rf"(?:^|\.){name}(?:$|\.)" for name in sorted(kept)))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if pattern.search(name) and tensor.is_floating_point():
            tensor.data = tensor.data.float()


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor, nn.Module]]:
    seen: set[int] = set()
    for path, module in model.named_modules():
        weights = dict(module.named_parameters(recurse=False))
        weights |= {n: b for n, b in module.named_buffers(recurse=False) if n in WEIGHT_BUFFERS}
        for leaf, tensor in weights.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{path}.{leaf}".lstrip("."), tensor, module


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _first_rule(slot: Slot) -> Tensor | None:
    for rule in (_embedding, _by_name, _norm, _layer):
        drawn, value = rule(slot)
        if drawn:
            return value
    return _other(slot)


# ---- the rules: (whether it fits, the value or None to keep the constructed one)


def _embedding(slot: Slot) -> tuple[bool, Tensor | None]:
    inputs, head = slot.model.get_input_embeddings(), slot.model.get_output_embeddings()
    tied = head is not None and head.weight is inputs.weight
    if slot.tensor is inputs.weight:
        std = slot.gains.tied_std if tied else 1.0
        return True, slot.normal(std if slot.gains.embed_std is None else slot.gains.embed_std)
    if head is not None and slot.tensor is head.weight:
        return True, slot.fan(slot.tensor.shape[-1], slot.gains.head_gain)
    if isinstance(slot.module, nn.Embedding):
        token_table = "ngram" in slot.name or slot.tensor.shape[0] == inputs.weight.shape[0]
        return True, slot.normal(1.0 if token_table else slot.gains.position_std)
    return False, None


def _by_name(slot: Slot) -> tuple[bool, Tensor | None]:
    for pattern, draw in BY_NAME:
        if re.search(pattern, slot.name):
            return True, draw(slot)
    return False, None


def _norm(slot: Slot) -> tuple[bool, Tensor | None]:
    if "norm" not in slot.kind or slot.tensor.ndim != 1:
        return False, None
    if slot.gains.final_norm is not None and slot.name == "model.norm.weight":
        return True, torch.full(slot.tensor.shape, slot.gains.final_norm)
    return True, slot.jitter()


def _layer(slot: Slot) -> tuple[bool, Tensor | None]:
    shape = slot.tensor.shape
    if slot.leaf == "bias":
        return True, slot.normal(0.1)
    if slot.leaf != "weight":
        return False, None
    if slot.kind == "conv1d" and not isinstance(slot.module, nn.Conv1d):  # gpt2's linear, [in, out]
        return True, slot.fan(shape[0])
    if isinstance(slot.module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return True, slot.fan(shape[1:].numel())
    return True, slot.fan(shape[-1])


def _other(slot: Slot) -> Tensor | None:
    """Raw parameters: matrices by fan in, vectors around what the family starts from."""
    shape = slot.tensor.shape
    if slot.tensor.ndim >= 2:
        return slot.fan(shape[-2] if _is_transposed(slot.module) else shape[-1])
    return slot.jitter()


def _is_transposed(module: nn.Module) -> bool:
    """Whether an experts module stores [experts, in, out]."""
    return bool(getattr(module, "is_transposed", False)) or type(module).__name__ in (
        "GptOssExperts",
        "Llama4TextExperts",
    )


def _inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


def _time_step(slot: Slot) -> Tensor:
    """A bias whose softplus is a time step between 0.001 and 0.1."""
    return _inverse_softplus(torch.exp(slot.uniform(math.log(1e-3), math.log(1e-1))))


def _decay(slot: Slot) -> Tensor | None:
    if slot.tensor.ndim >= 2:
        return None  # Mamba-1 counts its states 1, 2, 3, ... in here
    if not slot.constructed.any():
        return slot.normal(0.3)  # a bounded gate starts from zero
    return torch.log(slot.uniform(0.5, 6.0))


def _lru_decay(slot: Slot) -> Tensor:
    """A per-step decay between 0.9 and 0.999."""
    return torch.log(torch.expm1(-0.5 * torch.log(slot.uniform(0.81, 0.998))))


def _balancing(slot: Slot) -> Tensor:
    """The last choice of the router is to skip the layer; keep it the rarer one."""
    value = slot.normal(0.1)
    value[..., -1] -= 1.0
    return value


def _hash_table(slot: Slot) -> Tensor:
    """Distinct experts for every token id."""
    num_tokens, num_choices = slot.tensor.shape
    rows = [
        torch.randperm(slot.module.num_experts, generator=slot.generator)[:num_choices]
        for _ in range(num_tokens)
    ]
    return torch.stack(rows)


WEIGHT_BUFFERS = ("e_score_correction_bias", "expert_bias", "tid2eid", "per_expert_scale", "alpha")

# The first pattern found in a tensor's full name decides. `None` keeps the family's own
# value, which does not depend on chance.
BY_NAME: tuple[tuple[str, Draw], ...] = (
    # routers
    (r"(e_score_correction_bias|expert_bias)$", lambda s: s.normal(0.1)),
    (r"balancing_biases$", _balancing),
    (r"tid2eid$", _hash_table),
    (r"per_expert_scale$", lambda s: s.uniform(0.5, 1.5)),
    # state space models, delta rules
    (r"A_log$", _decay),
    (r"(dt_bias|dt_proj_bias|dt_proj\.bias)$", _time_step),
    (r"dt_proj(\.|_)weight$", lambda s: s.fan(s.tensor.shape[-1], 0.5)),
    (r"\.D$", lambda s: s.normal(0.2, 1.0)),
    # RG-LRU, RWKV, xLSTM
    (r"recurrent_param$", _lru_decay),
    (r"rg_lru\.\w+_gate_weight$", lambda s: s.fan(s.tensor.shape[1])),
    (r"rg_lru\.\w+_gate_bias$", lambda s: s.normal(0.2)),
    (r"time_first$", lambda s: s.normal(0.5)),
    (r"time_(decay|mix\w*)$", lambda s: None),
    (r"igate\w*\.bias$", lambda s: s.normal(0.5, -1.0)),
    (r"fgate\w*\.bias$", lambda s: torch.linspace(2.0, 5.0, s.tensor.shape[-1])),
    (r"[if]gate\w*\.weight$", lambda s: s.fan(s.tensor.shape[-1], 0.5)),
    # attention
    (r"sink", lambda s: s.normal(1.0)),
    (r"position_bias$", lambda s: s.normal(0.5)),
    (r"softmax_scaling.*\.scale$", lambda s: s.uniform(0.1, 0.3)),
    (r"softmax_scaling.*\.bias$", lambda s: s.uniform(0.4, 0.8)),
    (r"rotary\w*\.alpha$", lambda s: s.normal(0.2)),
    (r"\.lambda_[qk]\d$", lambda s: s.normal(0.1)),
    (r"rel\w*\.proj$", lambda s: s.normal(1.0 / math.sqrt(s.tensor.shape[0]))),
    (r"index_kpool_compress_ape$", lambda s: s.normal(0.5)),
    # residual streams
    (r"static_weight$", lambda s: s.normal(0.5)),
    (r"hc\w*[._]base$", lambda s: s.normal(0.5)),
    (r"z_L_init$", lambda s: s.normal(1.0)),
    (r"act_fn\.(alpha_p|alpha_n|beta|eps)$", lambda s: None),  # xIELU
)
