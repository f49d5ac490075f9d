"""Where tokens mix: regions, found backwards from the logits.

A region is the backward slice from a *closer* (a node whose mixed value has the shape of rows again) through wide
values up to rows. It is a pure function of its row inputs. Slices may overlap: a mask shared by all layers is in each
layer's region.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import fx

from regraft.rewriter.graph import describe
from regraft.rewriter.pattern import Region

from .analysis import Analysis


@dataclass(frozen=True)
class Verdict:
    """What the analysis proves of a graph. `offence` is None exactly when nothing but Regraft's operators mixes."""

    num_nodes: int
    num_row_local: int
    num_fixed: int
    offence: str | None
    node: fx.Node | None = None

    @property
    def proven(self) -> bool:
        return self.offence is None

    def __str__(self) -> str:
        if self.offence:
            return f"not proven: {self.offence}"
        return f"{self.num_row_local} of {self.num_nodes} nodes row-local, {self.num_fixed} constant, nothing mixes"


class _Slice:
    """A backward slice that is being grown."""

    def __init__(self, closer: fx.Node) -> None:
        self.closer = closer
        self.nodes: set[fx.Node] = set()
        self.inputs: dict[fx.Node, None] = {}
        self.direct: set[fx.Node] = set()
        """Wide float nodes reached through floats only: the region's own body, without shared indices and masks."""


def find_regions(analysis: Analysis) -> list[Region]:
    """Every region that the logits need, in the order of the graph."""
    order = {node: i for i, node in enumerate(analysis.graph.nodes)}
    slices, _ = _walk(analysis)
    ordered = sorted(slices, key=order.__getitem__)
    return [_region(slices[closer], analysis, order) for closer in ordered]


def lost_nodes(analysis: Analysis) -> set[fx.Node]:
    """What the logits need that is no longer rows and in no region: where tokens mix for good."""
    _, between = _walk(analysis)
    return {node for node in between if analysis.is_wide(node)}


def _walk(analysis: Analysis) -> tuple[dict[fx.Node, _Slice], set[fx.Node]]:
    """Backwards from the logits: the slice of each region by its closer, and all nodes outside of them."""
    slices: dict[fx.Node, _Slice] = {}
    pending = list(analysis.graph.output_node().all_input_nodes)
    seen: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if analysis.is_cut(node):
            grown = _grow(node, analysis)
            slices[node] = grown
            pending.extend(grown.inputs)
        else:
            pending.extend(node.all_input_nodes)
    return slices, seen - set(slices)


def _grow(closer: fx.Node, analysis: Analysis) -> _Slice:
    grown = _Slice(closer)
    _extend(grown, [(closer, True)], analysis)
    absorbed = True
    while absorbed:
        absorbed = False
        for node in list(grown.inputs):
            paths = _overlapping(node, grown, analysis)
            if paths:
                del grown.inputs[node]
                _extend(grown, [(path, True) for path in [node, *paths]], analysis)
                absorbed = True
    return grown


def _extend(grown: _Slice, roots: list[tuple[fx.Node, bool]], analysis: Analysis) -> None:
    """Pull `roots` and everything behind them up to rows into the slice."""
    forced = {root for root, _ in roots}
    pending = list(roots)
    while pending:
        node, direct = pending.pop()
        is_float = _is_float(node)
        if node in grown.nodes and not (direct and is_float and node not in grown.direct):
            continue
        if node.op == "placeholder" or (node not in forced and _is_stored(node, analysis)):
            if not analysis.value(node).is_fixed or node.op == "placeholder":
                grown.inputs[node] = None
                continue
        grown.nodes.add(node)
        grown.inputs.pop(node, None)
        direct = direct and is_float
        if direct and analysis.is_wide(node) and node not in analysis.positional:
            grown.direct.add(node)
        pending.extend((operand, direct) for operand in value_operands(node))


def _is_stored(node: fx.Node, analysis: Analysis) -> bool:
    """Rows that a region reads from outside. What follows from positions, and indices with mixing behind them, are
    recomputed inside.
    """
    if not analysis.value(node).is_row_local or node in analysis.positional:
        return False
    return node not in analysis.history


