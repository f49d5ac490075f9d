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
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A full block of tokens behind others: its name, its tokens as bytes, and the block before it."""

    key: bytes
    text: bytes
    parent: Block | None = field(repr=False)

    def is_same(self, other: Block) -> bool:
        """Whether both are one text, all the way from its start."""
        one: Block | None = self
        two: Block | None = other
        while one is not two:
            if one is None or two is None or one.text != two.text:
                return False
            one, two = one.parent, two.parent
        return True


class KeyChain:
    """The blocks of one request's tokens, each made once."""

    def __init__(self) -> None:
        self._root: Root | None = None
        self._first = b""
        self._blocks: list[Block] = []

    def upto(
        self, root: Root, tokens: Sequence[int], num_tokens: int, block_size: int
    ) -> list[Block]:
        """The full blocks among the first `num_tokens` tokens."""
        if root != self._root:
            self._root = root
            self._first = digest(json.dumps(root).encode())
            self._blocks = []
        blocks, count = self._blocks, num_tokens // block_size
        while len(blocks) < count:
            start = len(blocks) * block_size
            parent = blocks[-1] if blocks else None
            text = encode(tokens[start : start + block_size])
            key = digest(parent.key if parent else self._first, text)
            blocks.append(Block(key, text, parent))
        return blocks[:count]


def num_shared(one: Sequence[Block], two: Sequence[Block]) -> int:
    """How many blocks two chains have in common at their beginning."""
    most = min(len(one), len(two))
    # A chain that has left the other never comes back: its keys tell everything before them.
    return bisect.bisect_left(range(most), True, key=lambda at: one[at].key != two[at].key)
