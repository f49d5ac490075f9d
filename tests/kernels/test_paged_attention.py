from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from regraft.kernels.paged_attention import cpu, naive, paged_attention, spans
from regraft.kernels.paged_attention.naive import paged_attention_naive
from tests.kernels.paged import Case, check, copied, make
from tests.tolerance import assert_close

BATCHES = {
    "decode": Case((1, 1, 1, 1), (0, 3, 11, 20)),
    "prefill": Case((3, 9, 4), (0, 0, 0)),
    "continued": Case((5, 8, 30), (7, 1, 20)),
    "mixed": Case((3, 1, 0, 17, 1), (0, 9, 4, 5, 0), padding=2),
    "empty": Case((0, 0, 2), (1, 0, 5)),
    "nothing": Case((0, 0), (3, 0), padding=1),
    "nobody": Case((), (), padding=2),
}
SCORINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "window 1": {"window": 1},
    "chunk": {"chunk": 6},
    "window in chunk": {"window": 7, "chunk": 9},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "rel_bias": {"reach": 3},
    "all": {"reach": 4, "sinks": True, "window": 6, "softcap": 2.0},
    "alibi in window": {"alibi": True, "window": 6, "softcap": 2.0},
}
HEADS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one to one": {"heads": 3, "kv_heads": 3, "width": 5, "v_width": 5},
    "one for all": {"heads": 5, "kv_heads": 1, "width": 16, "v_width": 16},
    "unequal widths": {"width": 12, "v_width": 7},
}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_naive(batch: str, scoring: str, heads: str) -> None:
    case = replace(BATCHES[batch], **SCORINGS[scoring], **HEADS[heads])
    check(case, paged_attention)
    check(replace(case, consecutive=True), paged_attention)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_equals_naive_in_other_dtypes(scoring: str, dtype: torch.dtype) -> None:
    for batch in BATCHES.values():
        for consecutive in (True, False):
            case = replace(batch, consecutive=consecutive, dtype=dtype, **SCORINGS[scoring])
            check(case, paged_attention)


