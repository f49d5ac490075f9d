"""The recurrent operators' Triton kernels: their cases, and a program that runs them as `paged_triton` does its own.

TRITON_INTERPRET=1 python -m tests.kernels.recurrent_triton [how a name begins]
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.kernels.paged import poisoned_memory
from tests.kernels.triton_process import compiling, is_interpreted, run_cases
from tests.tolerance import assert_close

Arguments = dict[str, Any]
INFINITY = float("inf")


def delta(
    n: int, dtype: torch.dtype, keys: int = 6, width: int = 5, heads: int = 4, key_heads: int = 2,
    l2norm: bool = True, decay: float = 1.0,
) -> Arguments:  # fmt: skip
    # Views into one projection's output, as merged weights make them.
    sizes = [key_heads * keys, key_heads * keys, heads * width]
    q, k, v = (torch.randn(n, sum(sizes)) * 0.5).to(dtype).split(sizes, -1)
    return {
        "q": q.view(n, key_heads, keys),
        "k": k.view(n, key_heads, keys),
        "v": v.view(n, heads, width),
        "g": -decay * torch.rand(n, heads),
        "beta": (2 * torch.rand(n, heads)).to(dtype),
        "state": (heads, keys, width),
        "scale": keys**-0.5,
        "qk_l2norm": l2norm,
    }


def kda(n: int, dtype: torch.dtype, heads: int = 3, **changes: Any) -> Arguments:
    made = delta(n, dtype, heads=heads, key_heads=heads, **changes)
    return made | {"g": -torch.rand(n, heads, made["q"].shape[2])}


def linear(n: int, dtype: torch.dtype, keys: int = 6, width: int = 5, heads: int = 3) -> Arguments:
    q, k = (torch.randn(2, n, heads, keys) * 0.5).to(dtype)
    return {
        "q": q,
        "k": k,
        "v": torch.randn(n, heads, width).to(dtype),
        "decay": -torch.rand(heads),
        "state": (heads, keys, width),
    }


def ssd(
    n: int, dtype: torch.dtype, heads: int = 4, groups: int = 2, width: int = 5, size: int = 6,
    limits: tuple[float, float] = (0.0, INFINITY), skip: int = 1, bias: bool = True, softplus: bool = True,
    spread: float = 1.0,
) -> Arguments:  # fmt: skip
    B, C = (torch.randn(2, n, groups, size) * 0.5).to(dtype)
    dt = spread * torch.randn(n, heads)
    return {
        "x": torch.randn(n, heads, width).to(dtype),
        "dt": (dt if softplus else dt.abs()).to(dtype),
        "A": -torch.rand(heads),
        "B": B,
        "C": C,
        "D": torch.randn(heads, width).select(1, 0) if skip == 1 else torch.randn(heads, width) if skip else None,
        "dt_bias": torch.randn(heads) if bias else None,
        "dt_softplus": softplus,
        "dt_min": limits[0],
        "dt_max": limits[1],
        "state": (heads, width, size),
    }  # fmt: skip


def selective(
    n: int, dtype: torch.dtype, channels: int = 7, size: int = 6, skip: torch.dtype | None = torch.float32,
    gate: bool = True, bias: bool = True, softplus: bool = True,
) -> Arguments:  # fmt: skip
    x, dt, z = torch.randn(3, n, channels).to(dtype)
    B, C = (torch.randn(2, n, size) * 0.5).to(dtype)
    return {
        "x": x,
        "dt": dt if softplus else dt.abs(),
        "A": -torch.rand(channels, size),
        "B": B,
        "C": C,
        "D": None if skip is None else torch.randn(channels).to(skip),
        "z": z if gate else None,
        "dt_bias": torch.randn(channels) if bias else None,
        "dt_softplus": softplus,
        "state": (channels, size),
    }


def conv(
    n: int, dtype: torch.dtype, channels: int = 5, width: int = 4, dilation: int = 1, bias: bool = True,
    activation: str | None = "silu", weight_dtype: torch.dtype | None = None,
) -> Arguments:  # fmt: skip
    weight = torch.randn(channels, width).to(weight_dtype or dtype)
    return {
        "x": torch.randn(n, 2 * channels).to(dtype)[:, :channels],
        "weight": weight,
        "bias": torch.randn(channels).to(weight.dtype) if bias else None,
        "activation": activation,
        "dilation": dilation,
        "conv_state": (channels, (width - 1) * dilation),
    }


def window(
    n: int, dtype: torch.dtype, channels: int = 5, width: int = 4, dilation: int = 1
) -> Arguments:
    return {
        "x": torch.randn(n, channels).to(dtype),
        "width": width,
        "dilation": dilation,
        "conv_state": (channels, (width - 1) * dilation),
    }


OPERATORS: dict[str, tuple[str, Callable[..., Arguments]]] = {
    "gated_delta_rule": ("delta_rule", delta),
    "kda": ("kda", kda),
    "decayed_linear": ("decayed_linear", linear),
    "ssd": ("ssd", ssd),
    "selective_scan": ("selective_scan", selective),
    "causal_conv": ("causal_conv", conv),
    "causal_window": ("causal_conv", window),
}
"""Name -> folder of kernels/, and what makes its arguments for n tokens; a state is given by its shape."""


def operator(name: str) -> Callable[..., Tensor]:
    """The operator as it is registered: whoever imports its folder registers it."""
    importlib.import_module(f"regraft.kernels.{OPERATORS[name][0]}")
    return getattr(torch.ops.regraft, name)


def form(operator: str, kind: str) -> Callable[..., Tensor]:
    """An operator's "naive" or "triton" form."""
    module = importlib.import_module(f"regraft.kernels.{OPERATORS[operator][0]}.{kind}")
    return getattr(module, f"{operator}_{kind}")


