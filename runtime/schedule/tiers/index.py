"""The slots of one tier of memory: which page, or which state, each holds, and which is given up next.

A page is worth something only with all pages before it. So a use counts for the whole path, its end first: of the
least recently used path the last page goes first. Among the oldest ends the one goes that is computed fastest. A page
that others follow goes only while copies read all ends. Ahead of all go pages that the tier above is noted to have, the
one first that it got last. Free of torch.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

# How many of the oldest entries are compared: it bounds the host's work for each slot.
_LOOKED_AT = 16


@dataclass(slots=True, eq=False)
class Entry:
    """The content of a slot.

    Attributes:
        key: the page's; of a state the key of the last page before it.
        parent: the key of the page before; of a first page its root's.
        first: the key of the first page of the path.
        depth: tokens of the path up to its end.
        slot: where it is.
        users: copies in flight that read the slot; it stays meanwhile.
        until: time.monotonic() up to which others go first; a bias, and no promise.
        is_ended: nobody will ask for it: it goes first.
        is_below: the tier below has it, too.
    """

    key: bytes
    parent: bytes
    first: bytes
    depth: int
    slot: int
    users: int = 0
    used: float = 0.0
    until: float = 0.0
    is_ended: bool = False
    is_below: bool = False

    def cost(self, now: float) -> float:
        """The loss that giving it up is: the time that computing it takes, over the time since its use."""
        if self.is_ended:
            return 0.0
        cost = (1.0 + self.depth / 16384) / max(now - self.used, 1e-3)
        return cost * 1e6 if self.until > now else cost


class Ledger(Protocol):
    """A table of what slots hold, which outlives the process."""

    def put(self, entry: Entry) -> None:
        """Notes an entry whose slot has its content."""

    def drop(self, entry: Entry) -> None:
        """Clears an entry, ahead of its slot's next content."""

    def use(self, entry: Entry) -> None:
        """Notes when it was used."""


