"""What examples/kernel_floors.py times: operators at the sizes of published models."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

import regraft.kernels.latent_attention
import regraft.kernels.paged_attention  # noqa: F401 (the two register their operators)

Call = Callable[[], object]

LAYERS_BYTES = 2 << 30
"""A problem has as many layers with states of their own as make up this much: the GPU's cache must not hold them."""


@dataclass
class Problem:
    """Something to time."""

    device: torch.device
    calls: list[Call]
    """The same work on different memory."""
    error: Callable[[], float]
    """Largest difference from the naive twin, relative to the largest value."""
    moved: float
    """Bytes a call reads and writes at least."""
    flops: float = 0.0
    peers: dict[str, Call] = field(default_factory=dict)


def recurrent(
    operator: str, folder: str, make: Callable[..., dict[str, Any]], batch: int, tokens: int,
    device: torch.device, tiny: bool, **options: Any,
) -> Problem:  # fmt: skip
    """`batch` sequences with `tokens` new ones each. A decode moves the states; a prefill its inputs and outputs."""
    if tiny:
        batch, tokens = min(batch, 2), min(tokens, 5)
    naive, fast = (
        getattr(importlib.import_module(f"regraft.kernels.{folder}.{kind}"), f"{operator}_{kind}")
        for kind in ("naive", "triton")
    )
    name = "conv_state" if operator == "causal_conv" else "state"
    with torch.device(device):
        arguments = make(batch * tokens, 8 if tiny else 1)
        dtype = arguments["x"].dtype if operator == "causal_conv" else torch.float32
        shape = (batch + 1, *arguments[name])
        layers = min(64, max(1, LAYERS_BYTES // (4 * math.prod(shape)))) if not tiny else 1
        pools = [torch.randn(shape).to(dtype) for _ in range(layers)]
        arguments |= {
            "cu_seqlens": torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32),
            "context_lens": torch.full((batch,), 7, dtype=torch.int32),
            "state_slots": torch.randperm(batch) + 1,
        }
    calls: list[Call] = [partial(fast, **arguments | {name: pool}, **options) for pool in pools]

    def error() -> float:
        # A clone for each: the timed pools stay as they are.
        mine, theirs = pools[0].clone(), pools[0].clone()
        out = fast(**arguments | {name: mine}, **options)
        expected = naive(**arguments | {name: theirs})
        return max(difference(out, expected), difference(mine[1:], theirs[1:]))

    rows = sum(
        x.nbytes
        for x in arguments.values()
        if isinstance(x, Tensor) and x.dim() > 1 and len(x) == batch * tokens
    )
    out_bytes = arguments[_LIKE_OUT[operator]].nbytes * (2 if operator == "ssd" else 1)
    return Problem(device, calls, error, 2.0 * pools[0][1:].nbytes + rows + out_bytes)  # fmt: skip


_LIKE_OUT = {
    "gated_delta_rule": "v",
    "kda": "v",
    "decayed_linear": "v",
    "ssd": "x",
    "selective_scan": "x",
    "causal_conv": "x",
}


def difference(out: Tensor, expected: Tensor) -> float:
    """Relative to the largest value."""
    return float((out.double() - expected.double()).abs().max() / expected.double().abs().max())


def _delta(n: int, less: int) -> dict[str, Any]:
    heads, keys = 32 // less, 128 // less
    q, k = torch.randn(2, n, heads // 2, keys).bfloat16()
    return {
        "q": q, "k": k, "v": torch.randn(n, heads, keys).bfloat16(),
        "g": logsigmoid(torch.randn(n, heads) + 2), "beta": torch.rand(n, heads).bfloat16(),
        "state": (heads, keys, keys), "scale": keys**-0.5, "qk_l2norm": True,
    }  # fmt: skip


def _kda(n: int, less: int) -> dict[str, Any]:
    heads, keys = 32 // less, 128 // less
    q, k, v = torch.randn(3, n, heads, keys).bfloat16()
    return _delta(n, less) | {
        "q": q,
        "k": k,
        "v": v,
        "g": logsigmoid(torch.randn(n, heads, keys) + 3),
    }


def _linear(n: int, less: int) -> dict[str, Any]:
    heads = 64 // less
    q, k, v = (torch.randn(3, n, heads, 96 // less) * 0.3).bfloat16()
    return {
        "q": q,
        "k": k,
        "v": v,
        "decay": -torch.rand(heads),
        "state": (heads, 96 // less, 96 // less),
    }


def _ssd(n: int, less: int) -> dict[str, Any]:
    heads = 128 // less
    B, C = torch.randn(2, n, 8 // less, 128 // less).bfloat16()
    return {
        "x": torch.randn(n, heads, 64 // less).bfloat16(), "dt": torch.randn(n, heads).bfloat16(),
        "A": -torch.rand(heads), "B": B, "C": C, "D": torch.randn(heads), "dt_bias": torch.randn(heads) - 3,
        "dt_softplus": True, "dt_min": 0.0, "dt_max": math.inf, "state": (heads, 64 // less, 128 // less),
    }  # fmt: skip


def _selective(n: int, less: int) -> dict[str, Any]:
    channels = 8192 // less**2
    x, dt, z = torch.randn(3, n, channels).bfloat16()
    B, C = torch.randn(2, n, 16).bfloat16()
    return {
        "x": x, "dt": dt, "A": -torch.rand(channels, 16), "B": B, "C": C, "D": torch.randn(channels), "z": z,
        "dt_bias": torch.randn(channels) - 3, "dt_softplus": True, "state": (channels, 16),
    }  # fmt: skip


def _conv(n: int, less: int) -> dict[str, Any]:
    channels = 8192 // less**2
    return {
        "x": torch.randn(n, channels).bfloat16(), "weight": torch.randn(channels, 4).bfloat16(), "bias": None,
        "activation": "silu", "dilation": 1, "conv_state": (channels, 3),
    }  # fmt: skip


def paged(
    latent: int, news: int, context: int, batch: int, heads: int, kv_heads: int,
    device: torch.device, tiny: bool,
) -> Problem:  # fmt: skip
    """Paged attention of 128-wide heads, or with `latent` latent attention over rows of 576."""
    if tiny:
        batch, context, news, heads = min(batch, 2), min(context, 40), min(news, 40), heads // 4
        kv_heads = max(1, kv_heads // 4)
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    pages = -(-(context + news) // 16)
    with torch.device(device):
        table = torch.randperm(batch * pages).view(batch, pages).int() + 1
        position = torch.arange(context, context + news)
        slots = (table[:, position // 16].long() * 16 + position % 16).flatten()
        common = {
            "cu_seqlens": torch.arange(0, batch * news + 1, news, dtype=torch.int32),
            "context_lens": torch.full((batch,), context, dtype=torch.int32),
            "block_table": table, "slot_mapping": slots, "scale": 0.07,
        }  # fmt: skip
        shape = (batch * pages + 1, 16)
        if latent:
            return _latent(device, dtype, common, shape, heads, context)
        q = torch.randn(batch * news, heads, 128, dtype=dtype)
        k, v = torch.randn(2, batch * news, kv_heads, 128, dtype=dtype)
        size = 4 * 128 * kv_heads * math.prod(shape)
        layers = max(1, min(8, LAYERS_BYTES // size)) if not tiny else 1
        pools = [torch.randn(2, *shape, kv_heads, 128).to(dtype).unbind() for _ in range(layers)]
    fast = importlib.import_module("regraft.kernels.paged_attention.triton").paged_attention_triton
    arguments = {"q": q, "k": k, "v": v, **common}
    calls: list[Call] = [
        partial(fast, **arguments, k_cache=keys, v_cache=values) for keys, values in pools
    ]
    pairs = news * context + news * (news + 1) / 2
    rows = 4.0 * 128 * kv_heads * (context + news) * batch
    problem = Problem(
        device, calls, lambda: 0.0, rows + 2 * q.nbytes, 4.0 * 128 * heads * batch * pairs
    )
    if news == 1:
        naive = importlib.import_module(
            "regraft.kernels.paged_attention.naive"
        ).paged_attention_naive
        few = first_sequences(arguments, 2)
        keys, values = pools[0]
        problem.error = lambda: difference(
            fast(**few, k_cache=keys, v_cache=values), naive(**few, k_cache=keys, v_cache=values)
        )
        return problem
    _beside_sdpa(problem, q, pools[0], table, context + news, calls[0])
    return problem  # fmt: skip


def first_sequences(arguments: dict[str, Any], count: int) -> dict[str, Any]:
    """Of a batch with one new token each."""
    cut = {"cu_seqlens": count + 1}
    whole = ("scale", "w_k", "w_v", "latent_start", "shared_start")
    return {n: x if n in whole else x[: cut.get(n, count)] for n, x in arguments.items()}


def _beside_sdpa(
    problem: Problem, q: Tensor, pool: tuple[Tensor, Tensor], table: Tensor, total: int, call: Call
) -> None:
    """torch's backends on the same sequence, unpaged; the first that runs is the reference."""
    call()  # the new rows are in their pages now
    keys, values = (x[table[0].long()].flatten(0, 1)[:total].transpose(0, 1)[None] for x in pool)
    query = q.transpose(0, 1)[None].contiguous()
    share = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(share, 1).contiguous() for x in (keys, values))
    length = query.shape[2]
    whole = length == total
    choices: dict[str, Any] = (
        {"is_causal": True} if whole else {"attn_mask": causal_lower_right(length, total)}
    )

    def peer(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, keys, values, scale=0.07, **choices)

    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    if q.device.type == "cpu":
        backends = {"math": SDPBackend.MATH}
    for name, backend in backends.items():
        try:
            expected = peer(backend)
        except RuntimeError as problem_of_backend:
            print(f"{name}: {str(problem_of_backend).splitlines()[0]}")
            continue
        problem.peers[name] = partial(peer, backend)
        problem.error = lambda: difference(call(), expected[0].transpose(0, 1))  # noqa: B023


def _latent(
    device: torch.device, dtype: torch.dtype, common: dict[str, Any], shape: tuple[int, int], heads: int, context: int
) -> Problem:  # fmt: skip
    batch = len(common["context_lens"])
    w_k, w_v = torch.randn(2, heads, 128, 512, dtype=dtype) * 0.04
    arguments = {
        "q": torch.randn(batch, heads, 192, dtype=dtype), "rows": torch.randn(batch, 576, dtype=dtype),
        "w_k": w_k, "w_v": w_v, **common, "latent_start": 0, "shared_start": 128,
    }  # fmt: skip
    size = 2 * 576 * math.prod(shape)
    pools = [
        torch.randn(*shape, 576, dtype=dtype) for _ in range(max(1, min(6, LAYERS_BYTES // size)))
    ]
    operator = torch.ops.regraft.latent_attention
    naive = importlib.import_module("regraft.kernels.latent_attention.naive").latent_attention_naive
    few = first_sequences(arguments, 2)
    used = int(few["block_table"].max()) + 1
    return Problem(
        device,
        [partial(operator, **arguments, cache=pool) for pool in pools],
        lambda: difference(operator(**few, cache=pools[0]), naive(**few, cache=pools[0][:used])),
        2.0 * 576 * batch * (context + 1) + w_k.nbytes + w_v.nbytes,
        2.0 * (576 + 512) * heads * batch * (context + 1) + 4.0 * heads * 128 * 512 * batch,
    )


Builder = Callable[[torch.device, bool], Problem]
PROBLEMS: dict[str, tuple[float, Builder]] = {}
"""Name -> the share of the floor that is wanted (0: none stated), and what builds it."""

for _name, _wanted, _operator, _folder, _make in (
    ("gated delta rule, 32 x 128 x 128", 0.80, "gated_delta_rule", "delta_rule", _delta),
    ("KDA, 32 x 128 x 128", 0.75, "kda", "kda", _kda),
    ("SSD, 128 x 64 x 128", 0.75, "ssd", "ssd", _ssd),
    ("selective scan, 8192 x 16", 0.75, "selective_scan", "selective_scan", _selective),
    ("decayed linear, 64 x 96 x 96", 0.75, "decayed_linear", "decayed_linear", _linear),
    ("causal conv, 8192 x 4", 0.0, "causal_conv", "causal_conv", _conv),
):
    for _batch in (64, 256):
        PROBLEMS[f"decode {_batch}: {_name}"] = (
            _wanted,
            partial(recurrent, _operator, _folder, _make, _batch, 1),
        )
    PROBLEMS[f"prefill 4096: {_name}"] = (
        0.0,
        partial(recurrent, _operator, _folder, _make, 1, 4096),
    )
    PROBLEMS[f"prefill 8 x 512: {_name}"] = (
        0.0,
        partial(recurrent, _operator, _folder, _make, 8, 512),
    )
    if _operator in (
        "gated_delta_rule",
        "kda",
    ):  # which the operator takes for longer sequences only
        PROBLEMS[f"prefill 8 x 512, by chunks: {_name}"] = (
            0.0,
            partial(recurrent, _operator, _folder, _make, 8, 512, by_chunks=True),
        )
PROBLEMS |= {
    "decode 64 behind 4096: paged, 32/8 x 128": (0.85, partial(paged, 0, 1, 4095, 64, 32, 8)),
    "decode 64 behind 4096: latent, 16 x 576": (0.75, partial(paged, 1, 1, 4095, 64, 16, 1)),
    "decode 64 behind 4096: latent, 128 x 576": (0.75, partial(paged, 1, 1, 4095, 64, 128, 1)),
    "prefill 8192: paged, 32/8 x 128": (0.90, partial(paged, 0, 8192, 0, 1, 32, 8)),
    "prefill 1024 behind 7168: paged, 32/8 x 128": (0.90, partial(paged, 0, 1024, 7168, 1, 32, 8)),
}
