"""The driver: passes in order, what is left replayed or refused, and a proof of the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regraft.rewriter.errors import RewriteError
from regraft.rewriter.graph import CapturedGraph, is_aten
from regraft.rewriter.pattern import Declined, Grafting, Pass, Region
from regraft.rewriter.pipeline import GraphPass, rewrite
from tests.tolerance import assert_close

from . import toys
from .serving import Server, serves
from .toys import alone, captured, rewritten, text

aten = torch.ops.aten


@torch.library.custom_op("regraft::toy_running_sum", mutates_args=())
def running_sum(rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """cumsum of [1, N, H] within each request; no cache, so only for whole texts."""
    pieces = [
        rows[:, a:b].cumsum(1) for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist())
    ]
    return torch.cat([*pieces, rows[:, int(cu_seqlens[-1]) :]], 1)


def pattern(region: Region) -> Region | Declined:
    if not is_aten(region.closer, "cumsum"):
        return Declined("no running sum", region.closer, progress=0.3)
    return region


def graft(region: Region, grafting: Grafting) -> None:
    source = grafting.region.closer.args[0]
    source = source if source in grafting.region.inputs else grafting.region.inputs[0]
    node = grafting.call(
        torch.ops.regraft.toy_running_sum.default, source, grafting.sequence("cu_seqlens"),
        shape=region.closer.meta["shape"], dtype=region.closer.meta["dtype"],
    )  # fmt: skip
    grafting.replace(grafting.region.closer, node)
    grafting.notes.append("summed")


def a_pass(**parts: Any) -> Pass:
    defaults = {"pattern": pattern, "check": lambda region: region, "rewrite": graft}
    return Pass("sums", "running sum", "regraft::toy_running_sum", **{**defaults, **parts})


def two_sums(m: Any, x: Tensor, p: Tensor) -> Tensor:
    return x.cumsum(1).tanh().cumsum(1)


def directly_again(m: Any, x: Tensor, p: Tensor) -> Tensor:
    """The second sum reads the first one's result itself."""
    return x.cumsum(1).cumsum(1)


@pytest.mark.parametrize("mix", [two_sums, directly_again])
def test_a_pass_grafts_every_match(mix: toys.Mix) -> None:
    state = rewritten(mix, [a_pass()])
    assert [(s.served, s.operator, s.notes) for s in state.served] == [
        ("grafted", "regraft::toy_running_sum", ["summed"])
    ] * 2
    assert not any(is_aten(node, "cumsum") for node in state.graph.nodes)
    (run,) = state.runs
    assert (run.name, run.matches, run.declined) == ("sums", 2, [])
    assert state.proof is not None and state.proof.proven
    assert "nothing mixes" in str(state.proof)
    texts = [text(9), text(4, seed=1)]
    for got, ids in zip(Server(state, texts, padding=2).run((9, 4)), texts, strict=True):
        assert_close(got, alone(mix, ids))


def test_what_a_pass_declines_is_replayed_with_its_reason() -> None:
    state = rewritten(toys.shift_right, [a_pass()])
    (served,) = state.served
    assert (served.served, served.operator) == ("replayed", "replay")
    assert served.reason.startswith("sums: no running sum (aten.cat.default in mixer at toys.py:")
    ((region, declined),) = state.runs[0].declined
    assert region.closer is served.region.closer and declined.progress == 0.3


def test_the_nearest_miss_is_the_reason() -> None:
    def declines(reason: str, progress: float) -> Pass:
        return a_pass(pattern=lambda region: Declined(reason, progress=progress))

    passes = [declines("far", 0.1), declines("near", 0.8), declines("not at all", 0.0)]
    assert rewritten(toys.shift_right, passes).served[0].reason == "sums: near"
    assert rewritten(toys.shift_right, passes[2:]).served[0].reason == "no pass knows this mixing"


def test_a_declined_check_leaves_the_graph_alone() -> None:
    state = rewritten(two_sums, [a_pass(check=lambda region: Declined("not today", progress=0.9))])
    assert {served.reason for served in state.served} == {"sums: not today"}


def test_refuse_names_the_place_and_the_way_out() -> None:
    with pytest.raises(RewriteError) as raised:
        rewritten(toys.shift_right, [a_pass()], fallback="refuse")
    error = raised.value
    why = "sums: no running sum (aten.cat.default in mixer at toys.py:"
    assert error.problem.startswith(f"no pass takes this mixing ({why}")
    assert error.operation == "aten.cat.default"
    assert error.path == "mixer"
    assert error.source.startswith("toys.py:")
    assert error.fix == 'allow fallback="replay" (exact, slow)'


def test_refuse_accepts_what_is_grafted_whole() -> None:
    assert {s.served for s in rewritten(two_sums, [a_pass()], fallback="refuse").served} == {
        "grafted"
    }


def test_a_pass_that_leaves_its_closer_in_use_is_caught() -> None:
    with pytest.raises(AssertionError, match="pass sums left cumsum in use"):
        rewritten(two_sums, [a_pass(rewrite=lambda region, grafting: None)])


def _reverse(captured: CapturedGraph) -> int:
    """A pass that spoils the graph: it reads the tokens backwards."""
    node = captured.logits
    output = captured.graph.output_node()
    with captured.graph.inserting_after(node):
        flipped = captured.graph.call_function(aten.flip.default, (node, [1]))
    flipped.meta.update({**node.meta, "path": "spoiled", "source": ""})
    output.args = ((flipped,),)
    return 1


def test_the_proof_is_about_the_graph_after_the_passes() -> None:
    good = rewrite(captured(toys.rows_only), [])
    assert good.proof is not None and good.proof.proven and good.served == []
    with pytest.raises(
        RewriteError, match=r"not proven: flip over tokens: aten\.flip\.default in spoiled"
    ):
        rewrite(captured(toys.rows_only), [GraphPass("spoil", _reverse)])


def test_an_operator_that_is_handed_mixed_rows_is_not_proven() -> None:
    def mix(m: Any, x: Tensor, p: Tensor) -> Tensor:
        return x.flip(1).cumsum(1)

    with pytest.raises(RewriteError, match="not proven: flip over tokens"):
        rewritten(mix, [a_pass()])


def test_plain_operations_must_not_read_caches() -> None:
    def peeks(region: Region, grafting: Grafting) -> None:
        shape, dtype = region.closer.meta["shape"], region.closer.meta["dtype"]
        pool = grafting.row_pool("x", (toys.HIDDEN,), dtype)
        first = grafting.call(aten.select.int, pool, 0, 0, shape=(4, toys.HIDDEN), dtype=dtype)
        one = grafting.call(aten.select.int, first, 0, 0, shape=(toys.HIDDEN,), dtype=dtype)
        added = grafting.call(
            aten.add.Tensor, grafting.region.inputs[0], one, shape=shape, dtype=dtype
        )
        grafting.replace(grafting.region.closer, added)

    with pytest.raises(RewriteError, match="mixed in a way that cannot be undone"):
        rewritten(toys.running_mean, [a_pass(rewrite=peeks)])


def test_replay_serves_a_chain_of_regions() -> None:
    state = rewritten(directly_again)
    assert [served.operator for served in state.served] == ["replay", "replay"]
    serves(state, directly_again)