PER_TOKEN = ("q", "k", "v", "g", "beta", "x", "dt", "B", "C", "z")


@dataclass(frozen=True)
class Case:
    operator: str
    news: tuple[int, ...]
    contexts: tuple[int, ...]
    padding: int = 0
    """Rows of nobody behind the sequences'."""
    dtype: torch.dtype = torch.float32
    made: Arguments = field(default_factory=dict)
    """For what makes the arguments."""
    scale: float = 1.0
    """On the tolerance, where sums are long."""

    @property
    def options(self) -> Arguments:
        """For the Triton form: rows that are long for these tests are run by chunks."""
        is_delta = self.operator in ("gated_delta_rule", "kda")
        return {"by_chunks": True} if is_delta and self.is_long else {}

    @property
    def is_long(self) -> bool:
        return sum(self.news) > len(self.news) + 32


def make(case: Case, device: str = "cpu", slots: int | None = None) -> Arguments:
    """The operator's arguments. NaN stands in rows of nobody, in slots of nobody, and in those of fresh sequences."""
    count, tokens = len(case.news), sum(case.news)
    arguments = OPERATORS[case.operator][1](tokens + case.padding, case.dtype, **case.made)
    for x in (arguments[n] for n in PER_TOKEN if arguments.get(n) is not None):
        x[tokens:] = torch.nan
    name = state_name(case)
    dtype = case.dtype if name == "conv_state" else torch.float32
    pool = torch.full((slots or count + 3, *arguments[name]), torch.nan, dtype=dtype)
    own = torch.randperm(len(pool))[:count]
    for slot, context in zip(own, case.contexts):
        if context:
            pool[slot] = (torch.randn(pool.shape[1:]) * 0.5).to(dtype)
    arguments |= {
        name: pool,
        "cu_seqlens": torch.tensor([0, *case.news]).cumsum(0).int(),
        "context_lens": torch.tensor(case.contexts, dtype=torch.int32),
        "state_slots": own,
    }
    return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in arguments.items()}


def state_name(case: Case) -> str:
    return "conv_state" if "conv" in OPERATORS[case.operator][0] else "state"


