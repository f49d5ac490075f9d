"""Small models that Dynamo traces in a second, for what has nothing to do with a family."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint


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


class WithSegments(ToyLM):
    """Numbers the sequences of a packed row, and reads the numbers behind a graph break."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> SimpleNamespace:
        x = self.embed(input_ids) + self.places(position_ids)
        segments = (position_ids.diff(prepend=position_ids[:, :1]) != 1).cumsum(1)
        torch._dynamo.graph_break()
        mask = (segments[:, :, None] == segments[:, None]).tril()
        return SimpleNamespace(logits=self.head(scaled_dot_product_attention(x, x, x, mask)))


class WithPositionsUnread(ToyLM):
    """Looks at the positions' shape, and not at the positions."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> SimpleNamespace:
        if position_ids.dim() == 3:
            position_ids = position_ids[0]
        x = self.embed(input_ids)
        mixed = scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)
        return SimpleNamespace(logits=self.head(mixed[:, 0]))


class WithSelectedTokens(ToyLM):
    """A shape that depends on values, in the middle of the model: without more ado, Dynamo ends its graph there."""

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        keep = (self.head.weight.sum(0) > -1e9).nonzero()[:, 0]
        return x + mixed.index_select(-1, keep)


class WithDetach(ToyLM):
    """Part of what attention gives has no history."""

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        with torch.no_grad():
            factor = mixed.square().mean(-1, keepdim=True)
        return x * factor + mixed * mixed.detach()


class _Rounded(torch.autograd.Function):
    """A step function whose gradient is made up, and no derivative of anything."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.width = x.shape[-1] + x.shape[1] - x.shape[1]
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1) + grad / ctx.width, None


class WithOwnGradient(ToyLM):
    """A function with a backward of its own."""

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        return x + _Rounded.apply(mixed, 4.0)


class _Pair(torch.autograd.Function):
    """Two results, one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, one: Tensor, two: Tensor) -> Tensor:
        return one + two


class WithPair(ToyLM):
    """A function with a backward of its own, and two results."""

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        one, two = _Pair.apply(mixed)
        return x + one * two


class _Spare(_Pair):
    """The backward reads the gradient of the second result alone."""

    @staticmethod
    def backward(ctx: Any, one: Tensor, two: Tensor) -> Tensor:
        return two * 5


class WithSpare(ToyLM):
    """A function with a backward of its own, of whose two results one is read."""

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        return x + _Spare.apply(mixed)[1]


class _RoundedAndRest(torch.autograd.Function):
    """A result with a backward of its own, and one that has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        rest = x - x.round()
        ctx.mark_non_differentiable(rest)
        return x.round(), rest

    @staticmethod
    def backward(ctx: Any, one: Tensor, two: Tensor) -> Tensor:
        return one * 7


class WithRest(ToyLM):
    """Of the two results, the one with a gradient is read."""

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        return x + _RoundedAndRest.apply(4 * mixed)[0]


class WithUnreadPair(ToyLM):
    """The backward reads the gradient of a result that nobody read."""

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        return x + _Pair.apply(mixed)[0]


class WithSum(ToyLM):
    """Every token reads a sum over all that came before: a mixing that no pass knows."""

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        return mixed + torch.cumsum(x, dim=1).tanh()


class WithTable(ToyLM):
    """Places are looked up by a slice of a table, so that padding on the left counts as places."""

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        return x + mixed + self.places.weight[None, : x.shape[1]].sin()


class WithMean(ToyLM):
    """Every token reads the mean over the whole text, the future too: nothing that a packed row can be cut into."""

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        return mixed + x.mean(1, keepdim=True)


class WithBuffer(ToyLM):
    """The forward counts its calls in a buffer, keeps a sum in another, and reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("total", torch.zeros(16))

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        mixed = mixed * (1 + self.total.tanh() * 0.1)
        self.calls.add_(1)
        self.total[3:7].add_(self.calls)
        mixed = mixed + self.total[5]
        self.total[::2].copy_(self.total[1::2])
        self.total[1] = x.sum()
        self.total[8:].copy_(x.sum((0, 1))[8:])
        return x + mixed * self.calls


class WithLoop(ToyLM):
    """A loop over tokens, unrolled by Dynamo."""

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        rows, state = [], torch.zeros_like(x[:, 0])
        for index in range(x.shape[1]):
            state = 0.5 * state + x[:, index]
            rows.append(state)
        return mixed + torch.stack(rows, 1)


class Recurrence(nn.Module):
    """A state that decays by a learned factor, over the tokens one by one: a loop that Dynamo unrolls."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(-2.0, 2.0, width))
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor, scale: float | None = None) -> tuple[Tensor, None]:
        rows, state = [], torch.zeros_like(x[:, 0])
        for index in range(x.shape[1]):
            state = self.decay.sigmoid() * state + self.inner(x[:, index]).tanh()
            rows.append(state)
        return torch.stack(rows, 1) * (scale or 1.0), None


class WithRecurrence(ToyLM):
    """Two modules with such a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Recurrence(), Recurrence()

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.first(x)[0]
        return mixed + self.second(x, scale=0.5)[0]


class Chosen(nn.Module):
    """A token reads those before it that a gate lets through, found one by one."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for row, place in (self.gate(x)[..., 0] > 0).nonzero().tolist():
            total[row, place:] += x[row, place]
        return total


class WithChosen(ToyLM):
    """Data-dependent control flow in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = Chosen()

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        return mixed + self.chosen(x)


class Remembering(Recurrence):
    """Keeps its last state for itself."""

    last: Tensor | None = None

    def forward(self, x: Tensor, scale: float | None = None) -> tuple[Tensor, None]:
        rows, _ = super().forward(x, scale)
        self.last = rows[:, -1]
        return rows, None


class WithMemory(ToyLM):
    """A module that does more than return a result."""

    def __init__(self) -> None:
        super().__init__()
        self.remembering = Remembering()

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        return mixed + self.remembering(x)[0]


class Jittered(Recurrence):
    """Draws random numbers."""

    def forward(self, x: Tensor, scale: float | None = None) -> tuple[Tensor, None]:
        return super().forward(x + 1e-6 * torch.randn_like(x), scale)


class WithJitter(WithMemory):
    """A module of which no second run gives the same."""

    def __init__(self) -> None:
        super().__init__()
        self.remembering = Jittered()


class WithCheckpoint(ToyLM):
    """A part, with a weight in it and two results, is computed once more for the backward: a graph within the graph."""

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        one, two = checkpoint(self._part, x, mixed, use_reentrant=False)
        return one + checkpoint(torch.tanh, two, use_reentrant=False)

    def _part(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        return x * mixed, self.qkv(x + mixed)[..., : x.shape[-1]]
