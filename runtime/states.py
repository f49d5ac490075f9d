"""State slots: where a running request keeps what has one fixed size whatever its length."""

from __future__ import annotations


class SlotPool:
    """Numbers of free slots. Slot 0 is scratch: padding writes there and no request owns it.

    Nothing is zeroed when a slot changes hands: operators start from zero where `context_lens`
    is 0, whatever the slot holds.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, 0, -1))

    @property
    def num_free(self) -> int:
        """Slots that a request can still be given."""
        return len(self._free)

    def take(self) -> int:
        """Hands out a slot. Ask `num_free` first."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Takes a slot back."""
        assert 0 < slot < self.num_slots, f"slot {slot} belongs to nobody"
        self._free.append(slot)
        assert len(self._free) < self.num_slots, "a slot was given back twice"
