"""How a module scores blocks of tokens for a query: what is the query, what the blocks' keys, what is made of both.

Looked at is the last query of texts of two and of three blocks and that query's own token. What changes with its row
alone is the query, what changes with the blocks' rows alone their keys, and what comes of both is measured to be

    score[b] = scale * sum_i weights[i] * f(query[i] . key[b])                      f the identity or relu

The calls that make the keys become a program of any number of blocks: what differs between the two texts counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from regraft.rewriter.leaf_shapes import Affine
from regraft.rewriter.leaves import LeafUnsupported

from .block_leaf import Leaf, sizes
from .block_program import Places, Program, Record, Step, Value, sliced

COUNTS = (2, 3)
"""Blocks of the two texts."""

CHANGES = 3
"""How often rows are changed to see what depends on them: behind a relu, one change may not be seen."""

ROUNDING = 1e-5
"""Largest difference of scores to the formula, as a part of the largest."""


class Look:
    """Runs over `blocks` blocks and a query after them, with rows changed here and there."""

    def __init__(self, leaf: Leaf, size: int, blocks: int) -> None:
        self.blocks, self.tokens = blocks, blocks * size
        self.base = self._record(leaf, slice(0), 0)
        seeds = range(1, CHANGES + 1)
        self.of_query = [self._record(leaf, slice(self.tokens, None), seed) for seed in seeds]
        self.of_blocks = [self._record(leaf, slice(self.tokens), seed) for seed in seeds]
        self.of_first = [self._record(leaf, slice(size), 1)]
        functions = [call.function for call in self.base.calls]
        for other in (*self.of_query, *self.of_blocks, *self.of_first):
            if [call.function for call in other.calls] != functions:
                raise LeafUnsupported(f"{leaf.call.path} does other things with other rows")

    def _record(self, leaf: Leaf, changed: slice, seed: int) -> Record:
        rows = leaf.rows(self.tokens + 1, 0)
        for i, other in leaf.rows(self.tokens + 1, seed).items():
            rows[i][:, changed] = other[:, changed]
        return Record(leaf, leaf.given(rows))

    def on(self, value: Value) -> tuple[bool, bool]:
        """Whether a value depends on the query's row, and on the blocks' rows."""
        return self._differs(value, self.of_query), self._differs(value, self.of_blocks)

    def _differs(self, value: Value, others: list[Record]) -> bool:
        return any(not torch.equal(self.base[value], other[value]) for other in others)

    def token_dim(self, value: Value) -> int | None:
        """The dimension of a value's tokens: of its entries only the last is the query's."""
        return self._only(value, self.of_query, self.tokens + 1, self.tokens)

    def block_dim(self, value: Value) -> int | None:
        """The dimension of a value's blocks."""
        return self._only(value, self.of_first, self.blocks, 0)

    def _only(self, value: Value, others: list[Record], size: int, index: int) -> int | None:
        base = self.base[value]
        changed = torch.stack([base != other[value] for other in others]).any(0)
        for dim in range(base.dim()):
            if base.shape[dim] == size:
                entries = changed.movedim(dim, 0).reshape(size, -1).any(1)
                if entries.nonzero().flatten().tolist() == [index]:
                    return dim
        return None


@dataclass(frozen=True)
class Rows:
    """A value with something for every token. `dim` is that of the tokens, `shape` the others'."""

    value: Value
    dim: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Numbers a token."""
        return torch.Size(self.shape).numel()

    def flat(self, whole: Tensor) -> Tensor:
        """The value -> [T, width]."""
        return whole.movedim(self.dim, 0).reshape(-1, self.width)

    def whole(self, flat: Tensor) -> Tensor:
        """[T, width] -> the value."""
        return flat.reshape(-1, *self.shape).movedim(0, self.dim)


@dataclass(frozen=True)
class Blocks:
    """Of blocks of `size` tokens the `count` best are selected, scored as the head of this file says.

    The query is [heads, width] a token, weights [heads]. `key` makes keys of the sources' rows, with the blocks in
    dimension `key_dim`. Values are numbered by the calls of `functions`.
    """

    size: int
    count: int
    query: Rows
    weights: Rows | None
    key: Program
    key_dim: int
    key_width: int
    key_dtype: torch.dtype
    sources: tuple[Rows, ...]
    scale: float
    relu: bool
    functions: tuple[Callable[..., Any], ...]

    @property
    def heads(self) -> int:
        """Index heads."""
        return self.query.width // self.key_width

    @property
    def computed(self) -> tuple[Rows, ...]:
        """What the module computes of every token: all rows but its arguments."""
        used = (self.query, *([self.weights] if self.weights else []), *self.sources)
        return tuple(dict.fromkeys(rows for rows in used if rows.value.call >= 0))

    def keys(self, module: nn.Module, rows: Mapping[Value, Tensor], blocks: Any) -> Tensor:
        """The sources' rows [N * size, width] of N blocks -> [N, key_width]."""
        known = {source.value: source.whole(rows[source.value]) for source in self.sources}
        keys = self.key.run(module, known, blocks)
        return keys.movedim(self.key_dim, 0).reshape(-1, self.key_width)


