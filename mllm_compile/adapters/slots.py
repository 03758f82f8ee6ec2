"""Decides which adapters are on the device, and which requests go on: the policy alone, without tensors and threads.

A request takes a reference to its adapter's slot before it is scheduled, and gives it back when it has ended; a slot
changes hands without references. Requests of an adapter that has no slot wait, the first come first served: an unused
slot is taken, the longest unused one first. Where all are in use, the one with the fewest users drains: it gets no new
user until another adapter has it. So none waits for ever, and no request waits for an adapter that it does not use.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

A = TypeVar("A", bound=Hashable)  # an adapter
U = TypeVar("U", bound=Hashable)  # its user, a request


@dataclass(slots=True)
class _Slot(Generic[A]):
    index: int
    adapter: A | None = None
    is_loading: bool = False
    is_draining: bool = False
    num_users: int = 0
    last_used: int = 0

    @property
    def is_free(self) -> bool:
        return not self.num_users and not self.is_loading


class Granted(NamedTuple, Generic[U]):
    """A request that goes on, with the slot of its adapter."""

    user: U
    slot: int


class Load(NamedTuple, Generic[A]):
    """An adapter that is to be brought into a slot; `loaded` or `failed` follows."""

    adapter: A
    slot: int


class AdapterSlots(Generic[A, U]):
    """The slots; used by one thread.

    After each call `take_granted` and `take_loads` say what follows of it.
    """

    def __init__(self, num_slots: int) -> None:
        self._slots: list[_Slot[A]] = [_Slot(index) for index in range(num_slots)]
        self._of_user: dict[U, _Slot[A]] = {}
        # Adapter → the users that wait for it, both in the order in which they came.
        self._waiting: dict[A, dict[U, None]] = {}
        self._wanted: dict[U, A] = {}  # what each of them waits for
        self._forgotten: set[A] = set()
        self._granted: list[Granted[U]] = []
        self._loads: list[Load[A]] = []
        self._turn = 0

    # --- requests -----------------------------------------------------------------------------------------------------

    def take(self, adapter: A, user: U) -> None:
        """Asks for an adapter's slot; the user is granted it now or later."""
        self._waiting.setdefault(adapter, {})[user] = None
        self._wanted[user] = adapter
        self._plan()

    def leave(self, user: U) -> None:
        """Takes a user back that has ended, whether it was granted a slot or waits; once or often."""
        slot = self._of_user.pop(user, None)
        adapter = self._wanted.pop(user, None)
        if adapter is not None:
            del self._waiting[adapter][user]
            if not self._waiting[adapter]:
                del self._waiting[adapter]
        if slot is not None:
            slot.num_users -= 1
            self._touch(slot)
        self._plan()

    # --- adapters -----------------------------------------------------------------------------------------------------

    def place(self, adapter: A) -> int | None:
        """A slot that the caller fills with this adapter, as of a `Load`; None: none is free without a wait."""
        if any(slot.adapter == adapter for slot in self._slots) or self._homeless():
            return None
        slot = self._least_used()
        if slot is None:
            return None
        slot.adapter, slot.is_loading = adapter, True
        self._touch(slot)
        return slot.index

    def loaded(self, slot: int) -> None:
        """The adapter of a `Load` is in its slot."""
        self._slots[slot].is_loading = False
        self._plan()

    def failed(self, slot: int) -> list[U]:
        """Gives up a `Load`; returns the users that waited for its adapter, and wait no more."""
        place = self._slots[slot]
        lost = [] if place.adapter is None else self._take_waiting(place.adapter)
        place.adapter, place.is_loading = None, False
        self._plan()
        return lost

    def forget(self, adapter: A) -> None:
        """Gives the slot of an adapter back when its last user has left; nobody will ask for it any more."""
        self._forgotten.add(adapter)
        self._plan()

    # --- what follows -------------------------------------------------------------------------------------------------

    def take_granted(self) -> list[Granted[U]]:
        """The users that go on since the last call."""
        granted, self._granted = self._granted, []
        return granted

    def take_loads(self) -> list[Load[A]]:
        """The adapters that are to be loaded since the last call."""
        loads, self._loads = self._loads, []
        return loads

    @property
    def num_waiting(self) -> int:
        """Users that wait."""
        return len(self._wanted)

    @property
    def in_use(self) -> list[A]:
        """The adapters with users that go on."""
        return [slot.adapter for slot in self._slots if slot.num_users and slot.adapter is not None]

    @property
    def waited_for(self) -> list[A]:
        """The adapters that users wait for, in their order."""
        return list(self._waiting)

    # --- the policy ---------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Grants what can be granted, gives free slots to adapters without one, and lets others drain for the rest."""
        self._grant()
        self._drop_forgotten()
        homeless = self._homeless()
        while homeless and (slot := self._least_used()) is not None:
            slot.adapter, slot.is_loading, slot.is_draining = homeless.pop(0), True, False
            self._loads.append(Load(slot.adapter, slot.index))
            homeless = self._homeless()  # another one where users wait for what was in the slot
        draining = [slot for slot in self._slots if slot.is_draining]
        for slot in draining[len(homeless) :]:
            slot.is_draining = False
        for _ in range(len(homeless) - len(draining)):
            busy = [slot for slot in self._slots if slot.num_users and not slot.is_draining]
            if busy:
                min(busy, key=lambda slot: (slot.num_users, slot.last_used)).is_draining = True
        if len(draining) > len(homeless):
            self._grant()

    def _grant(self) -> None:
        for slot in self._slots:
            if slot.adapter is None or slot.is_loading or slot.is_draining:
                continue
            for user in self._take_waiting(slot.adapter):
                slot.num_users += 1
                self._of_user[user] = slot
                self._touch(slot)
                self._granted.append(Granted(user, slot.index))

    def _take_waiting(self, adapter: A) -> list[U]:
        """The users that wait for an adapter, and wait no more."""
        users = list(self._waiting.pop(adapter, ()))
        for user in users:
            del self._wanted[user]
        return users

    def _drop_forgotten(self) -> None:
        """Empties the slots of forgotten adapters without users."""
        for slot in self._slots:
            if slot.adapter in self._forgotten and slot.is_free:
                slot.adapter, slot.is_draining = None, False
        held = {slot.adapter for slot in self._slots}
        self._forgotten &= held | self._waiting.keys()

    def _homeless(self) -> list[A]:
        """Adapters that users wait for and that have no slot, in the order of these users."""
        held = {slot.adapter for slot in self._slots}
        return [adapter for adapter in self._waiting if adapter not in held]

    def _least_used(self) -> _Slot[A] | None:
        """An empty slot, else the free one that was unused for longest."""
        free = [slot for slot in self._slots if slot.is_free]
        return min(free, key=lambda slot: (slot.adapter is not None, slot.last_used), default=None)

    def _touch(self, slot: _Slot[A]) -> None:
        self._turn += 1
        slot.last_used = self._turn
