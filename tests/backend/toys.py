"""Small models that Dynamo traces in a second, for what has nothing to do with a family."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


class ToyLM(nn.Module):
    """One layer of causal attention over embedded tokens and positions, and a head."""

    def __init__(self, width: int = 16, heads: int = 2, vocab: int = 32, places: int = 64) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocab, width)
        self.places = nn.Embedding(places, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocab)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SimpleNamespace:
        index = torch.arange(input_ids.shape[1])
        positions = index[None] if position_ids is None else position_ids
        x = self.embed(input_ids) + self.places(positions)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        mask = (index[:, None] >= index)[None, None]
        if attention_mask is not None:
            mask = mask & (attention_mask[:, None, None, :] != 0)
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        logits = self.head(self.after(x, mixed.transpose(1, 2).flatten(2)))
        loss = None if labels is None else cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(logits=logits, loss=loss)

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        return x + mixed


class WithBreak(ToyLM):
    """Dynamo cannot trace over `breakpoint-like` calls: two graphs."""

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + mixed


class WithDetach(ToyLM):
    """Part of what attention gives has no history."""

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        with torch.no_grad():
            factor = mixed.square().mean(-1, keepdim=True)
        return x * factor + mixed * mixed.detach()


class WithSum(ToyLM):
    """Every token reads a sum over all that came before: a mixing that no pass knows."""

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        return mixed + torch.cumsum(x, dim=1).tanh()


class WithMean(ToyLM):
    """Every token reads the mean over the whole text, the future too: nothing that a packed row can be cut into."""

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        return mixed + x.mean(1, keepdim=True)


class WithBuffer(ToyLM):
    """The forward counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        self.calls.add_(1)
        return x + mixed


class WithLoop(ToyLM):
    """A loop over tokens, unrolled by Dynamo."""

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        rows, state = [], torch.zeros_like(x[:, 0])
        for index in range(x.shape[1]):
            state = 0.5 * state + x[:, index]
            rows.append(state)
        return mixed + torch.stack(rows, 1)