@pytest.mark.parametrize("limit", [1, 64, 256])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_a_long_prefill_goes_block_by_block(
    scoring: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_SCORES", limit)
    case = Case((70, 33, 1), (0, 9, 40), heads=2, kv_heads=1, page_size=16)
    check(replace(case, **SCORINGS[scoring]), paged_attention)


def dense(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """One fresh sequence's arguments: q [H, T, D], k, v [Hk, T, D]."""
    length = q.shape[1]
    case = Case((length,), (0,), q.shape[0], k.shape[0], q.shape[2], v.shape[2])
    rows = {"q": q.transpose(0, 1), "k": k.transpose(0, 1), "v": v.transpose(0, 1)}
    return make(case) | rows


@pytest.mark.parametrize("form", [paged_attention, paged_attention_naive])
class TestAgainstOthers:
    """The oracle and the operator against functions that are not ours."""

    q, k, v = torch.randn(4, 11, 8), torch.randn(2, 11, 8), torch.randn(2, 11, 8)
    causal = torch.full((11, 11), float("-inf")).triu(1)

    def test_torch(self, form: Any) -> None:
        expected = scaled_dot_product_attention(
            self.q[None], self.k[None], self.v[None], is_causal=True, scale=0.4, enable_gqa=True
        )
        assert_close(form(**dense(self.q, self.k, self.v)), expected[0].transpose(0, 1))

    def eager(self, module: Any, sinks: Tensor | None = None, **options: Any) -> Tensor:
        holder = torch.nn.Module()
        holder.num_key_value_groups = 2
        holder.sinks = sinks
        out, _ = module.eager_attention_forward(
            holder, self.q[None], self.k[None], self.v[None], self.causal, scaling=0.4, **options
        )
        return out[0]

    def test_gemma2s_softcap(self, form: Any) -> None:
        expected = self.eager(modeling_gemma2, softcap=1.3)
        assert_close(form(**dense(self.q, self.k, self.v) | {"softcap": 1.3}), expected)

    def test_gpt_osss_sinks(self, form: Any) -> None:
        sinks = torch.randn(4)
        expected = self.eager(modeling_gpt_oss, sinks)
        assert_close(form(**dense(self.q, self.k, self.v) | {"sinks": sinks}), expected)

    def test_blooms_alibi(self, form: Any) -> None:
        k, v = torch.randn(4, 11, 8), torch.randn(4, 11, 8)
        bias = build_alibi_tensor(torch.ones(1, 11), 4, torch.float32)  # [H, 1, T]
        weights = torch.softmax(bias + 0.4 * self.q @ k.mT + self.causal, -1)
        slopes = bias[:, 0, 1]
        out = form(**dense(self.q, k, v) | {"alibi_slopes": slopes})
        assert_close(out, (weights @ v).transpose(0, 1))


@pytest.mark.parametrize("scoring", SCORINGS)
def test_every_cut_gives_the_whole(scoring: str) -> None:
    length = 23
    whole = make(Case((length,), (0,), **SCORINGS[scoring]))
    expected = paged_attention(**copied(whole))
    for cuts in ([1], [22], [4, 8], [3, 4, 5, 17], list(range(1, length))):
        pieces = copied(whole)
        for start, stop in pairwise([0, *cuts, length]):
            step = pieces | {n: pieces[n][start:stop] for n in ("q", "k", "v", "slot_mapping")}
            if pieces["rel_bias"] is not None:
                step["rel_bias"] = pieces["rel_bias"][start:stop]
            step["cu_seqlens"] = torch.tensor([0, stop - start], dtype=torch.int32)
            step["context_lens"] = torch.tensor([start], dtype=torch.int32)
            assert_close(paged_attention(**step), expected[start:stop])


def test_neighbours_change_nothing() -> None:
    case = Case((4, 1, 6), (3, 9, 0))
    arguments = make(case)
    expected = paged_attention(**copied(arguments))
    spoilt = {n: x.clone() if isinstance(x, Tensor) else x for n, x in arguments.items()}
    for name in ("q", "k", "v"):
        spoilt[name][4:5] = torch.nan
    spoilt["k_cache"][spoilt["block_table"][1].unique()] = torch.nan
    out = paged_attention(**spoilt)
    assert torch.equal(out[:4], expected[:4])
    assert torch.equal(out[5:], expected[5:])
    assert out[4].isnan().all()


def test_metadata_refilled_in_place_is_seen() -> None:
    arguments = make(Case((1, 1), (9, 4)))
    paged_attention(**copied(arguments))
    for name, other in make(Case((1, 1), (6, 2))).items():
        if name in ("cu_seqlens", "context_lens", "slot_mapping"):
            arguments[name].numpy()[:] = other.numpy()  # torch's version counter does not see this
    expected = paged_attention_naive(**copied(arguments))
    assert_close(paged_attention(**copied(arguments)), expected)


MUTANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scale": ({}, {"scale": 0.4 * 1.001}),
    "window one more": ({"window": 5}, {"window": 6}),
    "window one less": ({"window": 5}, {"window": 4}),
    "window off": ({"window": 5}, {"window": 0}),
    "chunk one more": ({"chunk": 6}, {"chunk": 7}),
    "chunk off": ({"chunk": 6}, {"chunk": 0}),
    "softcap off": ({"softcap": 1.5}, {"softcap": 0.0}),
    "softcap": ({"softcap": 1.5}, {"softcap": 1.51}),
    "sinks off": ({"sinks": True}, {"sinks": None}),
    "sinks of other heads": ({"sinks": True}, {"sinks": lambda x: x.roll(1)}),
    "alibi off": ({"alibi": True}, {"alibi_slopes": None}),
    "alibi turned": ({"alibi": True}, {"alibi_slopes": lambda x: -x}),
    "rel_bias off": ({"reach": 3}, {"rel_bias": None}),
    "rel_bias a step late": ({"reach": 3}, {"rel_bias": lambda x: x.roll(1, 2)}),
    "rel_bias cut": ({"reach": 3}, {"rel_bias": lambda x: x[..., :2]}),
    "context one less": ({}, {"context_lens": lambda x: (x - 1).clamp(min=0)}),
    "pages of a neighbour": ({}, {"block_table": lambda x: x.roll(1, 0)}),
    "written a row late": ({}, {"slot_mapping": lambda x: x.roll(1)}),
    "boundaries": ({}, {"cu_seqlens": lambda x: x + (torch.arange(len(x)) == 1).int()}),
    "values as keys": ({}, {"k": lambda x: x.flip(0)}),
}


@pytest.mark.parametrize("batch", ["decode", "mixed"])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_noticed(mutant: str, batch: str) -> None:
    arguments, changes = MUTANTS[mutant]
    case = replace(BATCHES[batch], **arguments)
    with pytest.raises(AssertionError):
        check(case, paged_attention, **changes)


def test_mutant_of_the_code_the_first_key_one_late(monkeypatch: pytest.MonkeyPatch) -> None:
    right = spans.first_key
    monkeypatch.setattr(spans, "first_key", lambda *a: right(*a) + 1)
    with pytest.raises(AssertionError, match="output"):
        check(Case((1, 1), (9, 7), window=4), paged_attention)


def test_mutant_of_the_code_a_mask_without_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_mask", lambda block, distance, scoring: distance >= 0)
    with pytest.raises(AssertionError, match="output"):
        check(Case((9,), (3,), window=4), paged_attention)


def test_mutant_of_the_oracle_the_window_one_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    right = naive.is_attended
    monkeypatch.setattr(
        naive, "is_attended", lambda p, j, window, chunk: right(p, j, window + 1, chunk)
    )
    with pytest.raises(AssertionError, match="output"):
        check(Case((6, 1), (0, 2), window=4), paged_attention)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "k's width": ({"k": lambda x: x[..., :-1]}, r"k: expected shape \[4, 2, 8\], got \[4, 2, 7\]"),
    "k's heads": ({"k": lambda x: x[:, :1]}, r"k: expected shape \[4, 2, 8\], got \[4, 1, 8\]"),
    "v's dtype": ({"v": lambda x: x.half()}, "v: expected torch.float32, got torch.float16"),
    "the cache's dtype": ({"k_cache": lambda x: x.half()}, "k_cache: expected torch.float32"),
    "the cache's pages": ({"v_cache": lambda x: x[1:]}, "v_cache: expected shape"),
    "cu_seqlens": ({"cu_seqlens": lambda x: x[1:]}, r"cu_seqlens: expected shape \[5\]"),
    "table's dtype": ({"block_table": lambda x: x.long()}, "block_table: expected torch.int32"),
    "slots": ({"slot_mapping": lambda x: x.int()}, "slot_mapping: expected torch.int64"),
    "groups": (
        {"q": lambda x: x[:, :5]},
        "5 query heads cannot share 2 key heads evenly",
    ),
    "window": ({"window": -1}, "window=-1, chunk=0 and softcap=0.0 must not be negative"),
    "sinks": ({"sinks": torch.zeros(2)}, r"sinks: expected shape \[6\], got \[2\]"),
    "both": (
        {"sinks": torch.zeros(6), "alibi_slopes": torch.zeros(6)},
        "sinks and alibi_slopes together are not supported",
    ),
    "bias of no width": (
        {"rel_bias": torch.zeros(4, 6, 0)},
        r"rel_bias: expected shape \[4, 6, W > 0\], got \[4, 6, 0\]",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_arguments_that_do_not_fit_are_refused(wrong: str) -> None:
    changes, reason = WRONG[wrong]
    arguments = make(BATCHES["decode"])
    arguments |= {n: x(arguments[n]) if callable(x) else x for n, x in changes.items()}
    with pytest.raises(ValueError, match=reason):
        paged_attention(**arguments)


@pytest.mark.parametrize("scoring", ["plain", "all"])
def test_opcheck(scoring: str) -> None:
    arguments = make(replace(BATCHES["mixed"], **SCORINGS[scoring]))
    torch.library.opcheck(
        torch.ops.regraft.paged_attention.default,
        tuple(
            x.nan_to_num() if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in arguments.values()
        ),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
