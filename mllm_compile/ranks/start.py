"""The words between rank 0 and a follower at its start: lines of JSON over a socket, some with open descriptors.
Over TCP each is a sealed frame, without descriptors.

Descriptors that lines name are rank 0's; the follower gets its own with the line.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from mllm_compile.runtime.files.json_data import from_json, parse_json
from mllm_compile.runtime.ranks.ring import RingPlace
from mllm_compile.runtime.ranks.sealed import ForgedFrameError, SealedConnection

# It has its device and joins the others; it has all that steps need; on another host, it lives.
HERE, READY, BEAT = "here", "ready", "beat"
_MOST_DESCRIPTORS = 2  # of a line
_CHUNK = 1 << 16
_MOST_BYTES = 1 << 24
_LINE = 255  # a frame's kind, beside those of records (runtime/ranks/ring.py)


@dataclass(frozen=True)
class Meeting:
    """Where ranks find each other, which a follower is told first; with a descriptor of an empty file without a name,
    which all have open.

    Attributes:
        rank, size: which of how many it is.
        num_stages: of the pipeline that they are.
        device: its own.
        nccl_id: NCCL's id in hexadecimal; None: they meet in the file, by gloo.
        store: the address HOST:PORT at which ranks of several hosts meet in place of the file; None: one host has all.
        host: its own address for the others; "": that of its connection to rank 0.
    """

    rank: int
    size: int
    num_stages: int
    device: str
    nccl_id: str | None
    store: str | None = None
    host: str = ""


@dataclass(frozen=True)
class Start:
    """A follower's orders; with descriptors of the ring's memory and of its event.

    Attributes:
        folder: the runtime's.
        weights_root: the folder that weights are read from.
        config: the resolved config, as JSON.
        num_pages: pages of the KV cache; None: as many as fit on every rank.
        threads: of a CPU.
        ring: where steps come from; None: over the connection, to another host, whose own folders count.
        most_bytes: of a record.
    """

    folder: str
    weights_root: str
    config: dict[str, Any]
    num_pages: int | None
    threads: int
    ring: RingPlace | None
    most_bytes: int

    @classmethod
    def from_line(cls, line: bytes) -> Start:
        data = parse_json(line)
        return cls(**{**data, "ring": from_json(RingPlace | None, data["ring"])})


@dataclass(frozen=True)
class Answer:
    """A follower's news: HERE, READY, BEAT, or the error that ends it, with the name of its class.

    Attributes:
        when: seconds by the machine's clock: of several errors the first one has led to the others.
        began: seconds between the machine's boot and its process's begin.
        stages: of its start until READY: a name, and the seconds since `began` of its begin and end.
        read: of BEAT, the frames that it has read.
    """

    at: str
    error: str | None = None
    kind: str = ""
    when: float = 0.0
    began: float = 0.0
    stages: tuple[tuple[str, float, float], ...] = ()
    read: int = 0


class Lines:
    """A socket with a message of JSON a line. Any thread may send; one at a time receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unread = b""
        self._descriptors: list[int] = []
        self._sending = threading.Lock()

    def send(self, message: Start | Meeting | Answer, descriptors: Sequence[int] = ()) -> None:
        """
        Args:
            descriptors: open ones that the other end gets, too.

        Raises:
            OSError: nobody is there any more.
        """
        line = json.dumps(asdict(message)).encode() + b"\n"
        with self._sending:
            sent = socket.send_fds(self._socket, [line], descriptors) if descriptors else 0
            self._socket.sendall(line[sent:])

    def receive(self) -> bytes:
        """Waits for a line.

        Raises:
            EOFError: none comes any more.
        """
        while b"\n" not in self._unread:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _CHUNK, _MOST_DESCRIPTORS)
            self._descriptors += descriptors
            self._take(data)
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def descriptors(self) -> list[int]:
        """Gives the caller those that came with the lines since the last call."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def arrived(self) -> Iterator[bytes]:
        """The lines that are there, which bring no descriptors, without waiting; ends at the end of the connection."""
        with suppress(BlockingIOError, EOFError, OSError):
            while True:
                self._take(self._socket.recv(_CHUNK, socket.MSG_DONTWAIT))
        while b"\n" in self._unread:
            line, _, self._unread = self._unread.partition(b"\n")
            yield line

    def _take(self, data: bytes) -> None:
        if not data or len(self._unread) > _MOST_BYTES:
            raise EOFError("the other end of the connection is closed")
        self._unread += data


class SealedLines:
    """The same over a sealed connection, which others may use beside it."""

    def __init__(self, connection: SealedConnection) -> None:
        self._connection = connection

    def send(self, message: Start | Meeting | Answer) -> None:
        """
        Raises:
            OSError: nobody is there any more.
        """
        self._connection.send(_LINE, json.dumps(asdict(message)).encode())

    def receive(self) -> bytes:
        """Waits for a line.

        Raises:
            EOFError: none comes any more.
            ForgedFrameError: something else came.
        """
        kind, data = self._connection.receive(_MOST_BYTES)
        if kind != _LINE:
            raise ForgedFrameError(f"a frame of kind {kind} came where a line was expected")
        return bytes(data)

    def descriptors(self) -> list[int]:
        """None come over TCP."""
        return []

    def arrived(self) -> Iterator[bytes]:
        """The lines that are there, without waiting; ends at the end of the connection.

        Raises:
            ForgedFrameError: something else came.
        """
        for kind, data in self._connection.arrived(_MOST_BYTES):
            if kind != _LINE:
                raise ForgedFrameError(f"a frame of kind {kind} came where a line was expected")
            yield bytes(data)
