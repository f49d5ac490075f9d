"""Expert routing: weights gathered per token and multiplied -> one operator that sorts the rows by expert.

    before   bmm(index(W [E, out, in], [ids]), unsqueeze(x, -1)) -> squeeze     (and the transposed form)
    after    regraft.expert_linear(x, W, ids)

The captured form copies a matrix per token, which is row-local by plain algebra and so can be proven; the operator
computes the same rows without the copies. Not for a W that depends on tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from regraft.kernels.experts import expert_linear
from regraft.rewriter.graph import CapturedGraph, is_aten, shape_of
from regraft.rewriter.pipeline import GraphPass


@dataclass(frozen=True)
class Routed:
    """One gathered matmul: `result [S, out]` from rows `x [S, in]` and `weight[ids]`."""

    result: fx.Node
    x: fx.Node
    weight: fx.Node
    ids: fx.Node
    transposed: bool


def pattern(node: fx.Node) -> Routed | None:
    """Match at the squeeze behind the bmm."""
    if not is_aten(node, "squeeze") or not is_aten(node.args[0], "bmm", "matmul"):
        return None
    product = node.args[0]
    assert isinstance(product, fx.Node)
    left, right = product.args[:2]
    dim = node.args[1] if len(node.args) > 1 else None
    if _gathered(left) and _unsqueezed(right, -1) and dim in (-1, 2, [-1], [2]):
        return _routed(node, left, right, transposed=False)
    if _gathered(right) and _unsqueezed(left, 1) and dim in (1, [1]):
        return _routed(node, right, left, transposed=True)
    return None


def _gathered(node: object) -> bool:
    if not is_aten(node, "index"):
        return False
    assert isinstance(node, fx.Node)
    weight, indices = node.args[:2]
    return (
        isinstance(weight, fx.Node)
        and weight.op == "get_attr"
        and isinstance(indices, (list, tuple))
        and len(indices) == 1
        and isinstance(indices[0], fx.Node)
        and len(shape_of(weight)) == 3
        and len(shape_of(indices[0])) == 1
    )


def _unsqueezed(node: object, dim: int) -> bool:
    if not is_aten(node, "unsqueeze"):
        return False
    assert isinstance(node, fx.Node)
    at = node.args[1]
    assert isinstance(at, int) and isinstance(node.args[0], fx.Node)
    ndim = len(shape_of(node.args[0])) + 1
    return len(shape_of(node.args[0])) == 2 and at % ndim == dim % ndim


def _routed(result: fx.Node, gathered: object, rows: object, *, transposed: bool) -> Routed:
    assert isinstance(gathered, fx.Node) and isinstance(rows, fx.Node)
    weight, (ids,) = gathered.args[:2]
    x = rows.args[0]
    assert isinstance(weight, fx.Node) and isinstance(ids, fx.Node) and isinstance(x, fx.Node)
    return Routed(result, x, weight, ids, transposed)


def run(captured: CapturedGraph) -> int:
    """Rewrite every match; returns how many."""
    found = [match for node in captured.graph.nodes if (match := pattern(node))]
    for routed in found:
        with captured.graph.inserting_before(routed.result):
            node = captured.graph.call_function(
                expert_linear._opoverload,
                (routed.x, routed.weight, routed.ids, routed.transposed),
            )
        node.meta.update(routed.result.meta)
        routed.result.replace_all_uses_with(node)
    return len(found)


PASS = GraphPass("experts", run)
