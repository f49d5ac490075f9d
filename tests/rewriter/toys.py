"""Toy models that mix tokens in one known way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regraft.rewriter.capture import capture
from regraft.rewriter.graph import CapturedGraph
from regraft.rewriter.pattern import Pass
from regraft.rewriter.pipeline import GraphPass, Rewriting, rewrite

VOCABULARY, HIDDEN = 40, 8

Mix = Callable[[Any, Tensor, Tensor], Tensor]
"""(module with a few weights, hidden [1, T, H], position_ids [1, T]) -> hidden [1, T, H]"""


class Toy(nn.Module):
    """embedding -> `mix` in a module of its own ("mixer") -> linear."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * 0.5, requires_grad=False)

        self.table = weight(VOCABULARY, HIDDEN)
        self.mixer = Mixer(mix, weight)
        self.head = weight(VOCABULARY, HIDDEN)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False
    ) -> SimpleNamespace:
        hidden = F.embedding(input_ids, self.table)
        return SimpleNamespace(logits=F.linear(self.mixer(hidden, position_ids), self.head))


class Mixer(nn.Module):
    def __init__(self, mix: Mix, weight: Callable[..., nn.Parameter]) -> None:
        super().__init__()
        self.mix = mix
        self.square, self.other, self.third = (weight(HIDDEN, HIDDEN) for _ in range(3))
        self.kernel = weight(HIDDEN, 1, 3)
        self.vector = weight(1, HIDDEN)
        self.places = weight(64, HIDDEN)

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        return self.mix(self, hidden, position_ids)


def indices(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)


def causal(x: Tensor) -> Tensor:
    """[T, T], True where the key is not later than the query."""
    return indices(x)[None, :] <= indices(x)[:, None]


def heads_of(x: Tensor, weight: Tensor, count: int) -> Tensor:
    """[1, count, T, H / 2]."""
    width = HIDDEN // 2
    return F.linear(x, weight[: count * width]).view(1, -1, count, width).transpose(1, 2)


