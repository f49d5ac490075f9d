"""A mixer that nobody has heard of, grafted by a pass of one's own: `python examples/own_pass.py`.

Its layers average everything that was said so far. No pass of Regraft knows that, so it is replayed: exact, but each
step computes the whole text again. The operator below keeps the running sum as a state per request; the pass puts
it in the place of the graph's `cumsum`.
"""

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import regraft
from regraft.rewriter.graph import TOKENS, is_aten, shape_of
from regraft.rewriter.pattern import Declined, Grafting, Pass, Region


class MeanSoFar(nn.Module):
    """The mixer, as its author wrote it: knows nothing of requests."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        count = torch.arange(1, hidden_states.shape[1] + 1, device=hidden_states.device)
        return self.value(hidden_states).cumsum(1) / count[:, None], None


# 1. The operator. Names under "regraft::" promise to keep the sequences of a packed row apart, and are believed.
@torch.library.custom_op("regraft::running_sum", mutates_args=("state",))
def running_sum(
    x: Tensor, state: Tensor, cu_seqlens: Tensor, context_lens: Tensor, state_slots: Tensor
) -> Tensor:
    """x [N, C]; state [slots, C] float32, read and written in place; a sequence without context starts from zero."""
    out = torch.zeros_like(x)
    bounds = cu_seqlens.tolist()
    for start, end, context, slot in zip(bounds, bounds[1:], context_lens, state_slots):
        if end > start:
            before = state[slot] if context > 0 else torch.zeros_like(state[slot])
            sums = before + x[start:end].float().cumsum(0)
            out[start:end], state[slot] = sums, sums[-1]
    return out


@running_sum.register_fake
def _(
    x: Tensor, state: Tensor, cu_seqlens: Tensor, context_lens: Tensor, state_slots: Tensor
) -> Tensor:
    return torch.empty_like(x)


# 2. The pass: find, check, rewrite.
def pattern(region: Region) -> Region | Declined:
    """A cumulative sum ends the region."""
    return region if is_aten(region.closer, "cumsum") else Declined("no cumulative sum")


def check(region: Region) -> Region | Declined:
    """Over the tokens of [1, T, C], and of rows."""
    rows, dim = region.closer.args[:2]
    shape = shape_of(rows)
    if len(shape) != 3 or shape[:2] != (1, TOKENS) or dim % 3 != 1:
        return Declined(f"a sum over dimension {dim} of {shape}", region.closer, 0.5)
    return region if rows in region.inputs else Declined("a sum of what is no row", rows, 0.7)


def rewrite(region: Region, grafting: Grafting) -> None:
    """cumsum(x [1, T, C], 1) -> running_sum(x [T, C], ...)."""
    (rows, _), dtype = region.closer.args[:2], region.closer.meta["dtype"]
    whole = shape_of(rows)
    state = grafting.state_pool("sum", whole[2:], torch.float32)
    names = ("cu_seqlens", "context_lens", "state_slots")
    metadata = [grafting.sequence(name) for name in names]
    flat = grafting.call(torch.ops.aten.squeeze.dim, rows, 0, shape=whole[1:], dtype=dtype)
    operator = torch.ops.regraft.running_sum.default
    sums = grafting.call(operator, flat, state, *metadata, shape=whole[1:], dtype=dtype)
    row = grafting.call(torch.ops.aten.unsqueeze.default, sums, 0, shape=whole, dtype=dtype)
    grafting.replace(region.closer, row)


PASS = Pass("running sum", "running sum", "running_sum", pattern, check, rewrite)


if __name__ == "__main__":
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.model.layers[1].self_attn = MeanSoFar(config)
    print(regraft.wrap(model).report, end="\n\n")
    regraft.register_pass(PASS)
    engine = regraft.wrap(model)
    print(engine.report, end="\n\n")
    print(engine.generate([[5, 17, 3], [99]], max_new_tokens=8))
