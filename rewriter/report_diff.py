"""What differs between two reports: two versions of transformers, two models, before and after a change.

Compared is what decides how a model is served: the layers, their operators, caches and masks, what was expected and
found, the passes that matched, the bytes. Times, sizes of graphs and validation figures are not: they differ by run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from .report import SCHEMA_VERSION

Data = Mapping[str, Any]
"""A report as `RewriteReport.to_dict` gives it, or read back from its JSON file."""

LAYER = ("kind", "served", "operator", "rows", "states", "mask", "reason")
TOTALS = ("model", "expected", "found", "bytes_per_token", "bytes_per_request", "max_positions")


def diff(old: Data, new: Data) -> list[str]:
    """One line for each difference; empty if the two models are served alike.

    Raises ValueError for a report of another schema version than this Regraft's.
    """
    for report in (old, new):
        if report.get("schema_version") != SCHEMA_VERSION:
            found = report.get("schema_version")
            raise ValueError(f"a report of schema version {found}, expected {SCHEMA_VERSION}")
    lines = [_changed(name, old[name], new[name]) for name in TOTALS if old[name] != new[name]]
    return [*lines, *_layers(old, new), *_passes(old, new)]


def _layers(old: Data, new: Data) -> Iterator[str]:
    """By path; several mixing places of one path in their order."""
    before, after = _by_path(old), _by_path(new)
    for path in dict.fromkeys([*before, *after]):
        for one, two in zip_longest(before.get(path, []), after.get(path, [])):
            if one is None or two is None:
                layer, word = (two, "appeared") if one is None else (one, "gone")
                yield f"{path}: {layer['kind']} ({layer['served']}) {word}"
                continue
            for name in LAYER:
                # lists in JSON, tuples before: the same
                if _plain(one[name]) != _plain(two[name]):
                    yield _changed(f"{path}: {name}", one[name], two[name])


def _by_path(report: Data) -> dict[str, list[Data]]:
    paths: dict[str, list[Data]] = {}
    for layer in report["layers"]:
        paths.setdefault(layer["path"] or "(model)", []).append(layer)
    return paths


def _passes(old: Data, new: Data) -> Iterator[str]:
    before, after = ({run["name"]: run["matches"] for run in r["passes"]} for r in (old, new))
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            yield _changed(f"pass {name}: matches", before.get(name), after.get(name))


def _changed(name: str, old: object, new: object) -> str:
    return f"{name}: {_shown(old)} -> {_shown(new)}"


def _shown(value: Any) -> str:
    """Caches as "k 2x8 float32", the rest as it is."""
    if isinstance(value, (list, tuple)):
        caches = [
            f"{spec['name'].rpartition(':')[2]} {'x'.join(map(str, spec['shape'])) or '1'} {spec['dtype']}"
            for spec in value
        ]
        return ", ".join(caches) or "none"
    return "none" if value in (None, "") else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return {key: _plain(part) for key, part in value.items()} if isinstance(value, dict) else value
