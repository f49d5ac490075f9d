"""The operators without caches: whole sequences of a packed row in, their rows out, differentiable.

Every operator here is the twin of one that keeps rows or states (paged_attention, causal_conv, ...):
the same mathematics for sequences that start at their first token and leave nothing behind, as in
training, scoring and evaluation. `STATELESS` says which operator has which twin.
"""

import regraft.kernels.experts.autograd  # noqa: F401 (it registers the gradient)

from .attention import varlen_attention
from .own_gradient import enlist_backward, own_gradient
from .stop import stop_gradient
from .twins import STATELESS, WINDOWED, Twin

__all__ = [
    "STATELESS",
    "WINDOWED",
    "Twin",
    "enlist_backward",
    "own_gradient",
    "stop_gradient",
    "varlen_attention",
]
