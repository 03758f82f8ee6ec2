"""Sleep over several ranks: rank 0 sends the others what it does, and waits until they have done it too."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from typing import Any

from mllm_compile.runtime.device.sleep import MemoryTag, SleepingMemory
from mllm_compile.runtime.files.json_data import parse_json

Send = Callable[[Iterable[memoryview]], None]
_BEGIN = b'{"sleep": '


class RankedMemory:
    """SleepingMemory of all ranks, for rank 0.

    Args:
        own: this rank's.
        send: has the followers take a message; from the thread of `prepare`.
        send_still: likewise, from that of `sleep` and `wake`.
        wait: returns when they have done what was sent; from any thread, while no step is sent.
    """

    def __init__(self, own: SleepingMemory, send: Send, send_still: Send, wait: Callable[[], None]) -> None:
        self._own, self._send, self._send_still, self._wait = own, send, send_still, wait

    @property
    def num_bytes(self) -> dict[MemoryTag, int]:
        """Bytes of this rank by tag."""
        return self._own.num_bytes

    def prepare(self, tags: Collection[MemoryTag], *, saves: bool) -> None:
        """Does what is slow on all ranks."""
        self._send(_packed("prepare", tags=list(tags), saves=saves))
        self._own.prepare(tags, saves=saves)
        self._wait()

    def sleep(self, tags: Collection[MemoryTag], version: int | None) -> None:
        """Gives memory back on all ranks."""
        self._send_still(_packed("sleep", tags=list(tags), version=version))
        self._own.sleep(tags, version)
        self._wait()

    def wake(self, tags: Collection[MemoryTag]) -> None:
        """Takes memory on all ranks; rank 0 first, as it alone can go on where there is too little."""
        self._own.wake(tags)
        self._send_still(_packed("wake", tags=list(tags)))
        self._wait()


def _packed(what: str, **details: Any) -> list[memoryview]:
    return [memoryview(json.dumps({"sleep": what, **details}).encode())]


def is_sleep(message: bytearray) -> bool:
    """True if it is one of these."""
    return message.startswith(_BEGIN)


def follow_sleep(message: bytearray, memory: SleepingMemory) -> None:
    """Does on a rank that follows what rank 0 says. An error here ends the rank."""
    head = parse_json(bytes(message))
    if head["sleep"] == "prepare":
        memory.prepare(head["tags"], saves=head["saves"])
    elif head["sleep"] == "sleep":
        memory.sleep(head["tags"], head["version"])
    else:
        memory.wake(head["tags"])
