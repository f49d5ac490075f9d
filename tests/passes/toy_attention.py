"""A one-layer language model whose attention is a function to plug in: what the tests trace, graft and compare."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

Attend = Callable[..., Tensor]
"""`attend(q, k, v, positions, extra)`: q [1, H, T, D], k and v [1, Hk, T, D] -> [1, H, T, Dv], positions [1, T]."""


class ToyLM(nn.Module):
    """Embedding, one attention, head. `extra` are parameters and buffers that `attend` gets as an attribute bag."""

    def __init__(
        self,
        attend: Attend,
        heads: int = 4,
        kv_heads: int = 2,
        width: int = 8,
        v_width: int = 8,
        vocab: int = 32,
        parameters: dict[str, Tensor] | None = None,
        buffers: dict[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        hidden = heads * width
        self.attend, self.heads, self.kv_heads = attend, heads, kv_heads
        self.embed = nn.Embedding(vocab, hidden)
        self.q_proj = nn.Linear(hidden, heads * width)
        self.k_proj = nn.Linear(hidden, kv_heads * width)
        self.v_proj = nn.Linear(hidden, kv_heads * v_width)
        self.o_proj = nn.Linear(heads * v_width, hidden)
        self.head = nn.Linear(hidden, vocab)
        self.extra = nn.Module()
        for name, value in (parameters or {}).items():
            self.extra.register_parameter(name, nn.Parameter(value))
        for name, value in (buffers or {}).items():
            self.extra.register_buffer(name, value)
        self.eval()

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = False
    ) -> SimpleNamespace:
        x = self.embed(input_ids)
        length = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length)[None]
        q = self.q_proj(x).view(1, length, self.heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(1, length, self.kv_heads, -1).transpose(1, 2)
        v = self.v_proj(x).view(1, length, self.kv_heads, -1).transpose(1, 2)
        mixed = self.attend(q, k, v, position_ids, self.extra)
        mixed = self.o_proj(mixed.transpose(1, 2).reshape(1, length, -1))
        return SimpleNamespace(logits=self.head(x + mixed))


def repeat_kv(x: Tensor, repeats: int) -> Tensor:
    """Each key head for `repeats` neighbouring query heads, materialised."""
    batch, heads, length, width = x.shape
    x = x[:, :, None].expand(batch, heads, repeats, length, width)
    return x.reshape(batch, heads * repeats, length, width)


def causal(length: int) -> Tensor:
    """[length, length] bool."""
    index = torch.arange(length)
    return index[None, :] <= index[:, None]


def eager(
    allow: Callable[[Tensor, Tensor], Tensor] | None = None,
    score: Callable[[Tensor], Tensor] | None = None,
    scale: float | None = None,
) -> Attend:
    """Attention spelled out, over the keys for which `allow(query index, key index)` holds (causal by default)."""

    def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, extra: nn.Module) -> Tensor:
        repeats = q.shape[1] // k.shape[1]
        k, v = repeat_kv(k, repeats), repeat_kv(v, repeats)
        scores = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
        if score is not None:
            scores = score(scores)
        index = torch.arange(q.shape[2])
        mask = (allow or (lambda i, j: j <= i))(index[:, None], index[None, :])
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ v

    return attend
