"""Which LoRA adapters are on the device: so many slots, each with one adapter or none.

A running sequence keeps its adapter where it is; so a step never has more different adapters than there are slots. An
adapter that no running sequence uses stays in its slot until another needs it, the least recently used going first.
Workers execute in the order of steps, so a slot may be filled anew in the step after the last that uses it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict


class AdapterSlots:
    def __init__(self, count: int) -> None:
        """`count`: 0 where there are no adapters."""
        self.count = count
        self.loaded: set[int] = set()  # adapters that workers have
        self.changed = False  # a sequence that could not have a slot may get one now; reset by who looks
        self._free = list(range(count - 1, -1, -1))
        self._resident: OrderedDict[int, int] = OrderedDict()  # adapter -> slot, least recently used first
        self._users: Counter[int] = Counter()  # running sequences by adapter
        self._loads: list[tuple[int, int]] = []  # (slot, adapter) that workers have not been told

    def add(self, lora_id: int) -> None:
        self.loaded.add(lora_id)

    def forget(self, lora_id: int) -> None:
        """No sequence uses it, and none will."""
        assert not self._users[lora_id], "an adapter is unloaded while it is used"
        self.loaded.discard(lora_id)
        slot = self._resident.pop(lora_id, None)
        if slot is not None:
            self._free.append(slot)
            self.changed = True
        self._loads = [load for load in self._loads if load[1] != lora_id]

    @property
    def running(self) -> list[int]:
        """Adapters that running sequences use."""
        return sorted(lora_id for lora_id, users in self._users.items() if users)

    def can_take(self, lora_id: int) -> bool:
        """Whether a sequence with this adapter (0: none) can run now."""
        return (lora_id == 0 or lora_id in self._resident or bool(self._free)
                or any(not self._users[other] for other in self._resident))

    def take(self, lora_id: int) -> int:
        """The slot for one more running sequence; it must be to have. -1 for adapter 0."""
        if lora_id == 0:
            return -1
        slot = self._resident.get(lora_id)
        if slot is None:
            if not self._free:
                idle = next(other for other in self._resident if not self._users[other])
                self._free.append(self._resident.pop(idle))
            slot = self._resident[lora_id] = self._free.pop()
            self._loads.append((slot, lora_id))
            self.changed = True
        self._resident.move_to_end(lora_id)
        self._users[lora_id] += 1
        return slot

    def slot_of(self, lora_id: int) -> int:
        """Of a running sequence."""
        return self._resident[lora_id] if lora_id else -1

    def give(self, lora_id: int) -> None:
        """A sequence runs no longer."""
        if lora_id == 0:
            return
        self._users[lora_id] -= 1
        if not self._users[lora_id]:
            del self._users[lora_id]
            self.changed = True

    def take_loads(self) -> list[tuple[int, int]]:
        """What workers must put where before the next step, in order."""
        loads, self._loads = self._loads, []
        return loads

    def check_integrity(self) -> None:
        slots = [*self._free, *self._resident.values()]
        assert sorted(slots) == list(range(self.count)), "a slot is lost or has two adapters"
        assert set(self._users) <= set(self._resident) <= self.loaded, "an adapter runs that is not there"