def check(
    case: Case, operator: Callable[..., Tensor] | None = None, device: str = "cpu", **changes: Any
) -> None:
    """The Triton form against the naive one, in output and in what it leaves in every slot.

    `changes` replace arguments of the Triton form alone: a mutant, which the check must notice.
    """
    arguments, name = make(case, device), state_name(case)
    theirs = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in arguments.items()}
    before, theirs[name] = theirs[name].clone(), theirs[name].clone()
    expected = form(case.operator, "naive")(**theirs)
    mine = arguments | {n: x(arguments[n]) if callable(x) else x for n, x in changes.items()}
    with poisoned_memory():
        out = (
            operator(**mine) if operator else form(case.operator, "triton")(**mine, **case.options)
        )
    assert out.dtype == expected.dtype
    assert out.is_contiguous()
    assert_close(out, expected, dtype=case.dtype, scale=case.scale, name="output")
    assert (out[sum(case.news) :] == 0).all(), "rows of nobody"
    new = dict(zip(theirs["state_slots"].tolist(), case.news))
    # A time step is rounded to its dtype, and may come out one place beside; chunks multiply with 16 bits.
    dtype = case.dtype if "dt" in arguments or case.is_long else None
    for slot, (was, now, then) in enumerate(zip(before, arguments[name].cpu(), theirs[name])):
        if new.get(slot):
            assert_close(now, then, dtype=dtype, scale=case.scale, name=f"slot {slot}")
        else:
            assert torch.equal(now.nan_to_num(7.0), was.nan_to_num(7.0)), f"slot {slot} was touched"


DECODE = {"news": (1, 1, 0, 1), "contexts": (3, 0, 5, 0), "padding": 2}
MIXED = {"news": (3, 1, 0, 7, 1, 2), "contexts": (0, 9, 4, 5, 0, 2), "padding": 3}
LONG = {"news": (70, 1, 0, 33, 1, 32, 2), "contexts": (0, 9, 4, 5, 0, 2, 0), "padding": 3}
"""So many that they are run by chunks: full ones, one token more, and a few."""


def _cases(operator: str, variants: dict[str, Arguments]) -> dict[str, Case]:
    cases = {
        f"{operator}, decode": Case(operator, **DECODE),
        f"{operator}, mixed": Case(operator, **MIXED),
        f"{operator}, decode, row of several": Case(operator, (0, 3, 0, 0, 1), (4, 9, 0, 1, 0), 1),
        f"{operator}, nothing": Case(operator, (0, 0), (3, 0), 3),
        f"{operator}, nobody": Case(operator, (), (), 2),
        f"{operator}, long": Case(operator, **LONG, scale=3.0),
        f"{operator}, long, half": Case(operator, **LONG, dtype=torch.float16),
        f"{operator}, half": Case(operator, **MIXED, dtype=torch.float16),
        f"{operator}, bfloat16": Case(operator, **MIXED, dtype=torch.bfloat16),
    }
    for name, made in variants.items():
        cases[f"{operator}, {name}"] = Case(operator, **MIXED, made=made)
        cases[f"{operator}, long, {name}"] = Case(operator, **LONG, made=made, scale=3.0)
    return cases


CASES: dict[str, Case] = {
    **_cases(
        "gated_delta_rule",
        {
            "several tiles": {"keys": 130, "width": 67, "heads": 2, "key_heads": 1},
            "without l2norm": {"l2norm": False},
            "decays that underflow": {"decay": 200.0},
            "wide values": {"keys": 3, "width": 600, "heads": 1, "key_heads": 1},
        },
    ),
    **_cases("kda", {"several tiles": {"keys": 130, "width": 67, "heads": 2}}),
    **_cases("decayed_linear", {"several tiles": {"keys": 130, "width": 67, "heads": 2}}),
    **_cases(
        "ssd",
        {
            "limits": {"limits": (0.4, 0.9)},
            "bare": {"skip": 0, "bias": False, "softplus": False},
            "a skip per channel": {"skip": 2},
            "several tiles": {"width": 70, "size": 130, "heads": 2, "groups": 1},
            "steps from tiny to large": {"spread": 20.0},
        },
    ),
    **_cases(
        "selective_scan",
        {
            "bare": {"skip": None, "gate": False, "bias": False, "softplus": False},
            "several tiles": {"channels": 300, "size": 16},
        },
    ),
    "selective_scan, everything half": Case(
        "selective_scan", **MIXED, dtype=torch.float16, made={"skip": torch.float16}
    ),
    **_cases(
        "causal_conv",
        {
            "bare": {"bias": False, "activation": None},
            "dilated": {"dilation": 3, "width": 3},
            "one tap": {"width": 1},
            "several blocks": {"channels": 300},
            "half weight": {"weight_dtype": torch.float16},
        },
    ),
    "causal_conv, half, float32 weight": Case(
        "causal_conv", **MIXED, dtype=torch.float16, made={"weight_dtype": torch.float32}
    ),
    **_cases("causal_window", {"dilated": {"dilation": 3, "width": 3}, "one tap": {"width": 1}}),
}


