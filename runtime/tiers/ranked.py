"""Copies of all ranks: each rank has slots for its part of a page, with the same numbers, and copies as rank 0 says.

Rank 0 alone knows what is where. It tells of a copy that it begins, behind the steps that were announced, and of those
that are over, ahead of the next step. There a rank that follows waits for its own: so no step reads a page that did
not arrive, or writes one that is still read. A copy that fails on a rank that follows ends the ranks.

With a tier below rank 0 reads and writes the slots of all (shared_slots.py). What is below is read first, and the load
begins on all ranks behind that: what was not read fails for all.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mllm_compile.runtime.errors import DeviceError
from mllm_compile.runtime.files.json_data import parse_json
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.schedule.tiers.ticket import Ticket
from mllm_compile.runtime.tiers.copies import SlotCopies
from mllm_compile.runtime.tiers.layout import ALIGNMENT, SlotLayout
from mllm_compile.runtime.tiers.shared_slots import COPIES, FollowedSlots, SharedSlots, digest_of
from mllm_compile.runtime.tiers.store_copies import TierStore
from mllm_compile.runtime.updates.live import LiveWeights
from mllm_compile.runtime.weights.sums import weight_sums

_CHECK_S = 1.0

Tell = Callable[[Iterable[memoryview]], None]


def layouts_of(runner: ModelRunner, has_states: bool) -> tuple[SlotLayout, SlotLayout]:
    """Layouts of a slot for a page of all its models, and for a request's states."""
    runners = (runner, *runner.drafters)
    pages = SlotLayout([tensor for one in runners for tensor in one.token_to_kv_pool.tensors])
    return pages, SlotLayout(runner.state_pool.tensors if has_states else [])


def sums_of(runner: ModelRunner) -> list[dict[str, int]]:
    """The sums of the weights of all models of a rank."""
    sums = []
    for one in (runner, *runner.drafters):
        assert isinstance(one.model.live, LiveWeights), "resolution/tiers.py refuses models without"
        sums.append(weight_sums(one.model.live.tensors))
    return sums


def share_slots(
    tell: Tell, layouts: tuple[SlotLayout, SlotLayout], slots: tuple[int, int], num_others: int
) -> SharedSlots:
    """Has the other ranks open slots that rank 0 maps, too, for `RankedCopies`; waits for them.

    Args:
        tell, slots: as RankedCopies has them.

    Raises:
        DeviceError: a rank is lost, or does not open them.
        OSError: the system has too little memory.
    """
    num_bytes = sum(count * layout.slot_bytes for count, layout in zip(slots, layouts, strict=True))
    shared = SharedSlots(max(num_bytes, ALIGNMENT), num_others)
    tell(_packed("open", slots=list(slots), sizes=[one.slot_bytes for one in layouts], shared=shared.place))
    shared.wait_open(lambda: tell(_packed("check")))
    return shared


class RankedCopies(SlotCopies):
    """Rank 0's; as SlotCopies.

    Args:
        tell: sends the other ranks a message, on the engine's thread. Where it fails a rank is lost, and no copy is
            over any more: each call fails from then on.
        slots: of pages and of states.
        store: the tier below; None: there is no such tier.
        shared: those slots of all ranks, where there is one.
    """

    _BELOW = ("write", "read", "lookup")

    def __init__(
        self,
        tell: Tell,
        layouts: tuple[SlotLayout, SlotLayout],
        slots: tuple[int, int],
        device: Any,
        store: TierStore | None = None,
        shared: SharedSlots | None = None,
    ) -> None:
        super().__init__(*layouts, slots[0], slots[1], device, store)
        self._tell, self._shared = tell, shared
        self._lost: Exception | None = None
        self._told = dict.fromkeys(COPIES, 0)  # that they are over
        self._needed: dict[Ticket, list[int]] = {}  # what others have to have done before a ticket
        self._reads: dict[Ticket, Ticket] = {}  # by what is read for them
        self._read: dict[Ticket, Ticket] = {}  # loads whose reads are over, by their copies
        if shared is None:
            self._say(_packed("open", slots=list(slots)))
            return
        for is_state, layout in zip((False, True), layouts, strict=True):
            pool, rows, start = self._places[is_state]
            self._places[is_state] = pool, shared.rows(layout, rows.slots.view(-1), start), start

    def begin(self, ticket: Ticket) -> None:
        """See TierCopies.begin."""
        if ticket.kind in COPIES and ticket.from_below.any():
            read = Ticket("read", ticket.entries, is_state=ticket.is_state, from_below=ticket.from_below)
            self._reads[read] = ticket
            self._begin_alone(read)
        elif ticket.kind in COPIES:
            arrays = ticket.slots, ticket.pages.astype(np.int64)
            self._say(_packed("begin", *arrays, kind=ticket.kind, is_state=ticket.is_state))
            super().begin(ticket)
        else:
            self._begin_alone(ticket)

    def _begin_alone(self, ticket: Ticket) -> None:
        """Begins what the other ranks do not take part in."""
        self._check()
        if ticket.kind != "lookup":
            self._needed[ticket] = [self._told[kind] for kind in COPIES]
        super().begin(ticket)

    def finished(self) -> list[Ticket]:
        """See TierCopies.finished."""
        over, found = super().finished(), list[Ticket]()
        for kind, count in Counter(ticket.kind for ticket in over if ticket.kind in COPIES).items():
            self._told[kind] += count
            self._say(_packed("over", kind=kind, count=count))
        for ticket in over:
            if (asked := self._reads.pop(ticket, None)) is not None:
                asked.failed, asked.seconds = ticket.failed, ticket.seconds
                copy = Ticket("load", asked.entries, asked.pages, asked.is_state)
                self._read[copy] = asked
                self.begin(copy)
            elif (asked := self._read.pop(ticket, None)) is not None:
                asked.failed |= ticket.failed
                asked.seconds += ticket.seconds
                asked.is_over = True
                found.append(asked)
            else:
                found.append(ticket)
        return found

    def _await_others(self, ticket: Ticket) -> None:
        if self._shared is not None:
            self._shared.wait_for(self._needed.pop(ticket))

    def close(self) -> None:
        """See TierCopies.close."""
        if self._shared is not None and self._lost is not None:
            self._shared.close()
        super().close()

    def wait(self) -> None:
        """See TierCopies.wait."""
        self._check()
        while not self._are_over(_CHECK_S):
            self._say(_packed("check"))  # a thread may wait for a rank that is lost

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _say(self, message: Iterable[memoryview]) -> None:
        self._check()
        try:
            self._tell(message)
        except Exception as error:
            self._lost = error
            raise


