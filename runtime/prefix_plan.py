"""Requests that begin alike, met at one time: who computes the beginning, and who waits for it.

Of many that arrive together one computes what they share, and the others wait for the step that does it. A recurrent
model needs a checkpoint where they part: the step of the first one is cut there.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from .prefix_cache import Hit, PrefixCache
from .request import Request

_LOOKAHEAD = 32
"""Waiting requests that a prompt's cuts take account of."""


def mark_cuts(
    cache: PrefixCache, request: Request, matched: int, waiting: Iterable[Request]
) -> None:
    """Notes where the steps over a request's tokens have to end, so that a checkpoint can be made there.

    Where it leaves the texts that were seen before (its first `matched` tokens were), where waiting requests leave it,
    and at the end of its prompt, from where its conversation may go on.
    """
    if not (cache.grid and cache.serves(request)):
        return
    cuts = request.prefix.cuts
    cuts.update((cache.floor(matched), cache.floor(len(request.tokens) - 1)))
    for other in islice(waiting, _LOOKAHEAD):
        if other is not request:
            cuts.add(cache.num_common(request, other))


def cut(request: Request, end: int) -> int:
    """`end`, or the first cut before it at which the request is not yet."""
    return min((at for at in request.prefix.cuts if request.num_cached < at < end), default=end)


def is_coming(cache: PrefixCache, request: Request, hit: Hit, running: Iterable[Request]) -> bool:
    """Whether a running request is about to compute what this one could use, beyond the hit that it has."""
    for other in running:
        # Those that decode are beyond what a prompt has in common with them.
        if other.num_remaining <= 1 or other.is_full or other.is_held:
            continue
        common = cache.num_common(request, other)
        will_stop = not cache.grid or common in other.prefix.cuts
        if will_stop and max(hit.length, other.num_cached) < common:
            return True
    return False