class TierIndex:
    """See the module's header. Used by the engine's thread alone.

    Attributes:
        evictions: entries that were given up for others.
        watch: told of a key that has an entry now (True), or has none any more.
    """

    def __init__(
        self,
        num_slots: int,
        dropped: Callable[[Entry], None] | None = None,
        owns_content: bool = True,
        ledger: Ledger | None = None,
    ) -> None:
        """
        Args:
            dropped: told of entries that are given up or forgotten.
            owns_content: False: of those alone that are forgotten on purpose.
            ledger: gets all changes.
        """
        self._ledger = ledger
        self.num_slots = num_slots
        self._dropped, self._owns_content = dropped, owns_content
        self.watch: Callable[[bytes, bool], None] | None = None
        self.evictions = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # the least recently used first
        self._children: Counter[bytes] = Counter()  # entries that follow a page
        self._above: OrderedDict[bytes, Entry] = OrderedDict()  # those that the tier above has, as it got them

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Entry]:
        """Entries, the least recently used first."""
        return iter(self._entries.values())

    @property
    def num_free(self) -> int:
        return len(self._free)

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def get_all(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """The entries of these keys; None for each that it lacks."""
        return list(map(self._entries.get, keys))

    def use(self, keys: Sequence[bytes]) -> None:
        """Counts a path of pages as used now."""
        now = time.monotonic()
        for key in reversed(keys):
            entry = self._entries.get(key)
            if entry is not None:
                entry.used, entry.is_ended = now, False
                self._entries.move_to_end(key)
                if self._ledger is not None:
                    self._ledger.use(entry)

    def bias(self, keys: Sequence[bytes], is_ended: bool, until: float) -> None:
        """Has pages go first, or behind others up to a time of time.monotonic()."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                entry.is_ended, entry.until = is_ended, until
                if self._ledger is not None:
                    self._ledger.put(entry)

    def take(self, count: int, share: float = 1.0) -> list[int]:
        """Up to `count` slots, which are the caller's until `put` or `give_back`; others' entries go for them.

        Args:
            share: of all slots, that may be taken.
        """
        others = self.num_slots - int(self.num_slots * share)
        while len(self._free) < count + others and (victim := self._victim()) is not None:
            self.evictions += 1
            self.drop(victim)
        slots = [self._free.pop() for _ in range(max(0, min(count, len(self._free) - others)))]
        return sorted(slots)  # neighbours are copied at once

    def give_back(self, slots: Iterable[int]) -> None:
        """Takes slots back that hold nothing."""
        self._free += slots

    def put(self, entry: Entry, is_above: bool = False) -> None:
        """Makes a slot that was taken an entry's, as used now; gives it back where the key has one.

        Args:
            is_above: note_above is called for it.
        """
        if entry.key in self._entries:
            self._free.append(entry.slot)
            return
        entry.used = time.monotonic()
        self._add(entry)
        if is_above:
            self._above[entry.key] = entry
        if self._ledger is not None:
            self._ledger.put(entry)
        if self.watch is not None:
            self.watch(entry.key, True)

    def restore(self, entries: Sequence[Entry]) -> None:
        """Takes entries over with their slots, the least recently used first, into an empty index."""
        taken = {entry.slot for entry in entries}
        self._free = [slot for slot in self._free if slot not in taken]
        for entry in entries:
            self._add(entry)

    def note_above(self, keys: Sequence[bytes], is_above: bool) -> None:
        """Notes that the tier above has got pages, or has given them up."""
        for key in keys:
            self._above.pop(key, None)
            if is_above and (entry := self._entries.get(key)) is not None:
                self._above[key] = entry

    def clear_above(self) -> None:
        """Notes that the tier above has nothing, or is about to."""
        self._above.clear()

    def _add(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        self._children[entry.parent] += 1

    def drop(self, entry: Entry, on_purpose: bool = False) -> None:
        """Forgets an entry that no copy reads."""
        del self._entries[entry.key]
        self._above.pop(entry.key, None)
        if self._ledger is not None:
            self._ledger.drop(entry)
        if self._dropped is not None and (self._owns_content or on_purpose):
            self._dropped(entry)
        if self.watch is not None:
            self.watch(entry.key, False)
        self._free.append(entry.slot)
        self._children[entry.parent] -= 1
        if not self._children[entry.parent]:
            del self._children[entry.parent]

    def forget(self, first: bytes) -> None:
        """Drops all paths that begin with this page."""
        for entry in [one for one in self._entries.values() if one.first == first]:
            self.drop(entry, on_purpose=True)

    def tell(self, key: bytes, is_coming: bool = False) -> None:
        """Tells who watches of an entry again, as they may not have known its tokens.

        Args:
            is_coming: it is no entry yet, and they forget its tokens before it is.
        """
        if self.watch is not None and (is_coming or key in self._entries):
            self.watch(key, True)

    def tell_gone(self, key: bytes) -> None:
        """Takes back what `tell` said of an entry that did not come."""
        if self.watch is not None and key not in self._entries:
            self.watch(key, False)

    def leave(self) -> None:
        """Tells who watches that nothing is found here any more; what there is stays."""
        watch, self.watch = self.watch, None
        if watch is not None:
            for key in self._entries:
                watch(key, False)

    def oldest(self, count: int) -> list[Entry]:
        """The entries that are given up next, of `count` that are looked at those that no copy reads."""
        return [entry for entry in islice(self._entries.values(), count) if not entry.users]

    def clear(self) -> None:
        """Drops everything."""
        for entry in list(self._entries.values()):
            self.drop(entry, on_purpose=True)

    def _victim(self) -> Entry | None:
        """The entry that goes next; None while all are read."""
        for one in islice(reversed(self._above.values()), _LOOKED_AT):
            if not one.users:
                return one
        now = time.monotonic()
        oldest = [one for one in islice(self._entries.values(), _LOOKED_AT) if not one.users]
        ends = [one for one in oldest if one.key not in self._children]
        if ends:
            return min(ends, key=lambda one: one.cost(now))
        passed: list[Entry] = []
        for one in self._entries.values():
            if one.users:
                continue
            if one.key not in self._children:
                self._reorder(passed, one)
                return one
            passed.append(one)
        return passed[0] if passed else None

    def _reorder(self, passed: Sequence[Entry], end: Entry) -> None:
        """Puts older entries that others follow where they are not looked at again for each slot: those that `end`
        alone goes on from next in line, the last one first; those that others go on from, too, behind all."""
        of_end, parent = set(), end.parent
        while self._children[parent] == 1 and parent in self._entries:
            of_end.add(parent)
            parent = self._entries[parent].parent
        for one in passed:
            if one.key in of_end:
                self._entries.move_to_end(one.key, last=False)
        for one in reversed(passed):
            if one.key not in of_end:
                self._entries.move_to_end(one.key)