class _CountedCopies(SlotCopies):
    """Copies of a rank that follows, into slots that rank 0 maps."""

    def __init__(
        self, layouts: tuple[SlotLayout, SlotLayout], slots: list[int], device: Any, at: FollowedSlots
    ) -> None:
        self._at = at
        super().__init__(*layouts, slots[0], slots[1], device, borrowed=at.file)

    def _land(self, flight: Any) -> None:
        super()._land(flight)
        if not flight.ticket.failed.any():  # else rank 0 waits until this one has said so
            self._at.done(flight.ticket.kind)


class FollowedCopies:
    """Does on a rank that follows what rank 0 says."""

    def __init__(self, runner: ModelRunner, rank: int = 1) -> None:
        self._runner, self._rank = runner, rank
        self._copies: SlotCopies | None = None
        self._begun: dict[str, list[Ticket]] = {"load": [], "store": []}

    def take(self, message: bytearray) -> None:
        """Takes one in.

        Raises:
            DeviceError: a copy has failed.
            DeviceMemoryError: the system has too little.
        """
        start = message.index(b"\n") + 1
        told = parse_json(bytes(message[:start]))
        with self._runner.on_device():
            if told["tier"] == "check":
                return
            if told["tier"] == "open":
                self._open(told)
                return
            copies = self._copies
            assert copies is not None, "rank 0 opens ahead of all else"
            if told["tier"] == "over":
                self._wait(copies, told["kind"], told["count"])
                return
            slots, pages = np.frombuffer(message, dtype=np.int64, offset=start).reshape(2, -1)
            ticket = Ticket(told["kind"], [_entry(slot) for slot in slots.tolist()], pages.astype(np.int32))
            ticket.is_state, ticket.from_below = told["is_state"], np.zeros(len(slots), dtype=bool)
            self._begun[told["kind"]].append(ticket)
            copies.begin(ticket)

    def _open(self, told: dict[str, Any]) -> None:
        slots = told["slots"]
        layouts = layouts_of(self._runner, has_states=slots[1] > 0)
        if "shared" not in told:
            self._copies = SlotCopies(*layouts, slots[0], slots[1], self._runner.device)
            return
        sizes = [one.slot_bytes for one in layouts]
        if sizes != told["sizes"]:
            raise DeviceError(f"a page and a state take {sizes} bytes here, and {told['sizes']} on rank 0")
        at = FollowedSlots(told["shared"], self._rank)
        self._copies = _CountedCopies(layouts, slots, self._runner.device, at)
        at.opened(digest_of(sums_of(self._runner)))

    def _wait(self, copies: SlotCopies, kind: str, count: int) -> None:
        """Waits for the first copies of a kind."""
        over, self._begun[kind] = self._begun[kind][:count], self._begun[kind][count:]
        copies.wait_for_tickets(over)
        copies.finished()
        if any(ticket.failed.any() for ticket in over):
            raise DeviceError("a copy between the KV cache and the memory of runtime.kv_offloading_size has failed")


def _entry(slot: int) -> Entry:
    return Entry(b"", b"", b"", 0, slot)


def _packed(what: str, *arrays: np.ndarray, **details: Any) -> list[memoryview]:
    """A line of JSON, its length a multiple of 8, and arrays of int64 behind it."""
    head = json.dumps({"tier": what, **details}).encode()
    head += b" " * (-(len(head) + 1) % 8) + b"\n"
    return [memoryview(head), *(memoryview(one.tobytes()) for one in arrays if one.size)]
