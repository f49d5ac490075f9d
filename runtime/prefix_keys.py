"""Names for the beginnings of texts: a chain of digests, one for each full block of tokens.

    key[-1] = digest(root)      key[i] = digest(key[i-1], tokens of block i)

The root is all that rows depend on besides the tokens before them. Two beginnings with one name are one text under one
root; whoever looks something up by a name compares the tokens as well, so that nothing rests on the digest alone.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from array import array
from collections.abc import Sequence

Root = tuple[int, int, str | None]
"""Version of the weights, number of switch lengths that the request has passed, its `cache_salt`."""

_DIGEST_BYTES = 16


def encode(tokens: Sequence[int]) -> bytes:
    """Tokens as bytes, eight each."""
    return array("q", tokens).tobytes()


def digest(*parts: bytes) -> bytes:
    """A name of 16 bytes; all parts but the last have one length each."""
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        state.update(part)
    return state.digest()


class KeyChain:
    """The keys of one request's blocks, each computed once."""

    def __init__(self) -> None:
        self._root: Root | None = None
        self._first = b""
        self._keys: list[bytes] = []

    def upto(
        self, root: Root, tokens: Sequence[int], num_tokens: int, block_size: int
    ) -> list[bytes]:
        """The keys of the full blocks among the first `num_tokens` tokens."""
        if root != self._root:
            self._root = root
            self._first = digest(json.dumps(root).encode())
            self._keys = []
        keys, count = self._keys, num_tokens // block_size
        while len(keys) < count:
            start = len(keys) * block_size
            parent = keys[-1] if keys else self._first
            keys.append(digest(parent, encode(tokens[start : start + block_size])))
        return keys[:count]


def num_shared(one: Sequence[bytes], two: Sequence[bytes]) -> int:
    """How many blocks two chains have in common at their beginning."""
    most = min(len(one), len(two))
    # A chain that has left the other never comes back: its keys tell everything before them.
    return bisect.bisect_left(range(most), True, key=lambda at: one[at] != two[at])
