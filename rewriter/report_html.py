"""The report as one self-contained page: the model as a column of blocks, a click for the layer's graph."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, select_autoescape

if TYPE_CHECKING:
    from .report import LayerReport, RewriteReport

GRID = 40
"""Positions on a side of the picture of a mask."""

PALETTE = (
    "#2563eb",
    "#0d9488",
    "#c2410c",
    "#7c3aed",
    "#be185d",
    "#4d7c0f",
    "#b45309",
    "#0369a1",
    "#6d28d9",
    "#991b1b",
)


def page(report: RewriteReport) -> str:
    """The whole page. It loads nothing: styles, script and data are inside."""
    environment = Environment(
        autoescape=select_autoescape(default=True), trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(Path(__file__).with_name("report_page.html").read_text())
    kinds = sorted({layer.kind for layer in report.layers})
    colors = {kind: PALETTE[i % len(PALETTE)] for i, kind in enumerate(kinds)}
    layers = [_block(i, layer, colors[layer.kind]) for i, layer in enumerate(report.layers)]
    equal = report.expected == report.found
    return template.render(
        report=report,
        layers=layers,
        colors=colors,
        equal=equal,
        data=_data(layers),
        total=_largest(layers),
    )


def _block(number: int, layer: LayerReport, color: str) -> dict[str, Any]:
    caches = [
        {"name": spec.name.rpartition(":")[2], "per": per, "shape": " x ".join(map(str, spec.shape)) or "1",
         "dtype": str(spec.dtype).removeprefix("torch."), "bytes": spec.num_bytes}
        for per, specs in (("token", layer.rows), ("request", layer.states))
        for spec in specs
    ]  # fmt: skip
    return {
        "id": number, "path": layer.path, "kind": layer.kind, "served": layer.served, "operator": layer.operator,
        "mask": layer.mask, "reason": layer.reason, "source": layer.source, "notes": list(layer.notes),
        "caches": caches, "before": list(layer.before), "after": list(layer.after), "color": color,
        "picture": mask_picture(layer.mask),
    }  # fmt: skip


def _data(layers: list[dict[str, Any]]) -> str:
    """JSON that is safe inside a script element."""
    return json.dumps(layers).replace("<", "\\u003c").replace("&", "\\u0026")


def _largest(layers: list[dict[str, Any]]) -> int:
    return max((cache["bytes"] for layer in layers for cache in layer["caches"]), default=1)


def mask_picture(mask: str) -> list[str]:
    """Rows of 0 and 1: which keys (across) a query (down) attends to. Windows and chunks are drawn to scale.

    Empty for a text that says nothing of `k <= q`.
    """
    if "k <= q" not in mask:
        return []
    window = _number(r"q - k < (\d+)", mask)
    chunk = _number(r"floor\(k/(\d+)\)", mask)
    longest = max(window or 0, chunk or 0)
    unit = max(1.0, longest / (GRID / 3))
    rows = []
    for row in range(GRID):
        cells = []
        for column in range(GRID):
            q, k = int(row * unit), int(column * unit)
            allowed = column <= row
            allowed = allowed and (window is None or q - k < window)
            allowed = allowed and (chunk is None or q // chunk == k // chunk)
            cells.append("1" if allowed else "0")
        rows.append("".join(cells))
    return rows


def _number(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return int(match.group(1)) if match else None