def _is_float(node: fx.Node) -> bool:
    dtype = node.meta.get("dtype")
    return dtype is None or dtype.is_floating_point or dtype.is_complex


def value_operands(node: fx.Node) -> list[fx.Node]:
    """Operands whose elements matter: not the tensor that only lends a shape or a dtype."""
    name = getattr(node.target, "_opname", "")
    if name.endswith("_like") or name.startswith("new_") or name in ("sym_size", "sym_numel"):
        return [operand for operand in node.all_input_nodes if operand.meta.get("shape") is None]
    return node.all_input_nodes


def _overlapping(node: fx.Node, grown: _Slice, analysis: Analysis) -> list[fx.Node]:
    """The row-local path from `node` back to a cut whose own body overlaps this region's (a softmax by hand)."""
    if not analysis.value(node).is_row_local or node.op == "placeholder":
        return []
    path, pending, found = set(), [node], False
    while pending:
        current = pending.pop()
        if current in path or current.op in ("placeholder", "get_attr"):
            continue
        path.add(current)
        if analysis.is_cut(current):
            own = _Slice(current)
            _extend(own, [(current, True)], analysis)
            found = found or bool(own.direct & grown.direct)
            continue
        if len(path) > 8:
            return []
        pending.extend(current.all_input_nodes)
    return sorted(path, key=lambda n: n.name) if found else []


KINDS = {
    "scaled_dot_product_attention": "attention",
    "softmax": "attention",
    "_softmax": "attention",
    "conv1d": "conv",
    "convolution": "conv",
    "leaf_causal_conv1d_fn": "conv",
    "leaf_chunk_gated_delta_rule": "delta_rule",
    "leaf_chunk_kda": "kda",
    "leaf_mamba_chunk_scan_combined": "ssd",
    "leaf_selective_scan_fn": "selective_scan",
    "module_leaf": "module",
}
"""What an operation along the tokens says about the kind of mixing, for names in the report only."""


def _region(grown: _Slice, analysis: Analysis, order: dict[fx.Node, int]) -> Region:
    nodes = tuple(sorted(grown.nodes, key=order.__getitem__))
    body = [node for node in nodes if node in grown.direct or node is grown.closer]
    kinds = Counter(
        KINDS[name] for node in body if (name := getattr(node.target, "_opname", "")) in KINDS
    )
    causes = []
    for node in nodes:
        why = analysis.uncut[node].why if node in analysis.uncut else analysis.value(node).why
        if why and why not in causes:
            causes.append(why)
    positional = grown.closer in analysis.positional
    kind = "position" if positional else (kinds.most_common(1)[0][0] if kinds else "mixing")
    inputs = tuple(sorted(grown.inputs, key=order.__getitem__))
    return Region(
        grown.closer, nodes, inputs, kind, grown.closer.meta.get("path", ""), tuple(causes)
    )


def verdict(analysis: Analysis) -> Verdict:
    """Is anything that the output needs cut, wide or unknown?"""
    needed: set[fx.Node] = set()
    pending = list(analysis.graph.output_node().all_input_nodes)
    offences: list[tuple[fx.Node, str]] = []
    while pending:
        node = pending.pop()
        if node in needed:
            continue
        needed.add(node)
        why = _offence(node, analysis)
        if why:
            offences.append((node, why))
        pending.extend(value_operands(node))
    # the first that mixes; a pair of tokens alone (a mask) is only in the way
    mixing = [pair for pair in offences if pair[1] != NOT_ROWS] or offences
    offence = min(mixing, default=None)
    rows = [node for node in needed if analysis.value(node).is_row_local]
    fixed = [
        node for node in needed if analysis.value(node).is_fixed and not analysis.is_wide(node)
    ]
    text = None if offence is None else f"{offence[1]}: {describe(offence[0])}"
    return Verdict(len(needed), len(rows), len(fixed), text, offence[0] if offence else None)


NOT_ROWS = "is not one row per token"


def _offence(node: fx.Node, analysis: Analysis) -> str:
    if node in analysis.uncut:
        return analysis.uncut[node].why or "mixes tokens"
    if analysis.is_wide(node):
        value = analysis.values[node]
        first = value[0] if isinstance(value, tuple) else value
        return first.why or NOT_ROWS
    return ""
