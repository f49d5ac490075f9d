"""The report as one screen of text: runs of equal layers folded."""

from __future__ import annotations

import re
from difflib import get_close_matches
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from .declare import RowSpec

if TYPE_CHECKING:
    from .report import LayerReport, RewriteReport


def table(report: RewriteReport) -> str:
    """The whole report as text."""
    lines = [f"Regraft: {report.model}", ""]
    lines += _layers(report)
    lines += ["", *_facts(report)]
    lines += _declined(report)
    lines += [f"  note        {note}" for note in report.notes]
    return "\n".join(lines)


class _Row(NamedTuple):
    """A line on layers that are served alike: their paths as one, what it says of them, and the layers."""

    path: str
    text: str
    layers: tuple[LayerReport, ...]


def _layers(report: RewriteReport) -> list[str]:
    rows = _rows(report)
    width = max((len(row.path) for row in rows), default=0)
    return [f"  {row.path:<{width}}  {row.text}" for row in rows]


def _rows(report: RewriteReport) -> list[_Row]:
    rows = []
    for (text, _), run in groupby(
        report.layers, key=lambda layer: (_describe(layer), _shape_of(layer.path))
    ):
        layers = tuple(run)
        rows.append(_Row(_folded([layer.path for layer in layers]), text, layers))
    return _merge_alternating(rows)


def _merge_alternating(rows: list[_Row]) -> list[_Row]:
    """Layers that alternate in kind would make a line each: gather equal descriptions under one line of numbers."""
    if len(rows) <= 16:
        return rows
    gathered: dict[tuple[str, str], list[_Row]] = {}
    for row in rows:
        gathered.setdefault((_shape_of(row.path), row.text), []).append(row)
    return [
        _Row(
            _numbers([row.path for row in alike]),
            text,
            tuple(layer for row in alike for layer in row.layers),
        )
        for (_, text), alike in gathered.items()
    ]


def _numbers(paths: list[str]) -> str:
    if len(paths) == 1:
        return paths[0]
    numbers = [m.group() for path in paths if (m := re.search(r"\d+(\.\.\d+)?", path))]
    shown = (
        ",".join(numbers)
        if len(numbers) <= 6
        else f"{','.join(numbers[:4])},...,{numbers[-1]} ({len(numbers)}x)"
    )
    return re.sub(r"\d+(\.\.\d+)?", shown, paths[0], count=1)


def _shape_of(path: str) -> str:
    """The path with its first number blanked: layers of equal shape fold together."""
    return re.sub(r"\d+(\.\.\d+)?", "#", path, count=1)


def _folded(paths: list[str]) -> str:
    if len(paths) == 1:
        return paths[0]
    first, last = (re.search(r"\d+", path) for path in (paths[0], paths[-1]))
    if first is None or last is None or first.group() == last.group():
        return f"{paths[0]} ({len(paths)}x)"
    return re.sub(r"\d+", f"{first.group()}..{last.group()}", paths[0], count=1)


def _describe(layer: LayerReport) -> str:
    caches = [
        f"{name} {'x'.join(map(str, spec.shape)) or '1'} {str(spec.dtype).removeprefix('torch.')}"
        + (f" of {spec.every} tokens" if isinstance(spec, RowSpec) and spec.every > 1 else "")
        for kind, specs in (("row", layer.rows), ("state", layer.states))
        for spec in specs
        for name in [
            f"{kind} {spec.name.rpartition(':')[2]}" if layer.served == "grafted" else kind
        ]
    ]
    parts = [
        layer.kind,
        layer.served if layer.served == "replayed" else f"grafted: {layer.operator}",
    ]
    parts += [", ".join(caches)] if caches else []
    parts += [layer.mask] if layer.mask else []
    parts += [f"because {layer.reason}"] if layer.reason else []
    return " | ".join(parts)


def _facts(report: RewriteReport) -> list[str]:
    grafted = sum(layer.served == "grafted" for layer in report.layers)
    equal = "equal" if report.expected == report.found else f"NOT equal: expected {report.expected}"
    lines = [
        f"  served      {grafted} grafted, {len(report.layers) - grafted} replayed; found {report.found} ({equal})",
        f"  proof       {report.proof}",
        f"  cache       {report.bytes_per_token:,} bytes per token, {report.bytes_per_request:,} bytes per request",
    ]
    lines += [
        f"              of rows that are read within {reach}, a request keeps {size:,} bytes at most"
        for reach, size in report.bytes_in_reach.items()
    ]
    if report.validation is not None:
        lines.append(f"  validation  {report.validation}")
    steps = ", ".join(
        f"{p.name} {p.matches} ({p.seconds:.2f} s)" for p in report.passes if p.matches
    )
    lines.append(f"  passes      {steps}; {report.num_nodes} nodes, {report.seconds:.1f} s in all")
    return lines


def _declined(report: RewriteReport) -> list[str]:
    seen: dict[tuple[str, str, str], int] = {}
    for run in report.passes:
        for no in run.declined:
            key = (run.name, _shape_of(no.path), no.reason)
            seen[key] = seen.get(key, 0) + 1
    return [
        f"  declined    {name} at {path} ({count}x): {reason}"
        for (name, path, reason), count in seen.items()
    ]


def explanation(report: RewriteReport, path: str) -> str:
    """The text of `report.explain(path)`."""
    if not isinstance(path, str):
        raise TypeError(f"path={path!r}: give the path of a module, as the report shows it")
    path, rows = path.strip(), _rows(report)
    layers = [
        layer for layer in report.layers
        if not path or path in (layer.path, _shape_of(layer.path)) or layer.path.startswith(f"{path}.")
    ] or [layer for row in rows if row.path == path for layer in row.layers]  # fmt: skip
    if not layers:
        paths = (*(row.path for row in rows), *(layer.path for layer in report.layers))
        known = list(dict.fromkeys(paths))
        near = get_close_matches(path, known, cutoff=0.5) or known[:3]
        raise KeyError(
            f"nothing mixes tokens at {path!r}: it does at {', '.join(near)} (report.layers has all)"
        )
    explained = groupby(layers, key=lambda one: (_explain(report, one), _shape_of(one.path)))
    return "\n\n".join(
        f"{_numbers(list(dict.fromkeys(layer.path for layer in alike)))}: {text}"
        for (text, _), alike in explained
    )


def _explain(report: RewriteReport, layer: LayerReport) -> str:
    lines = [_describe(layer)]
    if layer.source:
        lines.append(f"  mixes at {layer.source}")
    looked = [
        (run.name, no) for run in report.passes for no in run.declined if no.path == layer.path
    ]
    if layer.served == "grafted" and not looked:
        return "\n".join(lines)
    for name, no in sorted(looked, key=lambda pair: -pair[1].progress):
        lines.append(f"  pass {name} got {no.progress:.0%} of the way: {no.reason}")
        if no.node or no.source:
            lines.append(f"    at {no.node} {no.source}".rstrip())
        if no.fix:
            lines.append(f"    it would match if {no.fix}")
    if layer.served == "replayed" and not looked:
        names = ", ".join(run.name for run in report.passes)
        lines.append(f"  no pass came near: {names} found nothing of theirs here")
    return "\n".join(lines)
