"""What every operator with a state per sequence must do, whatever its recurrence: the checks its
tests share.

A test file describes its operator by `Case`s, offers them as the fixture `case`, and inherits
`RecurrentChecks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from tests.tolerance import assert_close

Rows = tuple[torch.Tensor, ...]
Call = Callable[..., torch.Tensor]
"""(rows, state, cu_seqlens, context_lens, state_slots) -> output; updates `state`."""


@dataclass(frozen=True)
class Case:
    """One operator in one configuration: its forms, its inputs, and what the model's own function
    says.
    """

    op: Call
    naive: Call
    leaf: Callable[[Rows], torch.Tensor]
    make_rows: Callable[[int], Rows]
    state_shape: tuple[int, ...]
    lengths: tuple[int, ...]
    """Where the operator's own chunks or windows begin and end, and one to either side."""
    state_dtype: torch.dtype = torch.float32
    precision: torch.dtype | None = None
    """Whose tolerance applies, where something is rounded below the output's dtype on the way."""


@dataclass
class Packed:
    """A packed row of several sequences, and the pool their states are in."""

    rows: Rows
    state: torch.Tensor
    cu_seqlens: torch.Tensor
    context_lens: torch.Tensor
    state_slots: torch.Tensor

    def run(self, call: Call) -> torch.Tensor:
        return call(self.rows, self.state, self.cu_seqlens, self.context_lens, self.state_slots)


def pack(case: Case, lengths: Sequence[int], contexts: Sequence[int], spare: int = 0) -> Packed:
    """Random rows of sequences, `spare` rows of nobody after them; slots of fresh sequences hold
    NaN.
    """
    count = len(lengths)
    slots = torch.randperm(count + 3)[:count]
    state = torch.randn(count + 3, *case.state_shape, dtype=case.state_dtype) * 0.5
    for slot, context in zip(slots, contexts):
        if context == 0:
            state[slot] = torch.nan
    return Packed(
        rows=case.make_rows(sum(lengths) + spare),
        state=state,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        state_slots=slots,
    )


def run_alone(case: Case, rows: Rows, cuts: Sequence[int]) -> torch.Tensor:
    """One sequence from zero, cut at `cuts`, every piece one call; the slot starts as NaN."""
    length = rows[0].shape[0]
    state = torch.full((2, *case.state_shape), torch.nan, dtype=case.state_dtype)
    slot = torch.tensor([1])
    outs = [
        case.op(
            tuple(x[start:stop] for x in rows),
            state,
            torch.tensor([0, stop - start], dtype=torch.int32),
            torch.tensor([start], dtype=torch.int32),
            slot,
        )
        for start, stop in pairwise([0, *cuts, length])
    ]
    assert state[0].isnan().all(), "wrote to a slot that is nobody's"
    return torch.cat(outs)


def check_equals_naive(case: Case) -> None:
    lengths = [1, 0, 2, *case.lengths, 1, 3, 0]
    contexts = [5, 4, 0, *(7 * (i % 2) for i in range(len(case.lengths))), 0, 2, 0]
    for some in ([], [0, 0], [1, 1, 1], [3], lengths):
        packed = pack(case, some, contexts[: len(some)], spare=2)
        before = packed.state.clone()
        expected = packed.run(case.naive)
        expected_state, packed.state = packed.state, before
        out = packed.run(case.op)
        assert out.dtype == expected.dtype
        assert_close(out, expected, dtype=case.precision)
        used = packed.state_slots[packed.cu_seqlens.diff() > 0]
        assert_close(packed.state[used], expected_state[used])


def check_equals_leaf(case: Case) -> None:
    for length in (1, 2, 3, *case.lengths):
        rows = case.make_rows(length)
        expected = case.leaf(rows)
        out = run_alone(case, rows, [])
        assert out.dtype == expected.dtype
        assert_close(out, expected, dtype=case.precision)


def cut_plans(case: Case) -> Iterator[list[int]]:
    """Ways to cut a sequence: at and around every length that matters, in pieces of 1, and at
    random.
    """
    longest = max(case.lengths)
    for length in (1, 2, *case.lengths):
        yield [length]
        yield list(range(length, longest + length, length)) if length > 8 else [length, length + 1]
    yield list(range(1, longest))
    yield sorted(torch.randperm(longest)[:7].add(1).tolist())


def check_every_split(case: Case) -> None:
    for cuts in cut_plans(case):
        rows = case.make_rows(cuts[-1] + 5)
        whole = run_alone(case, rows, [])
        assert_close(run_alone(case, rows, cuts), whole, dtype=case.precision)


