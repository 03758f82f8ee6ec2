"""Frames over TCP between hosts, each with a MAC over its number, kind, size and data.

So none is changed, left out, repeated or put in by another on the way; nothing is encrypted. The keys, one for each
direction, follow from a session's, which the handshake gives (mllm_compile/ranks/admission.py).
"""

from __future__ import annotations

import hmac
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

_HEADER = struct.Struct("!QB")  # size and kind
_NUMBER = struct.Struct("!Q")
_MAC = 16  # bytes of HMAC-SHA256, which RFC 2104 allows to be cut to a half
_HEAD = _HEADER.size + _MAC
_CHUNK = 1 << 16


class ForgedFrameError(ValueError):
    """A frame that the other end did not send as it came."""


class SealedConnection:
    """One end of a connection. Any thread may send; one at a time receives, and always in the same of the two ways."""

    def __init__(self, connection: socket.socket, session: bytes, is_rank_0: bool) -> None:
        """
        Args:
            session: the key of both ends, used for one pair of these alone: their numbers begin at 0.
        """
        self.socket = connection
        keys = [hmac.digest(session, end, "sha256") for end in (b"frames of rank 0", b"frames to rank 0")]
        self._sending_key, self._receiving_key = keys if is_rank_0 else reversed(keys)
        self._num_sent = self._num_received = 0
        self._sending = threading.Lock()
        self._unread = bytearray()

    def send(self, kind: int, data: bytes | bytearray | memoryview) -> None:
        """Waits until it is on its way.

        Raises:
            OSError: nobody is there any more.
        """
        header = _HEADER.pack(len(data), kind)
        with self._sending:
            head = header + _mac(self._sending_key, self._num_sent, header, data)
            self._num_sent += 1
            sent = self.socket.sendmsg([head, data])
            if sent < len(head):
                self.socket.sendall(head[sent:])
            if (begun := max(0, sent - len(head))) < len(data):
                self.socket.sendall(memoryview(data)[begun:])

    def receive(self, most_bytes: int) -> tuple[int, bytearray]:
        """Waits for a frame: its kind and its data.

        Raises:
            EOFError: the other end is gone.
            ForgedFrameError: it is not what the other end sent, or larger than `most_bytes`.
        """
        head = self._exactly(_HEAD)
        size = self._checked_size(head, most_bytes)
        data = self._exactly(size)
        return self._checked(head, data), data

    def arrived(self, most_bytes: int) -> Iterator[tuple[int, bytearray]]:
        """The frames that are there, without waiting; ends at the end of the connection.

        Raises:
            ForgedFrameError: as `receive`.
        """
        with suppress(BlockingIOError, OSError):
            while came := self.socket.recv(_CHUNK, socket.MSG_DONTWAIT):
                self._unread += came
                if len(self._unread) > most_bytes:
                    break  # the rest waits for the next look
        while len(self._unread) >= _HEAD:
            head = bytes(self._unread[:_HEAD])
            end = _HEAD + self._checked_size(head, most_bytes)
            if len(self._unread) < end:
                return
            data = bytearray(self._unread[_HEAD:end])
            del self._unread[:end]
            yield self._checked(head, data), data

    def _checked_size(self, head: bytes | bytearray, most_bytes: int) -> int:
        size: int = _HEADER.unpack_from(head)[0]
        if size > most_bytes:
            raise ForgedFrameError(f"frame {self._num_received} has {size} bytes; expected at most {most_bytes}")
        return size

    def _checked(self, head: bytes | bytearray, data: bytearray) -> int:
        """The kind of the next frame, whose MAC is right."""
        header = bytes(head[: _HEADER.size])
        expected = _mac(self._receiving_key, self._num_received, header, data)
        if not hmac.compare_digest(expected, bytes(head[_HEADER.size :])):
            raise ForgedFrameError(
                f"frame {self._num_received} has another MAC than expected: it was changed on its way, or came from "
                "elsewhere. Look who is in the network between the nodes."
            )
        self._num_received += 1
        return header[-1]

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self.socket.recv_into(view)
            if not count:
                raise EOFError("the other end is gone")
            view = view[count:]
        return data


def _mac(key: bytes, number: int, header: bytes, data: bytes | bytearray | memoryview) -> bytes:
    mac = hmac.new(key, _NUMBER.pack(number) + header, "sha256")
    mac.update(data)
    return mac.digest()[:_MAC]
