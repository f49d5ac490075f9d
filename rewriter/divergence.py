"""Where two runs of the same text part: the first operation of the graph whose bits differ for one of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from .graph import TOKENS


@dataclass(frozen=True)
class Divergence:
    """The operation, where it comes from, and the first position of the text at which it differs."""

    operation: str
    path: str
    source: str
    position: int

    def __str__(self) -> str:
        where = f" in {self.path}" if self.path else ""
        line = f" at {self.source}" if self.source else ""
        return f"{self.operation}{where}{line}, from position {self.position} of the text"


@dataclass
class Record:
    """By node, a checksum of the bits of each token of a text (int64), by position."""

    text: Sequence[int]
    sums: dict[fx.Node, dict[int, int]] = field(default_factory=dict)

    def rows(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, list[int]]:
        """Which rows of a packed row are the text's, and their positions."""
        bounds, contexts = inputs["cu_seqlens"].tolist(), inputs["context_lens"].tolist()
        ids = inputs["input_ids"][0].tolist()
        for (start, end), context in zip(pairwise(bounds), contexts):
            length = end - start
            if length and ids[start:end] == list(self.text[context : context + length]):
                return torch.arange(start, end), list(range(context, context + length))
        return torch.arange(0), []


class _Recorder(fx.Interpreter):
    """Runs a graph and notes the text's rows of every value that has one row per token."""

    def __init__(
        self, module: fx.GraphModule, record: Record, rows: Tensor, positions: list[int]
    ) -> None:
        super().__init__(module)
        self._record, self._rows, self._positions = record, rows, positions

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        shape = n.meta.get("shape")
        if n.op == "call_function" and isinstance(value, Tensor) and shape and TOKENS in shape:
            dim = shape.index(TOKENS)
            if self._positions and value.shape[dim] > int(self._rows[-1]):
                own = value.index_select(dim, self._rows.to(value.device)).movedim(dim, 0)
                sums = self._record.sums.setdefault(n, {})
                sums.update(zip(self._positions, checksums(own.cpu()).tolist()))
        return value


def checksums(rows: Tensor) -> Tensor:
    """[n, ...] -> [n] int64: sums of the bits times odd numbers, which wrap around, so that no order matters."""
    flat = rows.reshape(len(rows), -1).contiguous()
    flat = flat.view(torch.uint8).view(len(rows), -1).to(torch.int64) + 1
    weights = torch.arange(1, flat.shape[1] + 1, dtype=torch.int64) * 2654435761 * 2 + 1
    return (flat * weights).sum(1)


@contextmanager
def recording(artifact: Any, text: Sequence[int]) -> Iterator[Record]:
    """While entered, the artifact's graph is interpreted node by node, and the text's rows are noted."""
    record = Record(text)
    original = artifact.forward

    def forward(inputs: Mapping[str, Tensor]) -> Tensor:
        recorder = _Recorder(artifact.module, record, *record.rows(inputs))
        (logits,) = recorder.run(*(inputs[name] for name in artifact.input_names))
        return logits.reshape(-1, logits.shape[-1])

    artifact.forward = forward
    try:
        yield record
    finally:
        artifact.forward = original


def first_divergence(
    engine: Any, text: Sequence[int], first: Callable[[], Any], second: Callable[[], Any]
) -> Divergence | None:
    """Run both, each of which takes `text` through the engine once; the first node, in the order of the graph, that
    differs, or None. The graph must not be compiled. No other text of a run may have the text's tokens.
    """
    records = []
    for run in (first, second):
        with recording(engine.model, text) as record:
            run()
        records.append(record)
    before, after = records
    for node in engine.model.module.graph.nodes:
        mine, others = before.sums.get(node, {}), after.sums.get(node, {})
        apart = [at for at in sorted(mine) if at in others and mine[at] != others[at]]
        if apart:
            meta = node.meta
            return Divergence(
                str(node.target), meta.get("path", ""), meta.get("source", ""), apart[0]
            )
    return None
