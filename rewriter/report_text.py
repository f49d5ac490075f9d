"""The report as one screen of text: runs of equal layers folded."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING

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


def _layers(report: RewriteReport) -> list[str]:
    rows = []
    for (description, _), run in groupby(
        report.layers, key=lambda layer: (_describe(layer), _shape_of(layer.path))
    ):
        paths = [layer.path for layer in run]
        rows.append((_folded(paths), description))
    rows = _merge_alternating(rows)
    width = max((len(path) for path, _ in rows), default=0)
    return [f"  {path:<{width}}  {text}" for path, text in rows]


def _merge_alternating(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Layers that alternate in kind would make a line each: gather equal descriptions under one line of numbers."""
    if len(rows) <= 16:
        return rows
    gathered: dict[tuple[str, str], list[str]] = {}
    for path, text in rows:
        gathered.setdefault((_shape_of(path), text), []).append(path)
    return [(_numbers(paths), text) for (_, text), paths in gathered.items()]


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
    layers = [
        layer for layer in report.layers if layer.path == path or layer.path.startswith(f"{path}.")
    ]
    if not layers:
        raise KeyError(f"nothing mixes tokens at {path!r}: see report.layers for the paths")
    return "\n\n".join(_explain(report, layer) for layer in layers)


def _explain(report: RewriteReport, layer: LayerReport) -> str:
    lines = [f"{layer.path}: {_describe(layer)}"]
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
