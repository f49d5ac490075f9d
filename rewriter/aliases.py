"""Operators of which ATen has two names, or which it makes of others: the normal form knows one name, and the parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch._ops import OpOverload
from torch.export import default_decompositions

ALIASES = {
    "absolute": "abs", "negative": "neg", "multiply": "mul", "subtract": "sub", "divide": "div", "true_divide": "div",
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
    "clip": "clamp", "fix": "trunc", "concat": "cat", "concatenate": "cat", "linalg_matmul": "matmul",
    "arccos": "acos", "arcsin": "asin", "arctan": "atan", "arctan2": "atan2", "arccosh": "acosh", "arcsinh": "asinh",
    "arctanh": "atanh", "moveaxis": "movedim", "swapaxes": "transpose", "swapdims": "transpose",
    "special_digamma": "digamma", "special_erf": "erf", "special_erfc": "erfc", "special_erfinv": "erfinv",
    "special_exp2": "exp2", "special_expit": "sigmoid", "special_expm1": "expm1", "special_gammaln": "lgamma",
    "special_log1p": "log1p", "special_log_softmax": "log_softmax", "special_logit": "logit",
    "special_logsumexp": "logsumexp", "special_psi": "digamma", "special_sinc": "sinc",
    "special_softmax": "softmax", "special_xlogy": "xlogy",
}  # fmt: skip
"""ATen's second names -> first names; the arguments are the same ones."""

COMPOSITES = """
    bilinear cdist channel_shuffle column_stack cosine_similarity cross dstack fft_fft fft_hfft fft_ifft fft_ihfft
    fft_irfft fft_rfft fliplr flipud frobenius_norm gru_cell hstack inner isclose isreal kron l1_loss
    linalg_matrix_norm linalg_multi_dot linalg_norm linalg_vecdot lstm_cell meshgrid pairwise_distance prelu
    rnn_relu_cell rnn_tanh_cell row_stack sum_to_size tensordot trapezoid trapz vstack
""".split()
"""Operators that capture takes apart. Not those whose parts would be loops over the tokens (gru, lstm)."""


def first_name(operator: OpOverload) -> OpOverload:
    """The operator under ATen's first name; itself if it has no other."""
    name = ALIASES.get(operator._opname) if operator.namespace == "aten" else None
    if name is None:
        return operator
    packet = getattr(torch.ops.aten, name)
    overload = operator._overloadname
    wanted = [str(argument.type) for argument in operator._schema.arguments]
    for each in (overload, *packet.overloads()):
        found = getattr(packet, each, None)
        if found is not None and [str(a.type) for a in found._schema.arguments] == wanted:
            return found
    return operator


@cache  # the defaults are made of all of ATen anew at each call
def taken_apart() -> dict[OpOverload, Callable[..., object]]:
    """Operator -> what to run in its place, for `ExportedProgram.run_decompositions`."""
    table = default_decompositions()
    return {operator: table[operator] for operator in table if operator._opname in COMPOSITES}