def _late(x: Tensor) -> Tensor:
    return x.roll(1, 0)


MUTANTS: dict[str, tuple[str, Arguments]] = {
    "gated_delta_rule, mutant, scale": ("gated_delta_rule, mixed", {"scale": 0.41}),
    "gated_delta_rule, mutant, no norm": ("gated_delta_rule, mixed", {"qk_l2norm": False}),
    "gated_delta_rule, mutant, decay a token late": ("gated_delta_rule, mixed", {"g": _late}),
    "gated_delta_rule, mutant, beta a token late": ("gated_delta_rule, decode", {"beta": _late}),
    "gated_delta_rule, mutant, key heads in turn": (
        "gated_delta_rule, mixed",
        {"k": lambda x: x.flip(1)},
    ),
    "kda, mutant, decay by head": ("kda, mixed", {"g": lambda x: x[..., 0].contiguous()}),
    "decayed_linear, mutant, decays of other heads": ("decayed_linear, mixed", {"decay": _late}),
    "ssd, mutant, no limits": ("ssd, limits", {"dt_min": 0.0, "dt_max": INFINITY}),
    "ssd, mutant, no softplus": ("ssd, mixed", {"dt_softplus": False}),
    "ssd, mutant, no bias": ("ssd, mixed", {"dt_bias": None}),
    "ssd, mutant, no skip": ("ssd, mixed", {"D": None}),
    "ssd, mutant, groups in turn": ("ssd, mixed", {"B": lambda x: x.flip(1)}),
    "selective_scan, mutant, no gate": ("selective_scan, mixed", {"z": None}),
    "selective_scan, mutant, a step late": ("selective_scan, mixed", {"dt": _late}),
    "causal_conv, mutant, no activation": ("causal_conv, mixed", {"activation": None}),
    "causal_conv, mutant, taps turned round": (
        "causal_conv, decode",
        {"weight": lambda x: x.flip(1)},
    ),
}
"""Name -> case, and what the kernel alone is told wrongly."""

for _operator in OPERATORS:
    MUTANTS |= {
        f"{_operator}, mutant, fresh taken for continued": (
            f"{_operator}, mixed", {"context_lens": lambda x: x + 1}
        ),
        f"{_operator}, mutant, continued taken for fresh": (
            f"{_operator}, decode", {"context_lens": torch.zeros_like}
        ),
        f"{_operator}, mutant, slots of others": (f"{_operator}, mixed", {"state_slots": _late}),
        f"{_operator}, mutant, a token less": (
            f"{_operator}, mixed", {"cu_seqlens": lambda x: (x - 1).clamp(min=0)}
        ),
        f"{_operator}, mutant, state not kept": (
            f"{_operator}, mixed", {state_name(CASES[f"{_operator}, mixed"]): lambda x: x.clone()}
        ),
    }  # fmt: skip

_LARGE = {"news": (60, 1), "contexts": (0, 4)}
_DELTA_HEADS = {"keys": 128, "width": 128, "heads": 4}
COMPILED: dict[str, Case] = {
    "delta, bfloat16": Case("gated_delta_rule", **_LARGE, dtype=torch.bfloat16, made=_DELTA_HEADS),
    "delta, float32": Case("gated_delta_rule", **_LARGE, made={"keys": 256, "width": 256}),
    "kda, bfloat16": Case("kda", **_LARGE, dtype=torch.bfloat16, made=_DELTA_HEADS),
    "linear, bfloat16": Case("decayed_linear", **_LARGE, dtype=torch.bfloat16, made=_DELTA_HEADS),
    "ssd, bfloat16": Case("ssd", **_LARGE, dtype=torch.bfloat16, made={"width": 64, "size": 128}),
    "ssd, float16, limits": Case("ssd", **_LARGE, dtype=torch.float16, made={"limits": (0.1, 0.2), "skip": 2}),
    "scan, bfloat16": Case("selective_scan", **_LARGE, dtype=torch.bfloat16, made={"channels": 512, "size": 16}),
    "scan, bare": Case("selective_scan", **_LARGE, made={"skip": None, "gate": False, "bias": False}),
    "conv, bfloat16": Case("causal_conv", **_LARGE, dtype=torch.bfloat16, made={"channels": 512}),
    "conv, decode": Case("causal_conv", (1, 1), (0, 4), dtype=torch.bfloat16, made={"channels": 512}),
    "window": Case("causal_window", **_LARGE, dtype=torch.bfloat16, made={"channels": 512}),
}  # fmt: skip


