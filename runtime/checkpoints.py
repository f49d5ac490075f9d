"""Checkpoints: copies of recurrent states as they were behind the first tokens of some text."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Checkpoint:
    """The states behind the first `length` tokens of a text, in slot `slot` of the state pools.

    `text` are these tokens as bytes; `key` is their name, empty as long as a token of them is not read yet.
    """

    slot: int
    length: int
    key: bytes = b""
    text: bytes = b""
    num_hits: int = 0


class Checkpoints:
    """Who finds which checkpoint. Their slots are those from `first_slot` on, behind the slots of requests.

    When none is free, the least recently used checkpoint makes room. There may be no slots at all.
    """

    def __init__(self, first_slot: int, count: int) -> None:
        self.num_evictions = 0
        self._free = list(range(first_slot + count - 1, first_slot - 1, -1))
        self._named: OrderedDict[bytes, Checkpoint] = OrderedDict()

    def __len__(self) -> int:
        return len(self._named)

    @property
    def free_slots(self) -> list[int]:
        """Slots that hold no checkpoint."""
        return self._free

    def find(self, key: bytes, text: bytes) -> Checkpoint | None:
        """The checkpoint behind `text`, whose name is `key`."""
        found = self._named.get(key)
        return found if found is not None and found.text == text else None

    def has(self, key: bytes) -> bool:
        """Whether there is a checkpoint of this name."""
        return key in self._named

    def touch(self, checkpoint: Checkpoint) -> None:
        """Notes that it was used."""
        self._named.move_to_end(checkpoint.key)

    def take(self, length: int) -> Checkpoint | None:
        """A new one without a name, None if there is no room. Until it has one it is not found, and not evicted."""
        if not self._free:
            if not self._named:
                return None
            self.num_evictions += 1
            self.drop(next(iter(self._named.values())))
        return Checkpoint(self._free.pop(), length)

    def name(self, checkpoint: Checkpoint, key: bytes, text: bytes) -> bool:
        """From now on it is found. False if there is another of that name: then this one is given back."""
        if key in self._named:
            self._free.append(checkpoint.slot)
            return False
        checkpoint.key, checkpoint.text = key, text
        self._named[key] = checkpoint
        return True

    def give_back(self, checkpoint: Checkpoint) -> None:
        """Takes back one that was never named."""
        assert not checkpoint.key, "a checkpoint with a name is dropped"
        self._free.append(checkpoint.slot)

    def drop(self, checkpoint: Checkpoint) -> None:
        """Forgets a checkpoint if it is still there."""
        if self._named.get(checkpoint.key) is checkpoint:
            del self._named[checkpoint.key]
            self._free.append(checkpoint.slot)

    def drop_key(self, key: bytes) -> None:
        """Forgets the checkpoint of this name, if there is one."""
        found = self._named.get(key)
        if found is not None:
            self.drop(found)

    def clear(self) -> None:
        """Forgets all that have a name."""
        for checkpoint in list(self._named.values()):
            self.drop(checkpoint)