def check_gradients(
    case: Case, reference: Callable[..., tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Of `reference(rows, initial_state, offsets)`: the same by chunks as token by token."""
    length = max(case.lengths)
    packed = pack(case, [length, 1], [2, 3])
    leaves = [x.requires_grad_() for x in (*packed.rows, packed.state)]
    starts = packed.state[packed.state_slots]
    out, final = reference(packed.rows, starts, packed.cu_seqlens.tolist())
    weights = torch.randn_like(out), torch.randn_like(final)
    whole = torch.autograd.grad([out, final], leaves, grad_outputs=weights)
    outs, (current, last) = [], packed.state[packed.state_slots].split(1)
    for token in range(length):
        row, current = reference(tuple(x[token : token + 1] for x in packed.rows), current, [0, 1])
        outs.append(row)
    row, last = reference(tuple(x[length:] for x in packed.rows), last, [0, 1])
    steps = torch.autograd.grad(
        [torch.cat([*outs, row]), torch.cat([current, last])], leaves, grad_outputs=weights
    )
    for name, a, b in zip("abcdefgh", whole, steps):
        assert a.abs().max() > 0, f"no gradient reaches input {name}"
        assert_close(a / a.abs().max(), b / a.abs().max())


def check_operator(op: Callable[..., torch.Tensor], *arguments: object) -> None:
    """`torch.library.opcheck`: mutation, aliasing and the fake are as declared."""
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, arguments, test_utils=checks)


def metadata(packed: Packed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return packed.cu_seqlens, packed.context_lens, packed.state_slots


class RecurrentChecks:
    """Inherit with a fixture `case` and the module of the operator's torch form."""

    module: ModuleType

    def test_equals_naive_in_a_ragged_batch(self, case: Case) -> None:
        check_equals_naive(case)

    def test_equals_the_models_own_function(self, case: Case) -> None:
        check_equals_leaf(case)

    def test_every_split_gives_the_whole(self, case: Case) -> None:
        check_every_split(case)

    def test_decode_follows_prefill(self, case: Case) -> None:
        length = max(case.lengths)
        rows = case.make_rows(length + 6)
        cuts = list(range(length, length + 6))
        assert_close(run_alone(case, rows, cuts), case.leaf(rows), dtype=case.precision)

    def test_a_sequence_without_new_tokens_keeps_its_state(self, case: Case) -> None:
        packed = pack(case, [0, 2, 0, 1], [3, 0, 0, 4])
        before = packed.state.clone()
        packed.run(case.op)
        idle = packed.state_slots[[0, 2]]
        torch.testing.assert_close(packed.state[idle], before[idle], rtol=0, atol=0, equal_nan=True)

    def test_slots_of_nobody_are_left_alone(self, case: Case) -> None:
        packed = pack(case, [2, 1, max(case.lengths)], [1, 0, 2])
        before = packed.state.clone()
        packed.run(case.op)
        others = [s for s in range(len(before)) if s not in packed.state_slots.tolist()]
        assert torch.equal(packed.state[others], before[others])

    @pytest.mark.parametrize("lengths", [[2, 70, 5], [1, 1, 1], [1, 33, 1]])
    def test_a_neighbour_full_of_nan_changes_nothing(self, case: Case, lengths: list[int]) -> None:
        clean = pack(case, lengths, [3, 0, 2])
        start, stop = clean.cu_seqlens[1:3].tolist()
        spoilt = Packed(
            tuple(x.clone() for x in clean.rows),
            clean.state.clone(),
            clean.cu_seqlens,
            clean.context_lens,
            clean.state_slots,
        )
        for row in spoilt.rows:
            row[start:stop] = torch.nan
        expected, out = clean.run(case.op), spoilt.run(case.op)
        kept = [*range(start), *range(stop, len(out))]
        assert out[kept].isfinite().all()
        assert torch.equal(out[kept], expected[kept])
        mine = clean.state_slots[[0, 2]]
        assert torch.equal(spoilt.state[mine], clean.state[mine])

    def test_rows_of_no_sequence_are_zero(self, case: Case) -> None:
        for lengths in ([1, 1], [4, 1, 9], [0, 0]):
            packed = pack(case, lengths, [2] * len(lengths), spare=3)
            for row in packed.rows:
                row[-3:] = torch.nan
            out = packed.run(case.op)
            assert out.isfinite().all()
            assert (out[-3:] == 0).all()

    def test_inputs_need_not_be_contiguous(self, case: Case) -> None:
        packed = pack(case, [3, 1, 5], [0, 2, 1])
        state = packed.state.clone()
        expected = packed.run(case.op)
        packed.rows = tuple(x.mT.contiguous().mT if x.dim() > 1 else x for x in packed.rows)
        packed.state = state
        assert_close(packed.run(case.op), expected, dtype=case.precision)

    def test_mutant_a_fresh_state_is_not_reset(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(self.module, "initial_states", lambda pool, slots, _: pool[slots])
        with pytest.raises(AssertionError):
            check_equals_naive(case)

    def test_mutant_a_continued_state_is_reset(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            self.module, "initial_states", lambda pool, slots, _: torch.zeros_like(pool[slots])
        )
        with pytest.raises(AssertionError):
            check_every_split(case)

    def test_mutant_the_state_is_not_stored(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(self.module, "store_states", lambda *_: None)
        with pytest.raises(AssertionError):
            check_equals_naive(case)
