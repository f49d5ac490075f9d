"""What was rewritten, where, why not, and how exact: the report of one rewrite."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .declare import RowSpec, StateSpec
from .graph import describe
from .pattern import Declined, Region
from .pipeline import Rewriting, Served

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class DeclineReport:
    """A pass that looked at a region and refused it."""

    reason: str
    node: str
    path: str
    source: str
    progress: float
    fix: str

    @classmethod
    def of(cls, region: Region, declined: Declined) -> DeclineReport:
        meta = declined.node.meta if declined.node is not None else region.closer.meta
        node = str(declined.node.target) if declined.node is not None else ""
        return cls(
            declined.reason,
            node,
            region.path,
            meta.get("source", ""),
            declined.progress,
            declined.fix,
        )


@dataclass(frozen=True)
class PassReport:
    """One pass: how often it matched, what it declined, what it cost."""

    name: str
    matches: int
    declined: tuple[DeclineReport, ...]
    seconds: float
    nodes_before: int
    nodes_after: int


@dataclass(frozen=True)
class LayerReport:
    """One place where tokens mix, and how it is served ("grafted" or "replayed")."""

    path: str
    kind: str
    served: str
    operator: str
    rows: tuple[RowSpec, ...]
    states: tuple[StateSpec, ...]
    mask: str
    reason: str
    source: str = ""
    notes: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @classmethod
    def of(cls, served: Served) -> LayerReport:
        source = served.region.closer.meta.get("source", "")
        return cls(
            served.region.path, served.kind, served.served, served.operator, tuple(served.rows), tuple(served.states),
            served.mask, served.reason, source, tuple(served.notes), served.before, served.after,
        )  # fmt: skip


@dataclass
class RewriteReport:
    """See api: `print(report)` is a table, `to_dict` and `to_json` are for machines."""

    model: str
    layers: list[LayerReport]
    expected: dict[str, int]
    found: dict[str, int]
    passes: list[PassReport]
    proof: str
    bytes_per_token: int
    bytes_per_request: int
    num_nodes: int
    seconds: float = 0.0
    max_positions: int | None = None
    bytes_in_reach: dict[str, int] = field(default_factory=dict)
    """By how far back rows are read ("window 4096"): the bytes of so many tokens' rows, which is what a request of any
    length keeps of them, but for parts of pages and what is new in a step."""
    validation: Any = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with "schema_version"."""
        data = asdict(self)
        for layer in data["layers"]:
            for spec in (*layer["rows"], *layer["states"]):
                spec["dtype"] = str(spec["dtype"]).removeprefix("torch.")
        return {"schema_version": SCHEMA_VERSION, **data}

    def to_json(self, path: str | Path) -> None:
        """Write `to_dict` to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    def to_html(self, path: str | Path) -> None:
        """Write one self-contained page to a file."""
        from .report_html import page

        Path(path).write_text(page(self))

    def explain(self, path: str) -> str:
        """Why the layers at a module path are served as they are: the nearest pattern, and what would make it match.

        `path` may be one that the table shows for several layers ("model.layers.0..29.self_attn",
        "model.layers.#.self_attn"), "" stands for the whole model. Raises KeyError for one where nothing mixes.
        """
        from .report_text import explanation

        return explanation(self, path)

    def __str__(self) -> str:
        from .report_text import table

        return table(self)


def make_report(
    state: Rewriting,
    model: str,
    layer_types: list[str] | None,
    max_positions: int | None,
    seconds: float,
) -> RewriteReport:
    """Report of a finished rewrite. `layer_types`: the configuration's own list, one entry a layer, if it has one."""
    expected = Counter(_kind_of(region) for region in state.found)
    found = Counter(_kind_of(served.region) for served in state.served)
    missing = _layers_without_mixing(state, layer_types)
    if missing:
        expected["layers without any mixing found"] = len(missing)
    rows = {spec.name: spec for served in state.served for spec in served.rows}
    states = {spec.name: spec for served in state.served for spec in served.states}
    passes = [
        PassReport(
            run.name, run.matches, tuple(DeclineReport.of(r, no) for r, no in run.declined if no.progress > 0),
            run.seconds, run.nodes_before, run.nodes_after,
        )
        for run in state.runs
    ]  # fmt: skip
    order = {region.closer: i for i, region in enumerate(state.found)}
    layers = sorted(state.served, key=lambda served: order.get(served.region.closer, len(order)))
    return RewriteReport(
        model, [LayerReport.of(served) for served in layers], dict(expected), dict(found), passes, str(state.proof),
        sum(spec.num_bytes for spec in rows.values()), sum(spec.num_bytes for spec in states.values()),
        len(state.graph.nodes), seconds, max_positions, _bytes_in_reach(rows.values()), notes=[*state.notes],
    )  # fmt: skip


def _bytes_in_reach(rows: Iterable[RowSpec]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for row in rows:
        if row.reach.size:
            totals[str(row.reach)] += row.reach.size * row.num_bytes
    return dict(totals)


def _kind_of(region: Region) -> str:
    return region.kind


def _layers_without_mixing(state: Rewriting, layer_types: list[str] | None) -> list[int]:
    """Layers that the configuration names as mixing layers, and in which the analysis found nothing."""
    if not layer_types:
        return []
    paths = [f".{region.path}." for region in state.found]
    mixing = [
        i for i, kind in enumerate(layer_types) if kind not in ("mlp", "moe", "dense", "sparse")
    ]
    return [i for i in mixing if not any(f".{i}." in path for path in paths)]


__all__ = ["DeclineReport", "LayerReport", "PassReport", "RewriteReport", "describe", "make_report"]
