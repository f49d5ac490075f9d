"""Operations whose result for an element or a row is the same bits at any place in a tensor of any size.

Every name stands here because a test runs it at every place of vectors, tails and strided layouts
(tests/kernels/test_invariant_places.py). A name that is missing is refused, not guessed.
"""

from __future__ import annotations

import torch
from torch import fx

from regraft.kernels.invariant import schema, trained
from regraft.passes.invariant_rules import ELEMENTWISE
from regraft.rewriter.graph import is_aten

POINTWISE = frozenset(
    """
    abs add bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clone cos div eq erf exp
    expm1 fill floor floor_divide ge gt hardtanh isfinite isinf isnan le leaky_relu log log1p logical_and logical_not
    logical_or lt masked_fill maximum minimum mul ne neg ones_like reciprocal relu remainder round rsqrt sign sin sqrt
    square sub tanh threshold trunc where zeros_like full_like _to_copy to type_as rsub log2
    """.split()
)
"""All overloads are elementwise."""

MOVING = frozenset(
    """
    alias as_strided_copy cat chunk concat constant_pad_nd contiguous copy detach diagonal embedding expand expand_as
    flatten flip full gather index index_select lift_fresh_copy masked_select movedim narrow new_full new_ones new_zeros
    ones pad permute repeat repeat_interleave reshape roll scatter select select_scatter slice slice_scatter split
    split_with_sizes squeeze stack t take_along_dim tensor_split tile tril triu transpose unbind unflatten unsqueeze
    view view_as zeros arange scalar_tensor
    """.split()
)
"""Elements are moved and made, not computed."""

ORDERED = frozenset(
    """
    all any amax amin argmax argmin cumsum cummax cummin max min bucketize searchsorted sym_size sym_numel
    """.split()
)
"""The order does not matter, or is that of the row."""

OPERATORS = frozenset(
    [f"invariant_{name}" for name in schema.GRAFTED]
    + """
    invariant_linear invariant_matmul invariant_sum invariant_softmax invariant_norm invariant_topk invariant_sort
    invariant_pointwise causal_window spread varlen_causal_window
    """.split()
    + [str(operator).split(".")[1] for operator in trained.SEQUENCES.values()]
)
"""Regraft's own."""

POWERS = (1, 2, 3)
"""Exponents that torch makes products of."""


def doubt(node: fx.Node, device: str = "cpu") -> str:
    """Why a call is not known to be invariant on a device of this type; empty if it is."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return "" if getattr(target, "__module__", "") == "_operator" else "no operator of torch's"
    if target.namespace == "regraft" and target._opname in OPERATORS:
        return ""
    if target.namespace != "aten":
        return "not known to be invariant"
    if is_aten(node, "sum", "cumsum") and not _is_floating(node.all_input_nodes[0]):
        return ""
    if is_aten(node, "add", "sub", "rsub") and node.kwargs.get("alpha", 1) != 1:
        return "a factor may be fused with the sum"
    if device == "cuda" and target._opname in ELEMENTWISE:
        return ""
    if device == "cuda" and is_aten(node, "cumsum"):
        return "a running sum whose parts depend on its shape"
    if is_aten(node, "rsqrt") and node.meta["dtype"] in (torch.float16, torch.bfloat16):
        return "rounded in two ways in half precision"
    if is_aten(node, "pow") and target._overloadname == "Tensor_Scalar":
        return "" if node.args[1] in POWERS else f"power {node.args[1]} is rounded in two ways"
    if target._opname in POINTWISE | MOVING | ORDERED:
        return ""
    return "not known to be invariant"


def _is_floating(node: fx.Node) -> bool:
    dtype = node.meta.get("dtype")
    return dtype is None or dtype.is_floating_point or dtype.is_complex