def queries_keys_values(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two query heads; the one key and value head is repeated for them."""
    key, value = (heads_of(x, w, 1).repeat_interleave(2, 1) for w in (m.other, m.third))
    return heads_of(x, m.square, 2), key, value


def joined(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).reshape(1, -1, HIDDEN)


# ---- rows only -----------------------------------------------------------------------------------------------------


def rows_only(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return F.silu(F.linear(x, m.square)) * p[..., None].cos()


def merged_view(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return F.rms_norm(x.reshape(-1, 4), (4,)).reshape(1, -1, HIDDEN)


def experts(m: Any, x: Tensor, p: Tensor) -> Tensor:
    """Two of four experts a token, each row's matrices gathered for it."""
    chosen = F.linear(x[0], m.other[:4]).topk(2, -1)
    weights = torch.stack([m.square, m.other, m.third, m.square + m.other])[
        chosen.indices.flatten()
    ]
    out = torch.bmm(weights, x[0].repeat_interleave(2, 0)[..., None])[..., 0]
    return (out.view(-1, 2, HIDDEN) * chosen.values.softmax(-1)[..., None]).sum(1)[None]


# ---- causal: replayed ----------------------------------------------------------------------------------------------


def temperature(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return x * (indices(x) + 2.0).log()[None, :, None]


def learned_places(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return x + m.places[: x.shape[1]]


def running_mean(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return x.cumsum(1) / (indices(x) + 1)[None, :, None]


def shift_right(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return x + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


def first_token(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return x + x[:, :1]


def short_convolution(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return F.conv1d(x.transpose(1, 2), m.kernel, padding=2, groups=HIDDEN)[
        ..., : x.shape[1]
    ].transpose(1, 2)


def late_convolution(m: Any, x: Tensor, p: Tensor) -> Tensor:
    """Needs three tokens to run at all; from the third on, each sees two tokens before it."""
    late = F.conv1d(x.transpose(1, 2), m.kernel, groups=HIDDEN)
    return x + F.pad(late, (2, 0)).transpose(1, 2)


def blocks(m: Any, x: Tensor, p: Tensor) -> Tensor:
    """A running sum in blocks of four, the last one padded."""
    n = x.shape[1]
    padded = F.pad(x, (0, 0, 0, (4 - n % 4) % 4)).unflatten(1, (-1, 4))
    return padded.cumsum(2).flatten(1, 2)[:, :n]


def place_in_expert(m: Any, x: Tensor, p: Tensor) -> Tensor:
    """How many rows went to the same expert before: two rows a token in one dimension."""
    chosen = F.one_hot(F.linear(x, m.square[:4]).topk(2, -1).indices[0].flatten(), 4)
    place = (chosen.cumsum(0) * chosen).sum(-1)
    return x / place.view(1, -1, 2).sum(-1, keepdim=True)


def attention(m: Any, x: Tensor, p: Tensor) -> Tensor:
    query, key, value = queries_keys_values(m, x)
    return joined(F.scaled_dot_product_attention(query, key, value, attn_mask=causal(x)))


def softmax_by_hand(m: Any, x: Tensor, p: Tensor) -> Tensor:
    query, key, value = queries_keys_values(m, x)
    scores = (query @ key.transpose(-1, -2)).masked_fill(~causal(x), torch.finfo(x.dtype).min)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return joined((weights / weights.sum(-1, keepdim=True)) @ value)


def packed_mask(m: Any, x: Tensor, p: Tensor) -> Tensor:
    """Attention within runs of positions, as transformers masks a packed row."""
    query, key, value = queries_keys_values(m, x)
    start = F.pad(p[0].diff(), (1, 0), value=1) != 1
    run = start.cumsum(0)
    mask = (run[None, :] == run[:, None]) & causal(x)
    return joined(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))


def chosen_keys(m: Any, x: Tensor) -> Tensor:
    """[T, T]: an indexer's pick of three earlier tokens for each token."""
    scores = (F.linear(x, m.vector) @ F.linear(x, m.third[:1]).transpose(1, 2))[0]
    scores = scores.masked_fill(~causal(x), float("-inf"))
    picked = scores.topk(min(3, x.shape[1]), -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, picked, True) & causal(x)


def indexed_attention(m: Any, x: Tensor, p: Tensor) -> Tensor:
    query, key, value = queries_keys_values(m, x)
    return joined(F.scaled_dot_product_attention(query, key, value, attn_mask=chosen_keys(m, x)))


def best_earlier_token(m: Any, x: Tensor, p: Tensor) -> Tensor:
    """A choice of one earlier token: an index among tokens that has the shape of rows."""
    scores = (F.linear(x, m.square) @ x.transpose(1, 2))[0] + p.cos()
    best = scores.masked_fill(~causal(x), float("-inf")).argmax(-1)
    return x + x[:, best]


def shared_index(m: Any, x: Tensor, p: Tensor) -> Tensor:
    """Two layers of attention; the second attends to what the first one's indexer chose."""
    x = (
        x + (p[..., None] * m.vector).sin()
    )  # no two rows alike: scores that tie may be picked in any order
    mask = chosen_keys(m, x)
    for _ in range(2):
        query, key, value = queries_keys_values(m, x)
        x = x + joined(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))
    return x


def two_readers(m: Any, x: Tensor, p: Tensor) -> Tensor:
    """Two regions that read the same rows."""
    return torch.cat([shift_right(m, x, p)[..., :4], x.cumsum(1)[..., 4:]], -1)


def two_layers(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return attention(m, F.silu(attention(m, x, p)), p)


def grown_rows(m: Any, x: Tensor, p: Tensor) -> Tensor:
    """A projection of rows that were first copied for every other token."""
    copied = F.linear(x.transpose(0, 1).expand(-1, x.shape[1], -1), m.square)
    return (copied * causal(x)[..., None]).sum(1)[None]


# ---- not causal: stopped by the prefix test ------------------------------------------------------------------------


def length_switch(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return x * torch.where(p.max() > 8, 2.0, 1.0)


def by_length(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return x / x.shape[1]


def mean_of_tokens(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def shift_left(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return x + torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)


def last_token(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return x + x[:, -1:]


def best_tokens(m: Any, x: Tensor, p: Tensor) -> Tensor:
    """A router that picks four tokens for the expert, instead of experts for the token."""
    scores = F.linear(x, m.vector)[..., 0]
    return x * torch.zeros_like(scores).scatter(1, scores.topk(4, 1).indices, 1.0)[..., None]


def expert_load(m: Any, x: Tensor, p: Tensor) -> Tensor:
    expert = F.linear(x, m.square[:4])[0].argmax(-1)
    load = torch.zeros(4).scatter_add(0, expert, torch.ones_like(expert, dtype=x.dtype))
    return x / load[expert][None, :, None]


def open_prefix(m: Any, x: Tensor, p: Tensor) -> Tensor:
    """The first five tokens see each other."""
    query, key, value = queries_keys_values(m, x)
    mask = causal(x) | (indices(x) < 5)[None, :]
    return joined(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))


def open_blocks(m: Any, x: Tensor, p: Tensor) -> Tensor:
    """Tokens of the same sixteen see each other."""
    query, key, value = queries_keys_values(m, x)
    block = indices(x) // 16
    mask = causal(x) | (block[None, :] == block[:, None])
    return joined(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))


# ---- refused by the analysis ---------------------------------------------------------------------------------------


def reverse_sum(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return x.flip(1).cumsum(1).flip(1)


def rolled(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return x + x.roll(1, 1)


def sorted_tokens(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return x.sort(1).values


def sorted_and_back(m: Any, x: Tensor, p: Tensor) -> Tensor:
    order = x[0, :, 0].argsort()
    doubled = x[0][order] * 2
    return torch.zeros_like(doubled).index_put((order,), doubled)[None]


def swapped_view(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return x.reshape(1, HIDDEN, -1).transpose(1, 2) + 0.5


def group_norm(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return F.group_norm(x.transpose(1, 2), 2).transpose(1, 2)


# ---- running them --------------------------------------------------------------------------------------------------


def captured(mix: Mix) -> CapturedGraph:
    return capture(Toy(mix))


def rewritten(mix: Mix, passes: Sequence[Pass | GraphPass] = (), **options: str) -> Rewriting:
    return rewrite(captured(mix), passes, **options)


def text(length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def alone(mix: Mix, ids: Tensor) -> Tensor:
    """The toy itself on one text: ids [n] -> logits [n, vocab]."""
    logits: Tensor = Toy(mix)(ids[None], torch.arange(len(ids))[None]).logits[0]
    return logits
