"""Attention to the keys that an indexer selects -> index_topk, and indexed attention over the selected rows.

    before   mask[q, k] = k <= q and k among the top-k of sum_i w[q, i] * relu(iq[q, i] . ik[k])
             attention(q, k, v, mask)
    after    selected = index_topk(iq, ik, w);  indexed_attention(q, k, v, selected)

Index keys are one more row a token. Where keys and values are linear in one low-rank row, attention is over that row,
as in latent_attention. Layers that share a top-k share the operator's result: k positions a token, in this step only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

import regraft.kernels.indexed_attention  # noqa: F401 (registers the operators)
from regraft.rewriter.attention_core import Core, find_core
from regraft.rewriter.attention_rows import Rows
from regraft.rewriter.graph import TOKENS
from regraft.rewriter.masks import Relation
from regraft.rewriter.pattern import Declined, Grafting, Pass, Region

from . import latent_attention
from .attention import (
    Plan,
    as_result,
    as_rows,
    as_vector,
    masked_below,
    read_plan,
    row_pool,
    unused_label,
)
from .indexed_blocks import BlockIndexer, find_blocks
from .indexed_blocks import select as select_blocks
from .indexed_pools import PoolIndexer, find_pools
from .indexed_selection import Indexer, find_selection

aten = torch.ops.aten
AnyIndexer = Indexer | PoolIndexer | BlockIndexer


@dataclass(frozen=True)
class Indexed:
    """What was found: the selection, and attention over keys and values or over a latent row."""

    indexer: AnyIndexer
    attention: Plan
    latent: latent_attention.Latent | None


def pattern(region: Region) -> Core | Declined:
    """The softmax and the products around the region's closer."""
    return find_core(region.closer)


def check(core: Core) -> Indexed | Declined:
    """Keys that are not selected are hidden, and the selection is a top-k of known scores of all keys in sight."""
    found = _find(core)
    if isinstance(found, Declined):
        return found
    selected, indexer = found
    plan = read_plan(selected)
    if isinstance(plan, Declined):
        return plan
    # Were less attended to than selected from, a query could be left without any key, and softmax over
    # nothing is what the mask's spelling makes of it.
    relation = indexer.relation if isinstance(indexer, Indexer) else Relation()
    if relation != plan.score.relation:
        return Declined(
            f"keys are selected where {relation}, attended to where {plan.score.relation}",
            indexer.topk, 0.8,
        )  # fmt: skip
    if plan.slopes is not None or plan.by_distance is not None:
        return Declined("attention to selected keys with a bias by position", core.softmax, 0.8)
    if plan.token_sinks is not None:
        return Declined("attention to selected keys with a sink of each token", core.softmax, 0.8)
    latent = latent_attention.check(selected)
    return Indexed(indexer, plan, None if isinstance(latent, Declined) else latent)


def _find(core: Core) -> tuple[Core, AnyIndexer] | Declined:
    """The selection of single keys, of pools or of blocks; the reason that comes furthest if none."""
    masked, declined = masked_below(core), []
    for find in (find_selection, find_pools, find_blocks):
        found = find(core, masked)
        if not isinstance(found, Declined):
            return found
        declined.append(found)
    return max(declined, key=lambda each: each.progress)


def rewrite(found: Indexed, grafting: Grafting) -> None:
    """Index rows into index_topk, the rows attended to into an operator that reads the selected ones."""
    plan, latent, indexer = found.attention, found.latent, found.indexer
    selected, score = _selected(indexer, grafting), plan.score
    sequences = grafting.sequences()
    shape = (TOKENS, plan.query.heads, plan.value.width)
    if latent is None:
        rows = [as_rows(rows, grafting) for rows in (plan.query, plan.key, plan.value)]
        pools = row_pool("k", plan.key, grafting), row_pool("v", plan.value, grafting)
        masks = (score.scale, score.relation.window, score.relation.chunk, score.softcap)
        attended = grafting.call(
            torch.ops.regraft.indexed_attention.default, *rows, *pools, selected, *sequences, *masks,
            as_vector(plan.sinks, grafting), shape=shape, dtype=plan.query.dtype,
        )  # fmt: skip
    else:
        attended = grafting.call(
            torch.ops.regraft.indexed_latent_attention.default, *latent_attention.operands(latent, grafting), selected,
            *sequences, *latent_attention.starts_and_masks(latent, grafting), shape=shape, dtype=plan.query.dtype,
        )  # fmt: skip
        grafting.notes.append(latent_attention.saving(latent))
    grafting.replace(plan.closer, as_result(attended, plan, grafting))
    grafting.mask = f"{score}; {_described(indexer)}"


def _described(indexer: AnyIndexer) -> str:
    if isinstance(indexer, BlockIndexer):
        blocks = indexer.blocks
        return f"the {blocks.count} best blocks of {blocks.size} by index score, and the tokens after the last block"
    if isinstance(indexer, PoolIndexer):
        return f"the {indexer.count} best pools of {indexer.size} by index score, and the tokens after the last pool"
    return f"the {indexer.count} best by index score"


def _selected(indexer: AnyIndexer, grafting: Grafting) -> fx.Node:
    """[T, k] int32: the selected positions. Layers whose masks come from one top-k share it."""
    known = indexer.topk.meta.get("selected")
    if known is not None:
        grafting.notes.append(f"selection shared: {known.meta['path']}")
        return known
    if isinstance(indexer, BlockIndexer):
        selected = select_blocks(indexer, unused_label("index", grafting), grafting)
        grafting.notes.append(indexer.note)
    else:
        selected = _by_rows(indexer, grafting)
    indexer.topk.meta["selected"] = selected
    return selected


def _by_rows(indexer: Indexer | PoolIndexer, grafting: Grafting) -> fx.Node:
    scoring = indexer.scoring
    rows = (as_rows(scoring.query, grafting), *_index_rows(indexer, grafting))
    sequences = grafting.sequences()
    how: tuple[object, ...] = (indexer.count, scoring.scale, scoring.relu)
    if isinstance(indexer, PoolIndexer):
        shape = (TOKENS, indexer.count * indexer.size + indexer.size - 1)
        operator = torch.ops.regraft.index_pool_topk.default
    else:
        shape = (TOKENS, indexer.count)
        operator = torch.ops.regraft.index_topk.default
        how = (*how, indexer.relation.window, indexer.relation.chunk)
    return grafting.call(operator, *rows, *sequences, *how, shape=shape, dtype=torch.int32)


def _index_rows(indexer: Indexer | PoolIndexer, grafting: Grafting) -> tuple[fx.Node, ...]:
    """The operator's arguments from the keys on, up to their cache."""
    rows, width, dtype = _only_head(indexer.key, grafting), indexer.key.width, indexer.key.dtype
    others = [_only_head(indexer.scoring.weights, grafting)]
    if isinstance(indexer, PoolIndexer):
        gate, width = _only_head(indexer.gate, grafting), 2 * width
        others.append(indexer.bias)
        rows = grafting.call(aten.cat.default, [rows, gate], 1, shape=(TOKENS, width), dtype=dtype)
    pool = grafting.row_pool(unused_label("index", grafting), (width,), dtype)
    return (rows, *others, pool)


def _only_head(rows: Rows, grafting: Grafting) -> fx.Node:
    """`[T, width]` of rows that have one head."""
    node = as_rows(rows, grafting)
    return grafting.call(aten.select.int, node, 1, 0, shape=(TOKENS, rows.width), dtype=rows.dtype)


PASS = Pass(
    "indexed_attention",
    "indexed attention",
    "regraft::indexed_attention",
    pattern,
    check,
    rewrite,
)
