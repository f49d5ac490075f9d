"""What a replayed region keeps, reads and returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regraft.rewriter.declare import PAGED_SEQUENCES
from regraft.rewriter.errors import RewriteError
from regraft.rewriter.graph import TOKENS
from regraft.rewriter.pipeline import Rewriting
from regraft.rewriter.replay import Replay, RowLayout
from regraft.rewriter.token_axis import Axis, analyse, find_regions, regions
from tests.tolerance import assert_close

from . import toys
from .programs import Program
from .serving import PAGE_SIZE, Server, serves
from .toys import HIDDEN, VOCABULARY, alone, rewritten, text

WIDTH = HIDDEN // 2


def kept(state: Rewriting) -> list[tuple[int, ...]]:
    return sorted(row.shape for served in state.served for row in served.rows)


def test_keys_and_values_are_kept_before_heads_repeat() -> None:
    state = rewritten(toys.attention)
    assert kept(state) == [(1, 1, WIDTH), (1, 1, WIDTH), (1, 2, WIDTH)]


def test_cheap_operations_are_repeated_rather_than_kept() -> None:
    """A shift of the embeddings keeps token ids: eight bytes a token instead of thirty-two."""
    (row,) = [row for served in rewritten(toys.shift_right).served for row in served.rows]
    assert (row.shape, row.dtype) == ((1,), torch.int64)


def test_two_regions_that_read_the_same_rows_keep_them_once() -> None:
    state = rewritten(toys.two_readers)
    assert [len(served.rows) for served in state.served] == [1, 0]
    pools = [node for node in state.graph.nodes if node.op == "placeholder" and "row" in node.name]
    assert len(pools) == 1


def test_positions_are_counted_not_kept() -> None:
    state = rewritten(toys.packed_mask)
    assert all(row.dtype.is_floating_point for served in state.served for row in served.rows)
    replay = state.served[0].replay
    assert replay is not None and None in replay.layouts


def test_a_region_without_inputs() -> None:
    state = rewritten(toys.temperature)
    (served,) = state.served
    assert served.rows == [] and served.replay is not None and served.replay.layouts == ()
    serves(state, toys.temperature)


def test_picks_among_tokens_are_never_kept() -> None:
    """Indices of the indexer's top-k mean something only in their own text and length."""
    state = rewritten(toys.indexed_attention)
    assert all(row.dtype.is_floating_point for served in state.served for row in served.rows)


def test_rows_that_grow_with_the_text_are_computed_inside() -> None:
    state = rewritten(toys.grown_rows)
    assert kept(state) == [(1,)]