def read_blocks(leaf: Leaf) -> Blocks:
    """Raises LeafUnsupported for a module that is not as the head of this file says."""
    size, count = sizes(leaf)
    if size < 2:
        raise LeafUnsupported(f"{leaf.call.path} selects single tokens")
    few, many = (Look(leaf, size, n) for n in COUNTS)
    scores = many.base.scores
    queries, keys = _parts(many, scores)
    if len(keys) != 1:
        raise LeafUnsupported(f"scores are made of {len(keys)} values of the blocks")
    key = _as_made(many, keys[0], lambda value: _by_block(many, value))
    found = _by_block(many, key)
    if found is None:
        raise LeafUnsupported("what scores read of the blocks is no key of each")
    # the weights of heads are fewer than their queries
    rows = sorted((_query_rows(many, value) for value in queries), key=lambda row: -row.width)
    width, widths = found.shape[1], [row.width for row in rows]
    heads = widths[0] // width if widths else 0
    if widths not in ([width * heads], [width * heads, heads]):
        raise LeafUnsupported(f"scores are made of {widths} numbers of the query, keys of {width}")
    scale, relu = _fit(leaf, many, scores, rows, key)
    program = _any_number(few, many, key)
    read = {value for step in program.steps for value in step.arguments if isinstance(value, Value)}
    sources = tuple(
        _rows(many, value) for value in sorted(read, key=lambda v: (v.call, v.output))
        if value.call <= many.base.rowwise
    )  # fmt: skip
    block_dim = many.block_dim(key)
    assert block_dim is not None
    return Blocks(
        size, count, rows[0], rows[1] if len(rows) > 1 else None, program, block_dim, width, found.dtype, sources,
        scale, relu, tuple(call.function for call in many.base.calls),
    )  # fmt: skip


def _parts(look: Look, scores: Value) -> tuple[list[Value], list[Value]]:
    """The last values on the way to the scores that depend on the query alone, and those of the blocks alone."""
    pending, seen = [scores], {scores}
    queries: list[Value] = []
    keys: list[Value] = []
    while pending:
        value = pending.pop()
        on_query, on_blocks = look.on(value)
        if on_query and on_blocks:
            if value.call <= look.base.rowwise:
                raise LeafUnsupported("scores read the rows of every token")
            pending += [v for v in look.base.calls[value.call].values if v not in seen]
            seen.update(pending)
        elif on_query:
            queries.append(value)
        elif on_blocks:
            keys.append(value)
    return queries, keys


def _by_block(look: Look, value: Value) -> Tensor | None:
    """[blocks, width] of a value that has something for each block."""
    dim = look.block_dim(value)
    return None if dim is None else look.base[value].movedim(dim, 0).reshape(look.blocks, -1)


def _by_query(look: Look, value: Value) -> Tensor:
    """What a value has for the query."""
    dim = look.token_dim(value)
    whole = look.base[value]
    return (whole if dim is None else whole.select(dim, look.tokens)).flatten()


def _as_made(look: Look, value: Value, numbers: Callable[[Value], Tensor | None]) -> Value:
    """The earliest value of the same `numbers`, of which this one is another layout, or a cast that loses nothing."""
    while value.call > look.base.rowwise:
        sources = [v for v in look.base.calls[value.call].values if any(look.on(v))]
        now, before = numbers(value), numbers(sources[0]) if len(sources) == 1 else None
        if now is None or before is None or now.shape != before.shape:
            break
        now, before = now.sort(-1).values, before.sort(-1).values
        if not torch.equal(before.to(now.dtype), now) or not torch.equal(
            now.to(before.dtype), before
        ):
            break
        value = sources[0]
    return value


def _query_rows(look: Look, value: Value) -> Rows:
    value = _as_made(look, value, lambda v: _by_query(look, v))
    if value.call > look.base.rowwise:
        raise LeafUnsupported("what scores read of the query is computed for it alone")
    return _rows(look, value)


def _rows(look: Look, value: Value) -> Rows:
    dim = look.token_dim(value)
    if dim is None:
        raise LeafUnsupported("keys are made of what is not one row per token")
    whole = look.base[value]
    return Rows(value, dim, (*whole.shape[:dim], *whole.shape[dim + 1 :]), whole.dtype)