def run(name: str, device: str) -> None:
    """Check one of `CASES`."""
    check(CASES[name], device=device)


def run_mutant(name: str, device: str) -> None:
    """Check that one of `MUTANTS` is noticed."""
    case, changes = MUTANTS[name]
    try:
        check(CASES[case], device=device, **changes)
    except AssertionError:
        return
    raise AssertionError(f"nothing noticed the mutant {name!r}")


def run_past_2_31_elements(operator: str, device: str) -> None:
    """Slots and rows that start beyond the reach of 32 bits (of memory that is never touched), one operand after the
    other: each takes up to 9 GB of the device's.
    """
    case = Case(operator, (1, 2), (3, 1))
    arguments, name = make(case, device), state_name(case)
    before = arguments[name].clone()
    expected = form(operator, "triton")(**arguments)
    for key in (name, *(n for n in PER_TOKEN if arguments.get(n) is not None)):
        mine = arguments | {name: before.clone()}
        mine[key] = _far_apart(mine[key])
        out = form(operator, "triton")(**mine)
        assert torch.equal(out, expected), key
        assert torch.equal(mine[name].nan_to_num(7.0), arguments[name].nan_to_num(7.0)), key


def _far_apart(x: Tensor) -> Tensor:
    """The same values, with more than 2^31 elements between the first row and the last."""
    step = 2**31 // (len(x) - 1) + 64
    storage = torch.empty(step * (len(x) - 1) + x[0].numel(), dtype=x.dtype, device=x.device)
    return storage.as_strided(x.shape, (step, *x[0].contiguous().stride())).copy_(x)


def run_by_longest(operator: str, device: str) -> None:
    """The delta rule by itself: chunks if one sequence is long, else token by token, decided on the device."""
    delta = importlib.import_module("regraft.kernels.recurrent.triton_delta")
    case = Case(operator, **LONG, scale=3.0)
    results = {}
    for label, long, options in (
        ("chunks", 70, {"by_chunks": True}), ("tokens", 70, {"by_chunks": False}), ("long", 70, {}), ("short", 71, {}),
    ):  # fmt: skip
        torch.manual_seed(0)
        arguments = make(case, device)
        with mock.patch.object(delta, "LONG", long):
            out = form(operator, "triton")(**arguments, **options)
        results[label] = out, arguments["state"].nan_to_num(7.0)
    assert all(map(torch.equal, results["long"], results["chunks"]))
    assert all(map(torch.equal, results["short"], results["tokens"]))
    assert not torch.equal(results["chunks"][0], results["tokens"][0])


KERNELS = {
    "recurrent.triton_delta": ("delta_kernel",),
    "recurrent.triton_delta_chunks": (
        "prepare_by_head_kernel",
        "prepare_by_channel_kernel",
        "walk_kernel",
    ),
    "decayed_linear.triton": ("linear_kernel", "linear_chunk_kernel"),
    "ssd.triton": ("ssd_kernel", "ssd_chunk_kernel"),
    "selective_scan.triton": ("selective_kernel",),
    "causal_conv.triton": ("step_kernel", "tile_kernel", "hand_on_kernel"),
}


def compile_kernels(case: Case) -> None:
    """Compile for Hopper every kernel that the launcher would start."""
    modules = {
        importlib.import_module(f"regraft.kernels.{place}"): names
        for place, names in KERNELS.items()
    }
    with compiling(modules):
        form(case.operator, "triton")(**make(case), **case.options)


def outcomes(interpreted: bool) -> Iterator[tuple[str, Any]]:
    """Everything to run, by name."""
    if not interpreted:
        yield from ((f"compiled: {n}", partial(compile_kernels, c)) for n, c in COMPILED.items())
        return
    yield from ((n, partial(run, n, "cpu")) for n in CASES)
    yield from ((n, partial(run_mutant, n, "cpu")) for n in MUTANTS)
    for operator in ("gated_delta_rule", "kda"):
        yield f"{operator}, by the longest", partial(run_by_longest, operator, "cpu")
    for operator in OPERATORS:
        yield f"{operator}, past 2^31 elements", partial(run_past_2_31_elements, operator, "cpu")


if __name__ == "__main__":
    run_cases(outcomes(is_interpreted()))
