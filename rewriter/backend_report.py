"""What the backend did with each graph that Dynamo gave it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .pipeline import Served


@dataclass
class GraphReport:
    """One graph.

    served      whether it was grafted, or left to the inner backend
    reason      why it was left alone
    form        "padded", "packed" or "plain"
    layers      its mixing places, as the passes served them
    proof       what was proven of the grafted graph
    ends        why and where Dynamo ended the graph before the traced code was at its end, "" if it did not
    calls, fallbacks    how often it ran, and how often on the batch as it is, for a reason that `last_fallback` gives
    """

    served: bool
    reason: str = ""
    num_nodes: int = 0
    form: str = ""
    layers: list[Served] = field(default_factory=list)
    proof: str = ""
    ends: str = ""
    calls: int = 0
    fallbacks: int = 0
    last_fallback: str = ""

    def __str__(self) -> str:
        ends = [f"Dynamo ends the graph: {self.ends}"] * bool(self.ends)
        if not self.served:
            return "\n  ".join([f"left alone ({self.num_nodes} nodes): {self.reason}", *ends])
        kinds = [
            f"{layer.region.path or 'model'}: {layer.kind}, {layer.served} ({layer.operator})"
            for layer in self.layers
        ]
        head = f"grafted, {self.form}, {self.calls} calls ({self.fallbacks} on the batch as it is); {self.proof}"
        return "\n  ".join([head, *kinds, *ends])


_reports: list[GraphReport] = []


def record(report: GraphReport) -> None:
    """Append to what `backend_reports` returns."""
    _reports.append(report)


def backend_reports() -> tuple[GraphReport, ...]:
    """Every graph so far, in the order of compilation; `clear_backend_reports` forgets them."""
    return tuple(_reports)


def clear_backend_reports() -> None:
    """Forget all reports."""
    _reports.clear()