def _fit(leaf: Leaf, look: Look, scores: Value, rows: list[Rows], key: Value) -> tuple[float, bool]:
    """(scale, relu) with which the scores of random queries and keys are those of the formula."""
    record, dim = look.base, look.block_dim(key)
    assert dim is not None
    program = _as_recorded(record, scores, key)
    known = {v: record[v] for step in program.steps for v in step.arguments if isinstance(v, Value)}
    random = torch.Generator().manual_seed(0)
    found: list[Tensor] = []
    formulas: dict[bool, list[Tensor]] = {True: [], False: []}
    for _ in range(CHANGES):
        for value in (*(row.value for row in rows), key):
            drawn = torch.randn(record[value].shape, generator=random)
            known[value] = drawn.to(record[value])
        found.append(program.run(leaf.call.module, known, look.blocks).flatten().double())
        keys = known[key].movedim(dim, 0).reshape(look.blocks, -1).double()
        query, *weights = (row.flat(known[row.value])[look.tokens].double() for row in rows)
        products = query.view(-1, keys.shape[1]) @ keys.t()
        for relu, formula in formulas.items():
            each = products.relu() if relu else products
            formula.append((weights[0] @ each) if weights else each.sum(0))
    actual = torch.cat(found)
    for relu, formula in formulas.items():
        expected = torch.cat(formula)
        if expected.shape == actual.shape and bool(expected.any()):
            largest = expected.abs().argmax()
            scale = float(actual[largest] / expected[largest])
            off = (actual - scale * expected).abs().max() / actual.abs().max()
            if scale > 0 and float(off) <= ROUNDING:
                return scale, relu
    raise LeafUnsupported("scores are no scaled sum of products of queries and keys, nor of relu")


def _as_recorded(record: Record, scores: Value, key: Value) -> Program:
    """What makes the scores of the key and of what is computed of every token."""
    steps = []
    for number in sliced(record, scores, lambda value: value == key):
        call = record.calls[number]
        steps.append(Step(number, call.function, call.arguments, call.spec))
    return Program(tuple(steps), scores)


def _any_number(few: Look, many: Look, key: Value) -> Program:
    """The calls that make the keys, as a program of any number of blocks."""
    alike = [sliced(look.base, look.base.scores) for look in (few, many)]
    functions = [[look.base.calls[n].function for n in ns] for look, ns in zip((few, many), alike)]
    if functions[0] != functions[1]:
        raise LeafUnsupported(f"{COUNTS[0]} blocks are not scored as {COUNTS[1]} are")
    of_few = dict(zip(alike[1], alike[0]))
    steps = []
    for number in _made_of_rows(many, key):
        call, other = many.base.calls[number], few.base.calls[of_few[number]]
        if not many.base.written.isdisjoint(call.values):
            raise LeafUnsupported("what makes the keys is written into")
        if call.spec != other.spec:
            raise LeafUnsupported("keys of two blocks are not made as those of three are")
        merged = tuple(_merged(few, many, *pair) for pair in zip(other.arguments, call.arguments))
        steps.append(Step(number, call.function, merged, call.spec))
    return Program(tuple(steps), key)


def _made_of_rows(look: Look, key: Value) -> list[int]:
    """Calls on the way to the keys, without those that make places of tokens."""
    return sliced(look.base, key, lambda value: _is_place(look, value))


def _is_place(look: Look, value: Value) -> bool:
    whole = look.base[value]
    return whole.dtype in (torch.int32, torch.int64) and whole.dim() > 0 and not any(look.on(value))


def _merged(few: Look, many: Look, a: Any, b: Any) -> Any:
    """An argument of a step, of what it is for two blocks and for three."""
    if isinstance(b, Value):
        if not isinstance(a, Value):
            raise LeafUnsupported("keys of two blocks are not made as those of three are")
        return _places(few.base[a], many.base[b]) if _is_place(many, b) else b
    if isinstance(b, Tensor):
        raise LeafUnsupported("what makes the keys reads a tensor of unknown origin")
    return b if a == b and type(a) is type(b) else _counting(a, b)


def _counting(a: Any, b: Any) -> Affine:
    """A size that is `a` for the fewer blocks and `b` for the more."""
    (few, many) = COUNTS
    if type(a) is not int or type(b) is not int or b <= a:
        raise LeafUnsupported(f"what makes the keys has {a} for {few} blocks, {b} for {many}")
    slope = (b - a) // (many - few)
    return Affine(slope, a - slope * few)


def _places(few: Tensor, many: Tensor) -> Places:
    """Places of tokens in texts of the fewer and of the more blocks."""
    order = many.flatten().tolist()
    steps = {b - a for a, b in pairwise(order)}
    if few.dim() != many.dim() or len(steps) != 1 or few.flatten().tolist() != order[: few.numel()]:
        raise LeafUnsupported(
            "keys are made of other tokens than each block's, one after the other"
        )
    shape = tuple(b if a == b else _counting(a, b) for a, b in zip(few.shape, many.shape))
    return Places(order[0], steps.pop(), shape)
