"""Sleep over several ranks: rank 0 sends the others what it does, and waits until they have done it too."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from typing import Any

from mllm_compile.runtime.device.sleep import MemoryTag, SleepingMemory
from mllm_compile.runtime.errors import DeviceMemoryError
from mllm_compile.runtime.files.json_data import parse_json

Send = Callable[[Iterable[memoryview]], None]
Agree = Callable[[Iterable[memoryview]], bool]
_BEGIN = b'{"sleep": '


class RankedMemory:
    """SleepingMemory of all ranks, for rank 0.

    Args:
        own: this rank's.
        num_local: ranks of a host, which share its memory.
        send: has the followers take a message; from the thread of `prepare`.
        send_still: likewise, from that of `sleep` and `wake`.
        wait: returns when they have done what was sent; from any thread, while no step is sent.
        agree: sends a message, and tells whether all had room for what was sent before it; from that of `prepare`.
        agree_still: likewise, from that of `wake`.
    """

    def __init__(
        self,
        own: SleepingMemory,
        num_local: int,
        send: Send,
        send_still: Send,
        wait: Callable[[], None],
        agree: Agree,
        agree_still: Agree,
    ) -> None:
        self._own, self._num_local = own, num_local
        self._send, self._send_still, self._wait = send, send_still, wait
        self._agree, self._agree_still = agree, agree_still

    @property
    def num_bytes(self) -> dict[MemoryTag, int]:
        """Bytes of this rank by tag."""
        return self._own.num_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that this rank's copies have."""
        return self._own.host_bytes

    def prepare(self, tags: Collection[MemoryTag], *, saves: bool) -> None:
        """Does what is slow on all ranks, once hosts have room for what all of them take.

        Raises:
            DeviceMemoryError: a host has too little.
        """
        self._send(_packed("check room", tags=list(tags), saves=saves, num_local=self._num_local))
        self._own.check_room(tags, saves=saves, num_ranks=self._num_local)
        self._agree_on_copies()
        self._send(_packed("prepare", tags=list(tags), saves=saves))
        self._own.prepare(tags, saves=saves)
        self._agree_on_copies()

    def _agree_on_copies(self) -> None:
        self._wait()
        if not self._agree(_packed("agree")):
            raise DeviceMemoryError(
                "the host has too little memory for the copies of a rank that follows. Free some, or use level 2."
            )

    def sleep(self, tags: Collection[MemoryTag], version: int | None) -> None:
        """Gives memory back on all ranks."""
        self._send_still(_packed("sleep", tags=list(tags), version=version))
        self._own.sleep(tags, version)
        self._wait()

    def wake(self, tags: Collection[MemoryTag]) -> None:
        """Takes memory on all ranks, or on none.

        Raises:
            DeviceMemoryError: a rank has too little.
        """
        self._own.wake(tags)
        self._send_still(_packed("wake", tags=list(tags)))
        self._wait()
        if not self._agree_still(_packed("agree")):
            self._send_still(_packed("sleep on", tags=list(tags)))
            self._own.sleep_on(tags)
            self._wait()
            raise DeviceMemoryError("a rank that follows has too little memory. Free some, and call wake_up again.")


def _packed(what: str, **details: Any) -> list[memoryview]:
    return [memoryview(json.dumps({"sleep": what, **details}).encode())]


def is_sleep(message: bytearray) -> bool:
    """True if it is one of these."""
    return message.startswith(_BEGIN)


class FollowedSleep:
    """Does on a rank that follows what rank 0 says. An error here ends the rank, but for a lack of memory, which rank 0
    asks for.

    Args:
        vote: gives this rank's number to all ranks, which give theirs.
    """

    def __init__(self, memory: SleepingMemory, vote: Callable[[int], object]) -> None:
        self._memory, self._vote = memory, vote
        self._has_room = True

    def take(self, message: bytearray) -> None:
        """Does what a message says."""
        head = parse_json(bytes(message))
        what = head["sleep"]
        if what == "agree":
            self._vote(int(self._has_room))
        elif what == "sleep":
            self._memory.sleep(head["tags"], head["version"])
        elif what == "sleep on":
            self._memory.sleep_on(head["tags"])
        else:
            self._take_memory(what, head)

    def _take_memory(self, what: str, head: dict[str, Any]) -> None:
        self._has_room = True
        try:
            if what == "check room":
                self._memory.check_room(head["tags"], saves=head["saves"], num_ranks=head["num_local"])
            elif what == "prepare":
                self._memory.prepare(head["tags"], saves=head["saves"])
            else:
                self._memory.wake(head["tags"])
        except DeviceMemoryError:
            self._has_room = False
