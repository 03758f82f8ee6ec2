"""Copies of all ranks: each rank has slots for its part of a page, with the same numbers, and copies as rank 0 says.

Rank 0 alone knows what is where. It tells of a copy that it begins, behind the steps that were announced, and of those
that are over, ahead of the next step. There a rank that follows waits for its own: so no step reads a page that did
not arrive, or writes one that is still read. A copy that fails on a rank that follows ends the ranks.
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
from mllm_compile.runtime.tiers.layout import SlotLayout

Tell = Callable[[Iterable[memoryview]], None]


def layouts_of(runner: ModelRunner, has_states: bool) -> tuple[SlotLayout, SlotLayout]:
    """Layouts of a slot for a page of all its models, and for a request's states."""
    runners = (runner, *runner.drafters)
    pages = SlotLayout([tensor for one in runners for tensor in one.token_to_kv_pool.tensors])
    return pages, SlotLayout(runner.state_pool.tensors if has_states else [])


class RankedCopies(SlotCopies):
    """Rank 0's, of a tier without a store below; as SlotCopies.

    Args:
        tell: sends the other ranks a message, on the engine's thread. Where it fails a rank is lost, and no copy is
            over any more: each call fails from then on.
        slots: of pages and of states.
    """

    def __init__(self, tell: Tell, layouts: tuple[SlotLayout, SlotLayout], slots: tuple[int, int], device: Any) -> None:
        super().__init__(*layouts, slots[0], slots[1], device)
        self._tell = tell
        self._lost: Exception | None = None
        self._say(_packed("open", slots=list(slots)))

    def begin(self, ticket: Ticket) -> None:
        """See TierCopies.begin."""
        arrays = ticket.slots, ticket.pages.astype(np.int64)
        self._say(_packed("begin", *arrays, kind=ticket.kind, is_state=ticket.is_state))
        super().begin(ticket)

    def finished(self) -> list[Ticket]:
        """See TierCopies.finished."""
        over = super().finished()
        for kind, count in Counter(ticket.kind for ticket in over).items():
            self._say(_packed("over", kind=kind, count=count))
        return over

    def wait(self) -> None:
        """See TierCopies.wait."""
        self._check()
        super().wait()

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


class FollowedCopies:
    """Does on a rank that follows what rank 0 says."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
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
            if told["tier"] == "open":
                slots = told["slots"]
                layouts = layouts_of(self._runner, has_states=slots[1] > 0)
                self._copies = SlotCopies(*layouts, slots[0], slots[1], self._runner.device)
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
