"""The words between rank 0 and a follower at its start: what ranks share, then lines of JSON, over a socket.

Descriptors in the lines are rank 0's; the follower has been given its own.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mllm_compile.runtime.json_data import from_json, parse_json
from mllm_compile.runtime.ranks.ring import RingPlace

HERE, READY = "here", "ready"  # it has its device and waits for the others; it has all that steps need
_CHUNK = 1 << 16
_MOST_BYTES = 1 << 24


@dataclass(frozen=True)
class Start:
    """A follower's orders.

    Attributes:
        folder: the runtime's.
        weights_root: the folder that weights are read from.
        config: the resolved config, as JSON.
        rank, size: which of how many it is.
        num_pages: pages of the KV cache; None: as many as fit on every rank.
        threads: of a CPU.
        ring: where steps come from.
        meeting_place: the open file without a name in which ranks of a CPU find each other.
    """

    folder: str
    weights_root: str
    config: dict[str, Any]
    rank: int
    size: int
    num_pages: int | None
    threads: int
    ring: RingPlace
    meeting_place: int

    @classmethod
    def from_line(cls, line: bytes) -> Start:
        data = parse_json(line)
        return cls(**{**data, "ring": from_json(RingPlace, data["ring"])})


@dataclass(frozen=True)
class Meeting:
    """Where ranks find each other: NCCL's id in hexadecimal; None: in the file that all have open, by gloo."""

    nccl_id: str | None = None


@dataclass(frozen=True)
class Answer:
    """A follower's news: HERE, READY, or the error that ends it, with the name of its class."""

    at: str
    error: str | None = None
    kind: str = ""


def send_shared(connection: socket.socket, start: Start) -> None:
    """Gives a follower what its group shares, ahead of its orders.

    Raises:
        OSError: nobody is there any more.
    """
    socket.send_fds(connection, [b"\n"], [start.ring.memory, start.ring.event, start.meeting_place])


def receive_shared(connection: socket.socket) -> tuple[int, int, int] | None:
    """Waits for what the group shares: the ring's memory, its event, and the meeting place; None: it does not come."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    if len(descriptors) != 3:
        return None
    memory, event, place = descriptors
    return memory, event, place


class Lines:
    """A socket with a message of JSON a line."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unread = b""

    def send(self, message: Start | Meeting | Answer) -> None:
        """
        Raises:
            OSError: nobody is there any more.
        """
        self._socket.sendall(json.dumps(asdict(message)).encode() + b"\n")

    def receive(self) -> bytes:
        """Waits for a line.

        Raises:
            EOFError: none comes any more.
        """
        while b"\n" not in self._unread:
            self._take()
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def arrived(self) -> Iterator[bytes]:
        """The lines that are there, without waiting; ends at the end of the connection."""
        self._socket.setblocking(False)
        try:
            while True:
                self._take()
        except (BlockingIOError, EOFError, OSError):
            pass
        finally:
            self._socket.setblocking(True)
        while b"\n" in self._unread:
            line, _, self._unread = self._unread.partition(b"\n")
            yield line

    def _take(self) -> None:
        data = self._socket.recv(_CHUNK)
        if not data or len(self._unread) > _MOST_BYTES:
            raise EOFError("the other end of the connection is closed")
        self._unread += data
