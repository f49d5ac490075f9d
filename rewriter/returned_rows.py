"""Rows that are in order again though no rule can tell: found by measuring, in a graph that is not proven without.

After a roll, a flip or a sum over all tokens nothing is known of a value's rows. What a model makes of it, the rows
before (a roll whose first row is masked), a sum over what came before (the total less what follows), may be one row
per token again, causally. Which value that is shows in a run: it is the first whose rows stay as they are when the
text is cut behind them. Marked, it closes a region like any other, which replay serves and the prefix test measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from .errors import RewriteError, first_line
from .graph import TOKENS, CapturedGraph, shape_of
from .prefix import TOLERANCE, difference
from .token_axis.analysis import RETURNED, Analysis, analyse
from .token_axis.regions import lost_nodes
from .token_axis.value import has_tokens

LONGEST, CUTS = 40, (39, 31, 22, 13)
"""Tokens of the measured text, and of what is left of it. A graph that needs more has them on top."""


def mark_returned_rows(captured: CapturedGraph) -> int:
    """Mark the values whose rows came back in order; how many. None on the meta device, or in a graph without need."""
    marked, values = 0, None
    while lost := _candidates(analyse(captured.graph)):
        if values is None:
            values = _measure(captured, lost)
        found = next((node for node in lost if values.get(node)), None)
        if found is None:
            break
        found.meta[RETURNED] = True
        marked += 1
    return marked


def _candidates(analysis: Analysis) -> list[fx.Node]:
    """Numbers in the shape of rows that the logits need and whose rows are lost, in the order of the graph."""
    wide = [n for n in analysis.graph.nodes if token_dim(n) is not None and analysis.is_wide(n)]
    if not wide:  # as in most graphs: no need to grow their regions here too
        return []
    lost = lost_nodes(analysis)
    return [node for node in wide if node in lost]


def token_dim(node: fx.Node) -> int | None:
    """The one dimension of size T of a tensor of real numbers, if no other grows with the text."""
    dtype = node.meta.get("dtype")
    if node.op != "call_function" or dtype is None or not dtype.is_floating_point:
        return None
    dims = [dim for dim, size in enumerate(shape_of(node)) if has_tokens(size)]
    return dims[0] if len(dims) == 1 and shape_of(node)[dims[0]] == TOKENS else None


def measured_text(captured: CapturedGraph) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Ids and positions, [1, N], to run a graph on; None on the meta device, and for a graph of short texts alone."""
    device = next((tensor.device for tensor in captured.weights.values()), torch.device("cpu"))
    length = LONGEST + captured.min_tokens
    if device.type == "meta" or (captured.max_tokens or length) < length:
        return None
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(int(shape_of(captured.logits)[-1]), (1, length), generator=generator)
    return ids.to(device), torch.arange(length, device=device)[None]


def _measure(captured: CapturedGraph, nodes: list[fx.Node]) -> dict[fx.Node, bool]:
    """Per node: do its rows stay as they are when the text is cut behind them?"""
    text = measured_text(captured)
    if text is None:
        return {}
    ids, positions = text
    whole = dict(_run(captured, nodes, ids, positions))
    steady = dict.fromkeys(whole, True)
    for cut in CUTS:
        end = cut + captured.min_tokens
        for node, part in _run(captured, nodes, ids[:, :end], positions[:, :end]):
            rows = whole[node].narrow(token_dim(node), 0, end)
            limit = TOLERANCE.get(part.dtype, 0.0)
            steady[node] &= difference(rows, part) <= limit
    return steady


class MeasuredRun(fx.Interpreter):
    """Runs a captured graph on ids and positions [1, N]. An operation that fails on them is a RewriteError: a text may
    be as short, and a decode step is shorter.
    """

    def run(self, *args: Any, **options: Any) -> Any:
        self._length = args[0].shape[1]
        return super().run(*args, **options)

    def run_node(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except RuntimeError as error:
            raise RewriteError(
                f"an operation of the model fails on {self._length} tokens: {first_line(error)}",
                operation=str(n.target),
                path=n.meta.get("path", ""),
                source=n.meta.get("source", ""),
                fix="quantise the model in a way whose products take any number of rows",
            ) from error


@torch.no_grad()
def _run(
    captured: CapturedGraph, nodes: list[fx.Node], ids: torch.Tensor, positions: torch.Tensor
) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    """Values of these nodes."""
    wanted = set(nodes)

    class Recorder(MeasuredRun):
        def run_node(self, node: fx.Node) -> object:
            value = super().run_node(node)
            if node in wanted:
                found[node] = value
            return value

    found: dict[fx.Node, torch.Tensor] = {}
    Recorder(captured.module).run(ids, positions)
    yield from found.items()
