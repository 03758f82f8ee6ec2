"""The words of two engines that have met: questions for pages or states, by their keys, and the answers.

A question is a header and keys. All sizes are bounded, and known to both from the header: no length is believed.

| kind | answer |
| --- | --- |
| LOOKUP | a byte for each key: 1, it is there |
| LOAD | for each key a flag, a sum and the value; then a byte for each: 1, it was there until now |
| MAP | for each key a flag and where its value begins in the memory that both map |
| HELD | a byte for each key of the last MAP: 1, it was there until now |
"""

from __future__ import annotations

import socket
import struct
import time
import zlib
from collections.abc import Iterator, Sequence

from mllm_compile.process.shared_secret import read_exactly, wait_until

LOOKUP, LOAD, MAP, HELD = range(1, 5)
MOST_KEYS = 4096  # of a question
KEY_BYTES = 16
VALUE_HEAD = struct.Struct("!BI")  # flag, sum
PLACE_HEAD = struct.Struct("!BQ")  # flag, offset
_HEADER = struct.Struct("!BBH")  # kind, is_state, count
_SLOWEST = 10e6  # bytes a second


def ask(connection: socket.socket, kind: int, is_state: bool, keys: Sequence[bytes], until: float) -> None:
    """Sends a question."""
    wait_until(connection, until)
    connection.sendall(_HEADER.pack(kind, is_state, len(keys)) + b"".join(keys))


def read_question(connection: socket.socket, idle_s: float, within_s: float) -> tuple[int, bool, list[bytes]] | None:
    """The next question; None: the other end has left, or says nothing.

    Args:
        idle_s: it may begin so late.
        within_s: it is whole so long behind its beginning.

    Raises:
        ValueError: it is no question.
        OSError, EOFError: the other end is gone.
    """
    connection.settimeout(idle_s)
    try:
        first = connection.recv(1)
    except TimeoutError:
        return None
    if not first:
        return None
    until = time.monotonic() + within_s
    kind, is_state, count = _HEADER.unpack(first + read_exactly(connection, _HEADER.size - 1, until))
    if kind not in (LOOKUP, LOAD, MAP, HELD) or is_state > 1 or count > MOST_KEYS or (kind == HELD) != (count == 0):
        raise ValueError(f"a question of kind {kind}, {is_state} and {count} keys")
    data = read_exactly(connection, count * KEY_BYTES, until)
    return kind, bool(is_state), [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]


def read_flags(connection: socket.socket, count: int, until: float) -> list[bool]:
    """So many flags."""
    return [one == 1 for one in read_exactly(connection, count, until)]


def read_places(connection: socket.socket, count: int, until: float) -> Iterator[tuple[bool, int]]:
    """So many flags and offsets."""
    data = read_exactly(connection, count * PLACE_HEAD.size, until)
    return ((flag == 1, offset) for flag, offset in PLACE_HEAD.iter_unpack(data))


def read_into(connection: socket.socket, value: memoryview, until: float) -> None:
    """Fills a value.

    Raises:
        TimeoutError, OSError, EOFError: as read_exactly.
    """
    while value:
        wait_until(connection, until)
        count = connection.recv_into(value)
        if not count:
            raise EOFError("the connection was closed")
        value = value[count:]


def sum_of(key: bytes, value: memoryview) -> int:
    """32 bits over a key and its value; they find damage, not forgery."""
    return zlib.crc32(value, zlib.crc32(key))


def seconds_for(num_bytes: int) -> float:
    """The time that so many bytes may take beside all else."""
    return num_bytes / _SLOWEST
