"""Attention to a window of rows, and to one entry for each earlier window of tokens -> compressed_attention.

    before   entry[w] = f(sum_s softmax_s(gate[R*w + s] + bias[s]) * value[R*w + s], w)
             attention(q, rows ++ entry, mask)      the window, and entries of whole windows: all, or an indexer's top-k
    after    entry = f(pool_windows(value, gate, bias), position // R)
             compressed_attention(q, rows, entry[, index_entries(iq, f'(pool_windows(..)), u)])

The rows that are weighed are kept for as long as a window is open, entries for as long as the request: one in R tokens.
A row, and an entry, is key and value. Not where they differ, or where an entry depends on anything but its window.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
from torch import fx

import regraft.kernels.compressed_attention  # noqa: F401 (registers the operators)
from regraft.rewriter.attention_core import Core, Keys, find_core
from regraft.rewriter.attention_rows import Rows
from regraft.rewriter.declare import Reach
from regraft.rewriter.formulas import Cell, cases, number
from regraft.rewriter.graph import TOKENS
from regraft.rewriter.indexing import Element
from regraft.rewriter.integers import ZERO, Expr, Index, Quotient
from regraft.rewriter.masks import shorten
from regraft.rewriter.pattern import Declined, Grafting, Pass, Region
from regraft.rewriter.products import is_product, multiplied
from regraft.rewriter.scores import is_masked

from .attention import Plan, as_result, as_rows, as_vector, masked_below, read_plan, unused_label
from .compressed_entries import Entries, read_entries
from .compressed_selection import Selection, find_selection, is_exactly, told, whole

aten = torch.ops.aten


@dataclass(frozen=True)
class Halves:
    """One softmax over the keys of tokens and those of entries, one for each `rate` tokens: each half by itself."""

    rows: Core
    entries: Core
    rate: int


@dataclass(frozen=True)
class Compressed:
    """Attention to rows, the entries attended to beside them, and what selects among these."""

    attention: Plan
    entries: Entries
    selection: Selection | None


def pattern(region: Region) -> Halves | Declined:
    """A softmax over one key a token, and then one for every `rate` of them."""
    closer = region.closer
    sizes = closer.meta.get("shape")
    product = (
        multiplied(closer, (ZERO,) * len(sizes), "k") if sizes and is_product(closer) else None
    )
    if product is None:
        return Declined("no attention: tokens are not mixed by a product with values", closer)
    total = product[2].size
    count = sympy.expand(total - TOKENS)
    if not (isinstance(count, Quotient) and count.args[0] == TOKENS and count.args[1].is_Integer):
        return Declined("no entries of windows among the keys", closer)
    rows = find_core(closer, Keys(ZERO, TOKENS, total))
    entries = find_core(closer, Keys(TOKENS, count, total))
    if isinstance(rows, Declined):
        return rows
    if isinstance(entries, Declined):
        return entries
    return Halves(rows, entries, int(count.args[1]))


def check(halves: Halves) -> Compressed | Declined:
    """Rows are attended to as usual, entries by the same product: those of whole windows, or of these a selection."""
    plan = read_plan(halves.rows)
    if isinstance(plan, Declined):
        return plan
    if (plan.score.relation.chunk, plan.score.softcap, plan.slopes, plan.by_distance) != (
        0,
        0,
        None,
        None,
    ):
        return Declined(f"attention to entries beside {plan.score}", plan.closer, 0.6)
    if plan.token_sinks is not None or not _is_one(plan.key, plan.value):
        what = (
            "with a sink of each token"
            if plan.token_sinks
            else "whose rows are not keys and values at once"
        )
        return Declined(f"attention to entries {what}", plan.closer, 0.6)
    found = find_selection(halves.entries, halves.rate, masked_below(halves.entries))
    if isinstance(found, Declined):
        return found
    core, selection = found
    problem = _score_problem(halves, core, plan.score.scale, selection is not None)
    if problem:
        return Declined(problem, core.softmax, 0.7)
    entries = _read_entries(core)
    if isinstance(entries, Declined):
        return entries
    if entries.dtype != plan.query.dtype or entries.width != plan.key.width:
        return Declined("rows and entries differ in width or dtype", plan.closer, 0.7)
    return Compressed(plan, entries, selection)


def _is_one(key: Rows, value: Rows) -> bool:
    """Whether the same rows, of one head, are keys and values."""
    return key == value and key.heads == 1


def _read_entries(core: Core) -> Entries | Declined:
    """The entries that are keys are those that are values, and are entries of windows."""
    (product,) = core.products.values()
    key, value = _key_of(product, core), core.value
    entries = read_entries(key, core.axes.k, product[2])
    if isinstance(entries, Declined):
        return entries
    values = read_entries(value, core.axes.k, core.value_feature)
    if isinstance(values, Declined):
        return values
    same = ("node", "token_dim", "feature_dim")
    if any(getattr(entries, name) != getattr(values, name) for name in same):
        return Declined("entries are not keys and values at once", core.closer, 0.7)
    return entries


def _key_of(product: tuple[Element, Element, Index], core: Core) -> Element:
    left, right, _ = product
    return right if any(core.axes.q in at.free_symbols for at in left[1]) else left


def _query_of(core: Core) -> Element:
    ((left, right, _),) = core.products.values()
    return left if any(core.axes.q in at.free_symbols for at in left[1]) else right


def _score_problem(halves: Halves, core: Core, scale: float, selected: bool) -> str:
    """Why entries are not scored as rows are; "" if they are."""
    if len(core.products) != 1 or _query_of(core) != _query_of(halves.rows):
        return "rows and entries are scored by different queries"
    seen = [
        (when, leaf) for when, leaf in cases(told(number(core.score)))
        if not is_masked(leaf, masked_below(core))
    ]  # fmt: skip
    sees_whole = is_exactly(sympy.Or(*(when for when, _ in seen)), whole(core.axes, halves.rate))
    if not (sees_whole or (selected and [when for when, _ in seen] == [sympy.true])):
        shown = shorten(sympy.Or(*(when for when, _ in seen)))
        return f"entries are seen where {shown}, not of whole windows"
    ours, theirs = ({_apart(leaf, c) for leaf in leaves} for leaves, c in (
        ([leaf for _, leaf in seen], core), (_open_leaves(halves.rows), halves.rows),
    ))  # fmt: skip
    if len(ours) != 1 or ours != theirs:
        return f"rows and entries are scored differently: {shorten(seen[0][1])}"
    return ""


def _open_leaves(core: Core) -> list[Expr]:
    leaves = (leaf for _, leaf in cases(told(number(core.score))))
    return [leaf for leaf in leaves if not is_masked(leaf, masked_below(core))]


def _apart(leaf: Expr, core: Core) -> tuple[Expr, Expr]:
    """The factor of the product of query and key, and what else is in the score."""
    cells = [cell for cell in leaf.atoms(Cell) if cell.args[0].name in core.products]
    factors = [sympy.expand(leaf).coeff(cell) for cell in cells]
    rest = leaf - sympy.Add(*(factor * cell for factor, cell in zip(factors, cells)))
    return sympy.Add(*factors), sympy.expand(rest)


def rewrite(found: Compressed, grafting: Grafting) -> None:
    """Windows into entries, entries and rows into the operator; of an indexer, index entries into index_entries."""
    plan, entries, score = found.attention, found.entries, found.attention.score
    rate, dtype = entries.windows.rate, plan.query.dtype
    own = _entry_rows(entries, "", grafting)
    entry_pool = _entry_pool("entry", entries, grafting)
    reach = Reach(score.relation.window)
    row_pool = grafting.row_pool(unused_label("row", grafting), (plan.key.width,), dtype, reach)
    selected = None if found.selection is None else _selected(found.selection, row_pool, grafting)
    attended = grafting.call(
        torch.ops.regraft.compressed_attention.default, as_rows(plan.query, grafting), _only_head(plan.key, grafting),
        own, row_pool, entry_pool, selected, *grafting.sequences(reach),
        grafting.sequence("block_table"), rate, score.scale, score.relation.window, as_vector(plan.sinks, grafting),
        shape=(TOKENS, plan.query.heads, plan.key.width), dtype=dtype,
    )  # fmt: skip
    grafting.replace(plan.closer, as_result(attended, plan, grafting))
    seen = "all entries" if found.selection is None else f"the {found.selection.count} best entries"
    grafting.mask = f"{score}; {seen} of whole windows of {rate}"


def _entry_rows(entries: Entries, name: str, grafting: Grafting) -> fx.Node:
    """`[T, D]`: the entry of a window in the row of its last token."""
    windows = entries.windows
    reach = Reach(window=windows.spans * windows.rate)
    labels = [unused_label(f"{name}{what}", grafting) for what in ("value", "gate")]
    rows = (windows.values, windows.gates)
    pools = [
        grafting.row_pool(label, (row.width,), row.dtype, reach) for label, row in zip(labels, rows)
    ]
    pooled = grafting.call(
        torch.ops.regraft.pool_windows.default, *(_only_head(row, grafting) for row in rows), windows.bias, *pools,
        *grafting.sequences(reach), windows.spans,
        shape=(TOKENS, windows.width), dtype=windows.values.dtype,
    )  # fmt: skip
    made = entries.lifted.copy(pooled, grafting)
    rows_made = Rows(made, entries.token_dim, None, entries.feature_dim, 1, entries.width, ZERO)
    return _only_head(rows_made, grafting)


def _entry_pool(name: str, entries: Entries, grafting: Grafting) -> fx.Node:
    label, rate = unused_label(name, grafting), entries.windows.rate
    return grafting.row_pool(label, (entries.width,), entries.dtype, every=rate)


def _only_head(rows: Rows, grafting: Grafting) -> fx.Node:
    """`[T, width]` of rows that have one head."""
    node = as_rows(rows, grafting)
    return grafting.call(aten.select.int, node, 1, 0, shape=(TOKENS, rows.width), dtype=rows.dtype)


def _selected(selection: Selection, paged: fx.Node, grafting: Grafting) -> fx.Node:
    """[T, k] int32: numbers of windows."""
    scoring, entries = selection.scoring, selection.entries
    own = _entry_rows(entries, "index_", grafting)
    sequences = (grafting.sequence(n) for n in ("cu_seqlens", "context_lens", "block_table"))
    return grafting.call(
        torch.ops.regraft.index_entries.default, as_rows(scoring.query, grafting), own,
        _only_head(scoring.weights, grafting), _entry_pool("index_entry", entries, grafting), paged, *sequences,
        entries.windows.rate, selection.count, scoring.scale, scoring.relu,
        shape=(TOKENS, selection.count), dtype=torch.int32,
    )  # fmt: skip


PASS = Pass(
    "compressed_attention",
    "compressed attention",
    "regraft::compressed_attention",
    pattern,
    check,
    rewrite,
)