def test_rows_are_written_where_the_slots_say_and_nowhere_else() -> None:
    state = rewritten(toys.attention)
    server = Server(state, [text(6), text(3, seed=1)], padding=1)
    server.run((6, 3))
    for name, pool in server.pools.items():
        written = ~pool.isnan().flatten(2).any(-1)
        expected = torch.zeros_like(written)
        for i, count in enumerate((6, 3)):
            at = torch.arange(count)
            expected[server.table[i, at // PAGE_SIZE].long(), at % PAGE_SIZE] = True
        expected[0, 0] = True  # the padding token, in the scratch page
        assert torch.equal(written, expected), name


def test_padding_rows_are_zeros() -> None:
    state = rewritten(toys.attention)
    replay = next(m for m in state.captured.module.modules() if isinstance(m, Replay))
    results = []
    replay.register_forward_hook(lambda module, args, result: results.append(result))
    Server(state, [text(5)], padding=3).run([5])
    (result,) = results
    assert result.shape == (1, 2, 8, WIDTH)
    assert (result[:, :, 5:] == 0).all() and (result[:, :, :5] != 0).any()


def test_a_request_without_new_tokens_takes_no_part() -> None:
    """cu_seqlens may repeat: a request that waits in this step."""
    state = rewritten(toys.running_mean)
    server = Server(state, [text(5)])
    inputs = server.inputs([(0, 0, 5)])
    inputs["cu_seqlens"] = torch.tensor([0, 5, 5], dtype=torch.int32)
    inputs["context_lens"] = torch.tensor([0, 3], dtype=torch.int32)
    inputs["block_table"] = inputs["block_table"].repeat(2, 1)
    assert_close(server.forward(inputs), alone(toys.running_mean, text(5)))


def test_neighbours_change_nothing() -> None:
    state = rewritten(toys.attention)
    one = Server(state, [text(9)]).run([4], [5])[0]
    crowd = [text(9), text(30, seed=1), text(2, seed=2)]
    assert_close(Server(state, crowd, padding=4).run((4, 20, 1), (5, 10, 1))[0], one)


def test_replaced_weights_are_read() -> None:
    """Weights stay where the whole graph reads them, so that a new tensor there is seen inside the region too."""
    state = rewritten(toys.shift_right)
    module = state.captured.module
    (name,) = [
        node.target for node in state.graph.nodes if node.op == "get_attr" and "table" in node.name
    ]
    before = Server(state, [text(5)]).run([5])[0]
    setattr(module, name, torch.nn.Parameter(torch.ones(VOCABULARY, HIDDEN), requires_grad=False))
    after = Server(state, [text(5)]).run([5])[0]
    assert not torch.equal(before, after)
    assert torch.equal(after[1], after[2])  # all rows alike


@pytest.mark.parametrize(("outer", "inner"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_rows_and_their_layout(outer: int, inner: int) -> None:
    """Rows taken out of any layout and put back."""
    tokens = 5
    value = torch.arange(4 * outer * tokens * inner * 2).reshape(4, outer * tokens * inner, 2)
    factors = () if outer * inner == 1 else (outer, inner)
    layout = RowLayout(1, (4, *factors, 2), value.dtype, outer=outer, inner=inner)
    rows = layout.rows_first(value)
    assert rows.shape == (tokens, *layout.shape)
    assert torch.equal(layout.rebuild(rows), value)
    for t in range(tokens):
        naive = value.reshape(4, outer, tokens, inner, 2)[:, :, t]
        assert torch.equal(rows[t].reshape(4, outer, inner, 2), naive)
    parts = value.reshape(4, outer, tokens, inner, 2)
    assert torch.equal(layout.rebuild(rows[:3]).reshape(4, outer, 3, inner, 2), parts[:, :, :3])


def test_a_row_must_be_of_one_size() -> None:
    p = Program()
    node = p.graph.call_function(torch.ops.aten.relu.default, (p.ids,))
    node.meta.update(
        shape=(TOKENS, TOKENS), dtype=torch.float32, path="layer", source="model.py:1: x"
    )
    with pytest.raises(
        RewriteError, match=r"a row of this value grows with the text: aten\.relu"
    ) as raised:
        RowLayout.of(node, 0, Axis())
    assert raised.value.path == "layer" and raised.value.source == "model.py:1: x"


# ---- mutants: what a wrong replay does to the comparison with the model alone --------------------------------------


def _forgets_the_history(patch: pytest.MonkeyPatch) -> None:
    history = Replay._history
    patch.setattr(
        Replay, "_history", lambda self, pools, pages, total: history(self, pools, pages * 0, total)
    )


def _keys_of_the_token_before(patch: pytest.MonkeyPatch) -> None:
    run = Replay.run

    def late(self: Replay, rows: list[Any], num_tokens: int) -> Tensor:
        return run(self, [rows[0], *(row.roll(1, 0) for row in rows[1:])], num_tokens)

    patch.setattr(Replay, "run", late)


def _writes_in_the_order_of_the_row(patch: pytest.MonkeyPatch) -> None:
    forward = Replay.forward

    def in_order(self: Replay, *tensors: Tensor) -> Tensor:
        at = 2 * len(self.stored) + PAGED_SEQUENCES.index("slot_mapping")
        slots = torch.arange(len(tensors[at])) + PAGE_SIZE
        return forward(self, *tensors[:at], slots, *tensors[at + 1 :])

    patch.setattr(Replay, "forward", in_order)


@pytest.mark.parametrize(
    "broken", [_forgets_the_history, _keys_of_the_token_before, _writes_in_the_order_of_the_row]
)
def test_a_broken_replay_is_found(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = rewritten(toys.attention)
    broken(monkeypatch)
    with pytest.raises(AssertionError, match="max abs error"):
        serves(state, toys.attention)


def test_picks_would_be_kept_if_their_history_were_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = toys.captured(toys.indexed_attention).graph

    def keeps_whole_numbers() -> bool:
        found = find_regions(analyse(graph))
        return any(
            not node.meta["dtype"].is_floating_point for region in found for node in region.inputs
        )

    assert not keeps_whole_numbers()
    monkeypatch.setattr(
        regions, "_is_stored", lambda node, analysis: analysis.value(node).is_row_local
    )
    assert keeps_whole_numbers()
